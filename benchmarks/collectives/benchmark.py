"""all_reduce of float32 on two ranks of one host."""

import json
import os
import subprocess
import sys

from harness import Case, Job, Replies

SIZES = {"4KB": 4 << 10, "64KB": 64 << 10, "1MB": 1 << 20, "100MB": 100 << 20}
RANKS = 2
ROUND_SECONDS = 0.3


class MpiJob:
    """Starts anew for each command: idle ranks would poll."""

    def __init__(self, program):
        self._command = ["mpirun", "-n", str(RANKS), "--oversubscribe", program]
        self._env = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def ask(self, command):
        done = subprocess.run(
            [*map(str, self._command), *command.split()],
            env=self._env,
            stdout=subprocess.PIPE,
            timeout=120,
            check=True,
        )
        return Replies(map(json.loads, done.stdout.splitlines()))


class Side:
    """One side of a case, with as many operations per round as fill it."""

    def __init__(self, job, size):
        self._job = job
        self._size = size
        self.wrong = False
        seconds = self._ask(3).slowest("s")
        self._operations = min(max(int(ROUND_SECONDS / seconds), 3), 20_000)

    def _ask(self, operations):
        replies = self._job.ask(f"{self._size} {operations}")
        self.wrong |= not all(reply["correct"] for reply in replies)
        return replies

    def __call__(self):
        return self._ask(self._operations).slowest("us")


def cases(setup):
    ours = Job([setup.program("bench_all_reduce")], RANKS)
    gloo = Job(
        [sys.executable, setup.peers / "all_reduce.py"],
        RANKS,
        {"GLOO_SOCKET_IFNAME": "lo"},
    )
    jobs = {"gloo": gloo}
    if mpi := setup.optional_program(
        "peer_all_reduce_mpi", "openmpi is left out: MPI was not found"
    ):
        jobs["openmpi"] = MpiJob(mpi)
    with ours, gloo:
        for label, size in SIZES.items():
            side = Side(ours, size)
            peers = {name: Side(job, size) for name, job in jobs.items()}

            def check(sides={"ours": side, **peers}):
                wrong = [name for name, side in sides.items() if side.wrong]
                return f"wrong sums from {wrong}" if wrong else None

            yield Case(
                f"all_reduce/{label}/{RANKS}ranks", "time", "us", side, peers, check
            )
