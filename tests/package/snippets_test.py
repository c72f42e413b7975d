"""Runs every command and compiles every program of the documents.

Fenced blocks are told apart by their language:

  bash   runs in the repository's root, with the preset that is being tested in
         place of `release`; a `text` block that follows it shows lines that the
         output must have (numbers may differ, "..." skips)
  sh     runs where the user's ./program and script.py are, with lockstep in PATH
  cpp    a program is compiled alone, a fragment as a function's body; without
         an #include of its own after snippet_prelude.h
  cmake  is included by a project that has a target `my_program`

A comment before a block changes that:

  <!-- file: PATH -->     the block is that file of the repository, word by word
  <!-- norun: REASON -->  the block is only counted
"""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support import BUILD, CMAKE, SOURCE, run

HERE = pathlib.Path(__file__).parent
# Of a tree elsewhere ./dev knows nothing: the blocks then build their own.
PRESET = BUILD.name if BUILD.parent == SOURCE / "build" else "release"
PRELUDE = '#include "snippet_prelude.h"\n'
DOCUMENTS = [
    SOURCE / "README.md",
    SOURCE / "CONTRIBUTING.md",
    *sorted((SOURCE / "docs").glob("*.md")),
    *sorted((SOURCE / "examples").glob("*/README.md")),
]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>file|norun): (?P<value>.*?) -->\n\n?)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass
class Block:
    document: str
    line: int
    language: str
    text: str
    mark: str
    value: str
    output: str = ""

    def __str__(self):
        return f"{self.document}:{self.line}"


def is_command(block):
    return block.language in ("bash", "sh")


def blocks_of(path):
    content = path.read_text()
    found = []
    for match in BLOCK.finditer(content):
        line = content.count("\n", 0, match.start("text")) + 1
        block = Block(
            str(path.relative_to(SOURCE)),
            line,
            match["language"],
            match["text"],
            match["mark"] or "",
            match["value"] or "",
        )
        if block.language == "text" and found and is_command(found[-1]):
            found[-1].output = block.text
        found.append(block)
    return found


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]
TO_RUN = [block for block in BLOCKS if not block.mark]


def blocks(language):
    return [block for block in TO_RUN if block.language == language]


def pattern(line):
    """A regular expression for the line with any numbers and any spacing."""
    words = (re.escape(word) for word in line.split())
    return re.sub(r"(?:\d+(?:\\\.)?)+", r"[\\d.]+", r"\s+".join(words))


def compile_only(text, *flags):
    torch = pathlib.Path(os.environ["Torch_DIR"]).parents[2] / "include"
    done = subprocess.run(
        [
            os.environ["CXX"],
            "-std=c++20",
            "-fsyntax-only",
            f"-I{SOURCE}/include",
            f"-I{HERE}",
            "-isystem",
            torch,
            "-isystem",
            torch / "torch/csrc/api/include",
            *flags,
            "-x",
            "c++",
            "-",
        ],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stderr if done.returncode else ""


class Snippets(unittest.TestCase):
    def test_every_block_has_a_known_language(self):
        for block in BLOCKS:
            self.assertIn(
                block.language,
                ("bash", "sh", "cpp", "cmake", "text", ""),
                str(block),
            )

    def test_files_are_shown_as_they_are(self):
        for block in BLOCKS:
            if block.mark == "file":
                with self.subTest(block=str(block)):
                    self.assertEqual(
                        block.text, (SOURCE / block.value).read_text()
                    )

    def test_few_blocks_are_left_out(self):
        left_out = [block for block in BLOCKS if block.mark == "norun"]
        for block in left_out:
            print(f"not run: {block}: {block.value}")
        self.assertLessEqual(len(left_out), 3)

    def test_programs_and_fragments_compile(self):
        programs = [b for b in blocks("cpp") if "int main(" in b.text]
        fragments = [b for b in blocks("cpp") if "int main(" not in b.text]
        for block in programs:
            with self.subTest(block=str(block)):
                prelude = "" if "#include" in block.text else PRELUDE
                self.assertEqual(compile_only(prelude + block.text), "")
        text = PRELUDE
        for number, block in enumerate(fragments):
            text += (
                f"void fragment_{number}(PRELUDE_VARIABLES) {{\n"
                f'#line {block.line} "{block.document}"\n{block.text}}}\n'
            )
        self.assertEqual(compile_only(text), "")

    def test_the_demo_suggests_a_command_that_works(self):
        before = sorted(SOURCE.iterdir())
        suggested = re.findall(
            r"^  (\(cd .*\))$", run_shell("./dev demo", SOURCE), re.MULTILINE
        )
        self.assertEqual(len(suggested), 1)
        output = run_shell(suggested[0], SOURCE)
        self.assertIn("trained by 4 processes", output)
        self.assertEqual(sorted(SOURCE.iterdir()), before)


def make_user_folder(folder):
    """A program and a script that tell who they are."""
    program = folder / "program"
    program.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE"\n')
    program.chmod(0o755)
    (folder / "script.py").write_text(
        "import os\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )


def run_shell(text, cwd, *path):
    """Runs commands as a user does; returns what they printed."""
    path += (
        pathlib.Path(sys.executable).parent,
        pathlib.Path(CMAKE).parent,
        os.environ["PATH"],
    )
    return run(
        "bash",
        "-euo",
        "pipefail",
        "-c",
        text,
        timeout=1800,
        cwd=cwd,
        env={"PATH": ":".join(map(str, path)), "LOCKSTEP_PRESET": PRESET},
    )


def run_block(block):
    if block.language == "bash":
        return run_shell(re.sub(r"\brelease\b", PRESET, block.text), SOURCE)
    with tempfile.TemporaryDirectory() as folder:
        make_user_folder(pathlib.Path(folder))
        return run_shell(block.text, folder, BUILD / "bin")


def add_command_test(number, block):
    def test(self):
        output = run_block(block)
        for line in block.output.splitlines():
            if line.strip() not in ("", "..."):
                self.assertRegex(output, pattern(line))

    name = re.sub(r"\W", "_", block.document.removesuffix(".md")).lower()
    setattr(Snippets, f"test_command_{number:02}_{name}", test)


def add_cmake_test(number, block):
    def test(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            run(CMAKE, "--install", BUILD, "--prefix", root / "installed")
            (root / "main.cpp").write_text("int main() {}\n")
            (root / "CMakeLists.txt").write_text(
                "cmake_minimum_required(VERSION 3.25)\n"
                "project(Snippet LANGUAGES CXX)\n"
                "add_executable(my_program main.cpp)\n" + block.text
            )
            run(
                CMAKE,
                "-S",
                root,
                "-B",
                root / "build",
                f"-DTorch_DIR={os.environ['Torch_DIR']}",
                f"-DCMAKE_PREFIX_PATH={root / 'installed'}",
                f"-DLOCKSTEP_SOURCE_DIR={SOURCE}",
            )

    setattr(Snippets, f"test_cmake_{number:02}", test)


for index, each in enumerate(filter(is_command, TO_RUN)):
    add_command_test(index, each)
for index, each in enumerate(blocks("cmake")):
    add_cmake_test(index, each)
