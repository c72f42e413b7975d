"""What the package tests share."""

import os
import pathlib
import subprocess

SOURCE = pathlib.Path(os.environ["SOURCE_DIR"])
BUILD = pathlib.Path(os.environ["BUILD_DIR"])
CMAKE = os.environ["CMAKE"]
JOBS = str(min(os.cpu_count(), 4))


def run(*command, timeout=600, env=None, cwd=None, unset=()):
    """Runs a command to its end and returns what it printed on stdout."""
    inherited = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
        env={**inherited, **(env or {})},
        cwd=cwd,
    )
    if done.returncode != 0:
        raise AssertionError(
            f"{command} ended with {done.returncode}\n"
            f"{done.stdout}\n{done.stderr}"
        )
    return done.stdout


def build_project(source, build, *settings):
    """Configures and builds an outside CMake project, which is not told where
    libtorch is."""
    run(
        CMAKE,
        "-S",
        source,
        "-B",
        build,
        "-G",
        "Ninja",
        f"-DCMAKE_CXX_COMPILER={os.environ['CXX']}",
        "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache",
        *settings,
        unset=("Torch_DIR", "CMAKE_PREFIX_PATH"),
    )
    run(CMAKE, "--build", build, "-j", JOBS, timeout=1200)
