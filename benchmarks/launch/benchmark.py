"""Starting two ranks that do nothing but meet: init, barrier, destroy."""

from harness import Case, find_tool, seconds_to_run

RANKS = 2


def cases(setup):
    ours = [
        setup.program("lockstep"),
        *("run", "--nproc-per-node", RANKS),
        setup.program("bench_noop"),
    ]
    torchrun = [
        find_tool("torchrun"),
        *("--standalone", "--nproc-per-node", RANKS),
        setup.peers / "noop.py",
    ]
    threads = {"OMP_NUM_THREADS": "1"}
    yield Case(
        f"noop/{RANKS}ranks",
        "time",
        "s",
        ours=lambda: seconds_to_run(ours, threads),
        peers={"torchrun": lambda: seconds_to_run(torchrun, threads)},
    )
