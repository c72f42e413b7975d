"""Every public header compiles alone and reaches no heavy libtorch header."""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support import JOBS, SOURCE

INCLUDE = SOURCE / "include"
HEADERS = sorted(
    str(path.relative_to(INCLUDE)) for path in INCLUDE.rglob("*.h")
)
TORCH = pathlib.Path(os.environ["Torch_DIR"]).parents[2]
# Headers of these layers know nothing of libtorch.
WITHOUT_TORCH = re.compile(r"lockstep/(core|launch)/")
# Only these may need modules.
WITH_MODULES = re.compile(r"lockstep/(nn|checkpoint)/|lockstep/lockstep\.h")
TOO_HEAVY = re.compile(r"/torch/torch\.h|/c10d/")
MODULES = re.compile(r"/torch/nn/module\.h")


def compile_alone(header):
    """Returns the compiler's exit code and messages, and what it included."""
    command = [os.environ["CXX"], "-std=c++20", "-Wall", "-Wextra", "-Werror"]
    command += ["-fsyntax-only", "-H", "-x", "c++", f"-I{INCLUDE}"]
    for folder in ("include", "include/torch/csrc/api/include"):
        command += ["-isystem", str(TORCH / folder)]
    done = subprocess.run(
        [*command, "-"],
        input=f"#include <{header}>\n#include <{header}>\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = done.stderr.splitlines()
    reached = [line for line in lines if re.match(r"\.+ ", line)]
    messages = [line for line in lines if not re.match(r"[.!x]+ ", line)]
    return done.returncode, "\n".join(messages), reached


class Headers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with concurrent.futures.ThreadPoolExecutor(int(JOBS)) as pool:
            cls.results = dict(zip(HEADERS, pool.map(compile_alone, HEADERS)))

    def check(self, header):
        code, messages, reached = self.results[header]
        self.assertEqual(code, 0, messages)
        self.assertFalse([x for x in reached if TOO_HEAVY.search(x)])
        if not WITH_MODULES.match(header):
            self.assertFalse([x for x in reached if MODULES.search(x)])
        if WITHOUT_TORCH.match(header):
            self.assertFalse([x for x in reached if str(TORCH) in x])

    def test_one_header_includes_all(self):
        _, _, reached = self.results["lockstep/lockstep.h"]
        found = "\n".join(reached)
        for header in HEADERS:
            if header not in ("lockstep/lockstep.h",):
                self.assertIn(header, found)


def add_test(header):
    name = "test_" + re.sub(r"\W", "_", header.removesuffix(".h"))
    setattr(Headers, name, lambda self: self.check(header))


for each in HEADERS:
    add_test(each)
