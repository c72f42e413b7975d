"""Interleaved measurement of one piece of work on both sides.

A benchmark yields `Case` objects. Each side of a case is a function that does
the work once and returns how long it took; `Jobs` helps where the sides are
processes that stay alive between rounds:

    def cases(setup):
        ours = Job([setup.program("bench_sum")], ranks=2)
        theirs = Job([sys.executable, setup.peers / "sum.py"], ranks=2)
        with ours, theirs:
            yield Case(
                "sum/4KB/2ranks", "time", "us",
                ours=lambda: ours.ask("4096 100").slowest("us"),
                peers={"gloo": lambda: theirs.ask("4096 100").slowest("us")},
            )
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable


@dataclasses.dataclass
class Setup:
    """Where things are, and what the report should mention."""

    build: pathlib.Path
    peers: pathlib.Path
    notes: list[str] = dataclasses.field(default_factory=list)

    def program(self, name):
        """One of our programs; where it is missing the run ends."""
        path = self.build / "bin" / name
        if not path.exists():
            sys.exit(f"{path} is missing: build it first")
        return path

    def optional_program(self, name, why):
        """The same, or None and a note that says why the peer is left out."""
        path = self.build / "bin" / name
        if path.exists():
            return path
        self.notes.append(why)
        return None


@dataclasses.dataclass
class Row:
    """One case against one peer. A ratio above 1 means that ours is better."""

    case: str
    metric: str
    unit: str
    ours: list[float]
    peer: list[float]
    peer_name: str
    ratios: list[float]

    @property
    def ratio(self):
        return statistics.median(self.ratios)

    @property
    def interval(self):
        """95 % interval of the median, by order statistics."""
        values = sorted(self.ratios)
        n = len(values)
        # The median lies outside [values[k], values[-1 - k]] when at most k of
        # n fair coins show heads, or tails.
        outside = itertools.accumulate(
            2 * math.comb(n, k) / 2**n for k in range(n // 2)
        )
        cut = sum(probability <= 0.05 for probability in outside) - 1
        return values[cut], values[-1 - cut]


@dataclasses.dataclass
class Measured:
    rows: list[Row]
    valid: bool


@dataclasses.dataclass
class Case:
    """A piece of work, done by us and by each peer.

    ours, peers: run it once and return a value in `unit`; less is better,
    unless more_is_better. check: runs after the rounds and returns what
    differs between the sides, or None; a difference voids the case.
    """

    name: str
    metric: str
    unit: str
    ours: Callable[[], float]
    peers: dict[str, Callable[[], float]]
    check: Callable[[], str | None] = lambda: None
    more_is_better: bool = False

    def measure(self, rounds):
        sides = {"": self.ours, **self.peers}
        for run in sides.values():  # warm up
            run()
        values = {name: [] for name in sides}
        names = list(sides)
        for i in range(rounds):
            # Each side takes each place in a round.
            first = i % len(names)
            for name in names[first:] + names[:first]:
                values[name].append(sides[name]())
            print(f"\r{self.name}: round {i + 1}/{rounds}", end="", flush=True)
        print()

        if difference := self.check():
            print(f"{self.name}: VOID, {difference}")
            return Measured([], False)
        ours = values.pop("")
        rows = []
        for name, peer in values.items():
            pairs = zip(ours, peer)
            if self.more_is_better:
                ratios = [a / b for a, b in pairs]
            else:
                ratios = [b / a for a, b in pairs]
            rows.append(
                Row(self.name, self.metric, self.unit, ours, peer, name, ratios)
            )
        return Measured(rows, True)


_PER_SECOND = {"s": 1, "ms": 1e3, "us": 1e6}


class Replies(list):
    """What the ranks of a job answered, by rank."""

    def slowest(self, unit):
        """The largest of the ranks' `seconds`, in `unit`."""
        return max(reply["seconds"] for reply in self) * _PER_SECOND[unit]


class Job:
    """Ranks of one program that answer commands until the job is closed.

    Each rank reads one command per line from stdin, and answers with one line
    of JSON on stdout. Ranks find each other by RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT and run with one thread each, unless `env` says otherwise.
    Between commands they block on stdin, so that the other side has the
    machine to itself.
    """

    def __init__(self, command, ranks, env=None):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._processes = []
        for rank in range(ranks):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            self._processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    bufsize=1,
                )
            )

    def ask(self, command, timeout=120):
        """Sends a line to every rank and returns their Replies."""
        for process in self._processes:
            process.stdin.write(f"{command}\n")
            process.stdin.flush()
        deadline = time.monotonic() + timeout
        return Replies(
            self._answer(process, command, deadline)
            for process in self._processes
        )

    @staticmethod
    def _answer(process, command, deadline):
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0, deadline - time.monotonic())):
                raise TimeoutError(f"no answer to {command!r} from {process.args}")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{process.args} ended with {process.wait(10)} at {command!r}"
            )
        return json.loads(line)

    def close(self):
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def seconds_to_run(command, env=None, timeout=120):
    """Runs a command line to its end; one that fails raises."""
    start = time.perf_counter()
    subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        timeout=timeout,
        check=True,
    )
    return time.perf_counter() - start


def find_tool(name):
    """A program beside this Python, else in PATH."""
    beside = pathlib.Path(sys.executable).with_name(name)
    return beside if beside.exists() else shutil.which(name)
