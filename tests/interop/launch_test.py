"""Python ranks under `lockstep run`; torchrun and mpirun over `spawn`."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ["SOURCE_DIR"])
BUILD = pathlib.Path(os.environ["BUILD_DIR"])
LOCKSTEP = BUILD / "bin" / "lockstep"
HERE = pathlib.Path(__file__).parent
# The test binary, started as a program that does what collectives.py does.
COLLECTIVES = [
    BUILD / "bin" / "interop_gloo",
    "--lockstep-test-process",
    "collectives",
]
# Variables whose values are not torchrun's, as docs/launcher.md says: rank 0
# hosts the store, and the CPUs are shared.
MAY_DIFFER = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
}
# The test binary, started as a program that calls spawn.
SPAWNS = [
    BUILD / "bin" / "multiprocess_launch",
    "--lockstep-test-process",
    "spawn_place",
]

ALL_REDUCE = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
print(x.tolist(), flush=True)
dist.destroy_process_group()
"""

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
import os, time
@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("odd input")
    time.sleep(60)
main()
"""


def start(*command, cwd=None, **env):
    clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**clean, "PYTHON_EXEC": sys.executable, **env},
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def blocks(language):
    """The code blocks of the launcher's document."""
    text = (SOURCE / "docs" / "launcher.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def finish(process):
    """Returns exit code, sorted lines of stdout, and stderr."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, sorted(out.splitlines()), err


class LaunchTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def script(self, text):
        path = self.folder / "script.py"
        path.write_text(text)
        return path

    def test_python_ranks_meet(self):
        job = start(LOCKSTEP, "run", "-n", 2, self.script(ALL_REDUCE))
        code, lines, err = finish(job)
        self.assertEqual(code, 0, err)
        self.assertEqual(
            lines, [f"[rank {i}]: [3.0, 3.0, 3.0]" for i in range(2)]
        )
        self.assertEqual(err, "")

    def check_mixed_job(self, *parts):
        command = [LOCKSTEP, "run", "-n", 1, *parts[0], ":", "-n", 1, *parts[1]]
        code, lines, err = finish(start(*command, LOCKSTEP_INTEROP="1"))
        self.assertEqual(code, 0, err)
        self.assertEqual(lines, ["[rank 0]: passed", "[rank 1]: passed"])

    @unittest.skipUnless(COLLECTIVES[0].exists(), "no gloo backend")
    def test_every_collective_with_a_cpp_rank_zero(self):
        self.check_mixed_job(COLLECTIVES, [HERE / "collectives.py"])

    @unittest.skipUnless(COLLECTIVES[0].exists(), "no gloo backend")
    def test_every_collective_with_a_python_rank_zero(self):
        self.check_mixed_job([HERE / "collectives.py"], COLLECTIVES)

    def test_two_nodes_meet(self):
        port = free_port()
        script = self.script(ALL_REDUCE)
        nodes = [
            start(
                LOCKSTEP, "run", "--nnodes", 2, "--node-rank", rank,
                "--master-addr", "127.0.0.1", "--master-port", port, script,
            )
            for rank in range(2)
        ]
        for rank, node in enumerate(nodes):
            code, lines, err = finish(node)
            self.assertEqual(code, 0, err)
            self.assertEqual(lines, [f"[rank {rank}]: [3.0, 3.0, 3.0]"])

    def variables(self, *launcher):
        """The environment of rank 1 of 2."""
        script = self.script(
            "import json, os\n"
            "if os.environ['RANK'] == '1': print(json.dumps(dict(os.environ)))"
        )
        code, lines, err = finish(start(*launcher, script))
        self.assertEqual(code, 0, err)
        (line,) = lines
        return json.loads(line.removeprefix("[rank 1]: "))

    def test_workers_get_torchruns_variables(self):
        torchrun = self.variables(
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", 2,
        )
        ours = self.variables(LOCKSTEP, "run", "--nproc-per-node", 2)
        self.assertEqual(torchrun.keys(), ours.keys())
        differing = {name for name in ours if ours[name] != torchrun[name]}
        self.assertLessEqual(differing, MAY_DIFFER)

    def test_recorded_errors_are_reported(self):
        job = start(LOCKSTEP, "run", "-n", 2, self.script(RECORDED))
        code, _, err = finish(job)
        self.assertEqual(code, 1, err)
        self.assertIn("its error: ValueError: odd input\n", err)

    def check_spawn_here(self, *launcher, **env):
        code, lines, err = finish(start(*launcher, *SPAWNS, **env))
        self.assertEqual(code, 0, err)
        self.assertEqual(lines, ["0 of 2 5 here", "1 of 2 5 here"])

    def test_spawn_under_torchrun(self):
        self.check_spawn_here(
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--no-python", "--nproc-per-node", "2",
        )

    def test_spawn_under_mpirun(self):
        self.check_spawn_here(
            "mpirun", "-n", "2", "--oversubscribe",
            OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        )

    def test_commands_of_the_document(self):
        self.script("import os\nprint('rank', os.environ['RANK'])\n")
        program = self.folder / "program"
        program.write_text("#!/bin/sh\necho rank $RANK\n")
        program.chmod(0o755)
        path = f"{LOCKSTEP.parent}:{os.environ['PATH']}"
        port = str(free_port())
        commands = blocks("sh")
        self.assertEqual(len(commands), 4)
        for command in commands:
            command = command.replace("10.0.0.1", "127.0.0.1")
            command = command.replace("29500", port)
            nodes = [command]
            if "--node-rank 0" in command:
                nodes.append(command.replace("--node-rank 0", "--node-rank 1"))
            jobs = [
                start("sh", "-c", node, cwd=self.folder, PATH=path)
                for node in nodes
            ]
            lines = []
            for job in jobs:
                code, out, err = finish(job)
                self.assertEqual(code, 0, err)
                lines += out
            self.assertEqual(
                lines,
                [f"[rank {i}]: rank {i}" for i in range(2 * len(nodes))],
            )

    def test_code_of_the_document(self):
        for code in blocks("cpp"):
            subprocess.run(
                [os.environ["CXX"], "-std=c++20", "-fsyntax-only", "-Wall",
                 "-Werror", f"-I{SOURCE / 'include'}", "-x", "c++", "-"],
                input="#include <lockstep/launch/spawn.h>\n" + code,
                text=True,
                check=True,
                timeout=100,
            )


if __name__ == "__main__":
    unittest.main()
