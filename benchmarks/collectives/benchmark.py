"""The collectives with float32 on two ranks of one host."""

import json
import os
import subprocess
import sys

from harness import Case, Job, Replies

SIZES = {
    "4KB": 4 << 10,
    "16KB": 16 << 10,
    "64KB": 64 << 10,
    "256KB": 256 << 10,
    "1MB": 1 << 20,
    "4MB": 4 << 20,
    "100MB": 100 << 20,
}
OPERATIONS = {
    "all_reduce": list(SIZES),
    "broadcast": ["4KB", "64KB", "1MB", "100MB"],
    "all_gather": ["4KB", "64KB", "1MB", "100MB"],
    "reduce_scatter": ["4KB", "64KB", "1MB", "100MB"],
    "all_to_all": ["4KB", "64KB", "1MB", "100MB"],
    "send_recv": ["4KB", "64KB", "1MB", "100MB"],  # there and back
    "reduce": ["1MB"],
    "gather": ["1MB"],
    "scatter": ["1MB"],
}
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
    """One side of a case, with as many repetitions per round as fill it."""

    def __init__(self, job, operation, size):
        self._job = job
        self._work = f"{operation} {SIZES[size]}"
        self.wrong = False
        seconds = self._ask(3).slowest("s")
        self._count = min(max(int(ROUND_SECONDS / seconds), 3), 20_000)

    def _ask(self, count):
        replies = self._job.ask(f"{self._work} {count}")
        self.wrong |= not all(reply["correct"] for reply in replies)
        return replies

    def __call__(self):
        return self._ask(self._count).slowest("us")


def cases(setup):
    ours = Job([setup.program("bench_collectives")], RANKS)
    gloo = Job(
        [sys.executable, setup.peers / "collectives.py"],
        RANKS,
        {"GLOO_SOCKET_IFNAME": "lo"},
    )
    jobs = {"gloo": gloo}
    if mpi := setup.optional_program(
        "peer_collectives_mpi", "openmpi is left out: MPI was not found"
    ):
        jobs["openmpi"] = MpiJob(mpi)
    with ours, gloo:
        for operation, sizes in OPERATIONS.items():
            for size in sizes:
                yield case(f"{operation}/{size}/{RANKS}ranks", operation, size, ours, jobs)


def case(name, operation, size, ours, jobs):
    side = Side(ours, operation, size)
    peers = {name: Side(job, operation, size) for name, job in jobs.items()}

    def check():
        sides = {"ours": side, **peers}
        wrong = [name for name, side in sides.items() if side.wrong]
        return f"wrong results from {wrong}" if wrong else None

    return Case(name, "time", "us", side, peers, check)
