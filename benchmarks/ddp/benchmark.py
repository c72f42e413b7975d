"""Training steps under DistributedDataParallel, beside PyTorch's over Gloo.

Both sides start from the same parameters, see the same batches, and use SGD
with one thread a rank. PyTorch gets gradient_as_bucket_view and static_graph;
`pytorch-tuned` also the two settings of glibc's allocator that spare it the
page faults of large tensors. `independent` is two processes that train at once
by themselves: what the machine allows two ranks. Every round starts with steps that are not timed,
since the other sides had the caches before. Where losses or parameters differ
after the rounds the case is void.
"""

import sys

from harness import Case, Job

# Case: (steps that are not timed, steps that are) in a round. An epoch of the
# seed loop has 40.
STEPS = {
    "mlp-b64": (60, 300),
    "linear-b256": (100, 500),
    "seed-loop": (40, 80),
    "cnn-b64": (1, 5),
    "mlp21m-b32": (1, 5),
}
TUNED = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:"
    "glibc.malloc.trim_threshold=17179869184"
}


class Side:
    """One side's job; remembers its last answers for the comparison."""

    def __init__(self, command, name, mode, ranks, env=None):
        self._job = Job([*command, name, mode], ranks, env)
        self.shares_gradients = mode == "ddp" or ranks == 1
        self._warm_up, self._steps = STEPS[name]
        self.answers = []
        self.last = None

    def __call__(self):
        self._job.ask(str(self._warm_up), timeout=300)
        self.answers = self._job.ask(str(self._steps), timeout=300)
        self.last = self.answers[0]
        return self.last["us_per_step"]

    def ranks_differ(self):
        return len({answer["parameters"] for answer in self.answers}) > 1

    def close(self):
        self._job.close()


def differs(ours, peers):
    """What differs after equally many steps, or None."""
    if ours.ranks_differ():
        return f"parameters differ between ranks: {ours.answers}"
    for name, peer in peers.items():
        if not peer.shares_gradients:
            continue
        for key, tolerance in (
            ("first_loss", 1e-3),
            ("last_loss", 1e-3),
            ("parameters", 1e-4),
        ):
            a, b = ours.last[key], peer.last[key]
            if abs(a - b) > tolerance * max(abs(a), abs(b)):
                return f"{key}: {a} here, {b} of {name}"
    return None


def side_by_side(name, metric, ours, peers):
    try:
        yield Case(
            name,
            metric,
            "us",
            ours=ours,
            peers=peers,
            check=lambda: differs(ours, peers),
        )
    finally:
        for side in (ours, *peers.values()):
            side.close()


def cases(setup):
    program = [setup.program("bench_ddp_steps")]
    python = [sys.executable, setup.peers / "ddp_steps.py"]
    for name in STEPS:
        yield from side_by_side(
            name,
            "step, 2 ranks",
            Side(program, name, "ddp", 2),
            {
                "pytorch-ddp-gloo": Side(python, name, "ddp", 2),
                "pytorch-tuned": Side(python, name, "ddp", 2, TUNED),
                "independent": Side(program, name, "bare", 2),
            },
        )
        if name == "seed-loop":
            continue
        yield from side_by_side(
            name,
            "step, 1 process",
            Side(program, name, "ddp", 1),
            {
                "bare": Side(program, name, "bare", 1),
                "pytorch": Side(python, name, "bare", 1),
                "pytorch-2-threads": Side(
                    python, name, "bare", 1, {"OMP_NUM_THREADS": "2"}
                ),
                "pytorch-tuned": Side(python, name, "bare", 1, TUNED),
            },
        )
