"""An outside project builds against the package and runs."""

import functools
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support import BUILD, CMAKE, SOURCE, build_project, run

HERE = pathlib.Path(__file__).parent


class InstalledTree(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        run(CMAKE, "--install", BUILD, "--prefix", cls.root / "first")
        cls.prefix = cls.root / "moved" / "here"
        cls.prefix.parent.mkdir()
        shutil.move(cls.root / "first", cls.prefix)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    @functools.cache
    def consumer(cls, build_type):
        build = cls.root / build_type
        build_project(
            HERE / "consumer",
            build,
            f"-DCMAKE_PREFIX_PATH={cls.prefix}",
            f"-DCMAKE_BUILD_TYPE={build_type}",
        )
        return build / "consumer"

    def check_consumer(self, build_type):
        output = run(
            self.prefix / "bin/lockstep",
            "run",
            "--nproc-per-node",
            2,
            self.consumer(build_type),
        )
        self.assertEqual(output.count("sum 3"), 2, output)

    def test_debug_consumer(self):
        self.check_consumer("Debug")

    def test_release_consumer(self):
        self.check_consumer("Release")

    @unittest.skipUnless(
        BUILD.joinpath("lib/liblockstep_mpi.so").exists(), "MPI is not built"
    )
    def test_mpi_is_loaded_from_beside_the_library(self):
        consumer = self.consumer("Release")
        (library,) = self.prefix.rglob("liblockstep.so")
        for file in (consumer, library):
            self.assertNotIn("libmpi", run("ldd", file))
        environment = {
            "LOCKSTEP_BACKEND": "mpi",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        command = ("mpirun", "--oversubscribe", "-n", 2, consumer)
        output = run(*command, env=environment)
        self.assertEqual(output.count("sum 3"), 2, output)

        module = library.with_name("liblockstep_mpi.so")
        module.rename(module.with_suffix(".away"))
        try:
            with self.assertRaises(AssertionError) as raised:
                run(*command, env=environment)
        finally:
            module.with_suffix(".away").rename(module)
        self.assertIn("liblockstep_mpi.so", str(raised.exception))
        self.assertIn("LOCKSTEP_WITH_MPI=ON", str(raised.exception))

    def test_names_no_build_folder(self):
        # libtorch itself may lie in a virtual environment of the source tree.
        for file in self.prefix.rglob("*.cmake"):
            for folder in (BUILD, SOURCE / "include", SOURCE / "src"):
                self.assertNotIn(f"{folder}/", file.read_text(), file)

    def test_library_finds_libtorch_by_itself(self):
        (library,) = self.prefix.rglob("liblockstep.so")
        folders = re.search(
            r"RUNPATH.*\[(.*)\]", run("readelf", "-d", library)
        )[1].split(":")
        torch = pathlib.Path(os.environ["Torch_DIR"]).parents[2] / "lib"
        self.assertIn(torch.resolve(), [pathlib.Path(f).resolve() for f in folders])
        self.assertNotIn("not found", run("ldd", library))

    def test_command_does_not_load_libtorch(self):
        libraries = run("ldd", self.prefix / "bin/lockstep")
        self.assertNotIn("torch", libraries)
        self.assertNotIn("liblockstep", libraries)


class Subdirectory(unittest.TestCase):
    def test_consumer(self):
        with tempfile.TemporaryDirectory() as folder:
            build_project(
                HERE / "subdirectory",
                folder,
                f"-DLOCKSTEP_SOURCE_DIR={SOURCE}",
                f"-DTorch_DIR={os.environ['Torch_DIR']}",
                "-DCMAKE_BUILD_TYPE=Debug",
            )
            output = run(
                BUILD / "bin/lockstep",
                "run",
                "--nproc-per-node",
                2,
                pathlib.Path(folder) / "consumer",
            )
            self.assertEqual(output.count("sum 3"), 2, output)
