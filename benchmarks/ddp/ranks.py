"""Processes that wait for `round N` on stdin and answer with one JSON line.

They stay alive between rounds, so that two sides can be timed in turn without
their start-up, and sleep while the other side runs.
"""

import json
import os
import select
import socket
import subprocess
import time

START_LIMIT = 180
ROUND_LIMIT = 300


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Ranks:
    """`world` processes of one command under env://. Use with `with`."""

    def __init__(self, command, world, threads=1, environment=None):
        port = _free_port()
        self._command = command
        self._processes = []
        for rank in range(world):
            env = dict(
                os.environ,
                OMP_NUM_THREADS=str(threads),
                RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                **(environment or {}),
            )
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=env,
                    text=True,
                )
            )
        for process in self._processes:
            self._answer(process, START_LIMIT)

    def round(self, steps):
        """Runs `steps` steps on all ranks and returns rank 0's answer."""
        for process in self._processes:
            process.stdin.write(f"round {steps}\n")
            process.stdin.flush()
        answers = [self._answer(p, ROUND_LIMIT) for p in self._processes]
        return answers[0]

    def _answer(self, process, limit):
        end = time.monotonic() + limit
        while True:
            ready, _, _ = select.select(
                [process.stdout], [], [], max(0, end - time.monotonic())
            )
            line = process.stdout.readline() if ready else ""
            if line.startswith("{"):
                return json.loads(line)
            if not line:
                raise RuntimeError(
                    f"{' '.join(self._command)}: no answer within {limit} s, "
                    f"exit code {process.poll()}"
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
