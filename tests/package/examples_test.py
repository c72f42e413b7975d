"""The examples under each launcher, with Python's torch as the oracle."""

import concurrent.futures
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

from safetensors.torch import load_file

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support import BUILD, CMAKE, JOBS, SOURCE, build_project, run

HERE = pathlib.Path(__file__).parent
BIN = BUILD / "bin"
TORCHRUN = pathlib.Path(sys.executable).parent / "torchrun"
# Each starts two ranks.
LAUNCHERS = {
    "lockstep_run": (BIN / "lockstep", "run", "--nproc-per-node", 2),
    "torchrun": (
        TORCHRUN, "--standalone", "--no-python", "--nproc-per-node", 2,
    ),
    "mpirun": ("mpirun", "--oversubscribe", "-n", 2),
}
# The same on every launcher, so that all compute with the same kernels.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHON_EXEC": sys.executable,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def train(*command):
    """Runs a training program; returns its final loss and its model."""
    with tempfile.TemporaryDirectory() as folder:
        output = run(*command, cwd=folder, env=ENVIRONMENT, timeout=120)
        losses = re.findall(r"final loss ([\d.]+)", output)
        assert len(losses) == 1, output
        return float(losses[0]), load_file(f"{folder}/model.safetensors")


class SeedLoop(unittest.TestCase):
    oracles = {}

    def oracle(self, ranks):
        if ranks not in self.oracles:
            self.oracles[ranks] = train(
                TORCHRUN,
                "--standalone",
                f"--nproc-per-node={ranks}",
                HERE / "seed_loop.py",
            )
        return self.oracles[ranks]

    def check(self, ranks, *command):
        loss, model = train(*command)
        expected_loss, expected_model = self.oracle(ranks)
        self.assertAlmostEqual(loss, expected_loss, delta=1e-6)
        self.assertEqual(model.keys(), expected_model.keys())
        for name, value in model.items():
            difference = (value - expected_model[name]).abs().max().item()
            self.assertLess(difference, 1e-6, name)

    def test_spawn_bare(self):
        self.check(4, BIN / "spawn")

    def test_launch_bare(self):
        self.check(1, BIN / "launch")

    def test_lockstep_run_of_the_python_program(self):
        self.check(2, *LAUNCHERS["lockstep_run"], HERE / "seed_loop.py")


def add_launched_test(program, launcher, command):
    def test(self):
        self.check(2, *command, BIN / program)

    setattr(SeedLoop, f"test_{program}_under_{launcher}", test)


for each in ("spawn", "launch"):
    for launcher, command in LAUNCHERS.items():
        add_launched_test(each, launcher, command)


class Digits(unittest.TestCase):
    def train(self, *launcher):
        with tempfile.TemporaryDirectory() as folder:
            output = run(
                *launcher,
                BIN / "digits",
                SOURCE / "data/digits",
                cwd=folder,
                env=ENVIRONMENT,
            )
            accuracy = re.search(r"held-out accuracy ([\d.]+)", output)
            self.assertGreaterEqual(float(accuracy[1]), 0.97, output)
            self.assertEqual(len(re.findall(r"epoch +\d+/", output)), 12)
            self.assertNotIn("\r", output)
            model = load_file(f"{folder}/model.safetensors")
            self.assertEqual(model["0.weight"].shape, (16, 1, 3, 3))
            plot = xml.etree.ElementTree.parse(f"{folder}/loss.svg").getroot()
            line = plot.find("{http://www.w3.org/2000/svg}polyline")
            self.assertGreater(len(line.get("points").split()), 100)
            return output

    def test_one_process(self):
        self.train()

    def test_wrong_epochs_give_the_usage(self):
        for epochs in ("0", "-1", "many", "3x"):
            result = subprocess.run(
                [BIN / "digits", SOURCE / "data/digits", epochs],
                capture_output=True,
                text=True,
            )
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("usage: digits", result.stderr)

    def test_two_processes_repeat(self):
        launcher = LAUNCHERS["lockstep_run"]
        losses = [
            re.findall(r"loss ([\d.]+)", self.train(*launcher))
            for _ in range(2)
        ]
        self.assertEqual(losses[0], losses[1])


class Standalone(unittest.TestCase):
    def test_each_example_builds_against_the_installed_package(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            run(CMAKE, "--install", BUILD, "--prefix", root / "installed")

            def build(source):
                build_project(
                    source.parent,
                    root / source.parent.name,
                    f"-DCMAKE_PREFIX_PATH={root / 'installed'}",
                    "-DCMAKE_BUILD_TYPE=Debug",
                )

            sources = sorted((SOURCE / "examples").glob("*/CMakeLists.txt"))
            with concurrent.futures.ThreadPoolExecutor(int(JOBS)) as pool:
                list(pool.map(build, sources))
            self.assertGreaterEqual(len(sources), 4)
            for name in (source.parent.name for source in sources):
                self.assertTrue((root / name / name).is_file(), name)
