"""Runs benchmarks beside their peers and reports the ratios.

usage: run.py BUILD [NAME ...] [--out FOLDER] [--rounds N]

BUILD is a CMake build folder (release), NAME a folder beside this file with a
benchmark.py; none means all. The Python that runs this script runs the PyTorch
peers. For each benchmark FOLDER gets NAME.json (the rows), NAME.txt (the table,
with machine, versions, date and command) and NAME.svg.

A benchmark is a module benchmarks/NAME/benchmark.py with one function,
`cases(setup)`, that yields `harness.Case` objects; see benchmarks/support.
"""

import argparse
import importlib.util
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "support"))

import harness  # noqa: E402
import report  # noqa: E402


def load(name):
    path = HERE / name / "benchmark.py"
    if not path.exists():
        known = sorted(found.parent.name for found in HERE.glob("*/benchmark.py"))
        sys.exit(f"there is no benchmark {name!r}; there are: {', '.join(known)}")
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=pathlib.Path, default="build/bench")
    parser.add_argument("--rounds", type=int, default=11, help="at least 9")
    options = parser.parse_args()
    if options.rounds < 9:
        parser.error("--rounds must be at least 9")

    names = options.names or sorted(
        found.parent.name for found in HERE.glob("*/benchmark.py")
    )
    benchmarks = {name: load(name) for name in names}
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    for name, benchmark in benchmarks.items():
        setup = harness.Setup(
            build=options.build.resolve(), peers=HERE / "peers"
        )
        rows = []
        for case in benchmark.cases(setup):
            measured = case.measure(options.rounds)
            rows += measured.rows
            good &= measured.valid
        report.write(options.out, name, rows, setup.notes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
