"""Every block of code and every command of README and docs/ runs as it is printed.

Each page has its own folder and goes from top to bottom: its commands, then its Python in one
process. The reader's own files are replaced by files of `documented_world`, and runs are made
short. Commands that cannot run here are listed below with the reason; their flags are checked too.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from compiled_programs import XLA_FLAGS
from documented_blocks import PAGES, ROOT, Block, blocks, words
from documented_world import make_world
from forked_processes import Ended, run_forked
from sentinels import sentinels

TABLES = json.loads((ROOT / "tests/shared/documented_commands.json").read_text(encoding="utf-8"))
# Names on a page, and the tests' replacements, unless a command of the page makes them.
STANDS_FOR = TABLES["stands for"]
# Replacements for commands that take long or need more devices, in order. .ci/run makes README.md's
# first run whole; tests/runner/commands/test_runs.py has the programs of the coordinate check.
SHORTER = TABLES["shorter"]
# Commands and Python that do not run here, by how they begin, and why.
NOT_RUN, NOT_RUN_PYTHON = TABLES["not run"], TABLES["not run python"]
# Python that is an excerpt of a file: test_documentation.py compares huggingface.md's.
EXCERPTS = TABLES["excerpts"]
# Names that a reader has before the Python of a page.
IN_HAND = dict.fromkeys(
    [f"docs/{page}.md" for page in TABLES["pages with a config"]],
    "from experiments import llama_84m\ncfg = llama_84m.config()\n",
)
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:git clone|python3?|pip|sbatch|kubectl|docker|sky) |#SBATCH|export "
)
FILE = re.compile(r"# (\w+\.py)\n")  # the first line of a block that goes into a file

SHOWN = {page.relative_to(ROOT).as_posix(): blocks(page) for page in PAGES}


def begins_with(text: str, listed) -> bool:
    return any(text.startswith(beginning) for beginning in listed)


def commands_of(page: str) -> list[tuple[Block, str]]:
    """Each command, and each script as one."""
    found = []
    for block in SHOWN[page]:
        if block.kind == "indented":
            found += [(block, command) for command in block.commands if command]
        elif block.kind == "bash":
            found.append((block, block.text))
    return found


def commands_that_run(page: str) -> list[tuple[Block, str]]:
    return [
        (block, command)
        for block, command in commands_of(page)
        if not begins_with(command, NOT_RUN.get(page, ()))
    ]


def python_of(page: str) -> list[Block]:
    return [block for block in SHOWN[page] if block.kind == "python"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def test_blocks_are_seen():
    commands = [each for page in SHOWN for each in commands_of(page)]
    assert len(commands) > 60
    assert len([block for page in SHOWN for block in python_of(page)]) > 15
    no_command = [f"{b.page}:{b.line}: {text}" for b, text in commands if not COMMAND.match(text)]
    assert not no_command, "indented blocks are commands; fence what is not"
    hidden = [
        f"{block.page}:{block.line}"
        for page in SHOWN.values()
        for block in page
        if block.kind not in ("indented", "bash", "python")
        and re.search(r"^(?:\$ )?(?:python|pip) ", block.text, re.MULTILINE)
        and block.page != "docs/flat-tokens.md"  # test_documented_example.py makes that one
    ]
    assert not hidden, "commands are indented, or in a fence of bash"


def test_blocks_listed_as_not_run_exist():
    for page, listed in NOT_RUN.items():
        shown = [command for _, command in commands_of(page)]
        assert not [each for each in listed if not any(s.startswith(each) for s in shown)]
    for page, listed in (NOT_RUN_PYTHON | EXCERPTS).items():
        shown = [block.text for block in python_of(page)]
        assert not [each for each in listed if not any(s.startswith(each) for s in shown)]


@pytest.mark.parametrize("page", sentinels(SHOWN, lambda page: page == "README.md"))
def test_commands_have_the_flags_that_they_show(page):
    wrong = []
    for block, command in commands_of(page):
        for line in re.sub(r"\\\n\s*", "", command).splitlines():
            if "python -m runner" not in line and "python -m data_tools" not in line:
                continue
            _, split = words(re.sub(r"\$\w+", "0", line).rstrip(" &"))
            module, *arguments = split[split.index("-m") + 1 :]
            ended = run_forked(ROOT / "tests/shared/check_flags.py", module, *arguments)
            if ended.returncode:
                wrong.append(f"{page}:{block.line}: {line}\n{ended.stderr.splitlines()[-1]}")
    assert not wrong, "\n".join(wrong)


def as_here(page: str, text: str) -> str:
    """`text` with the files of this place, and shorter."""
    made = " ".join(command for _, command in commands_that_run(page))
    for name, here in STANDS_FOR.items():
        if not re.search(rf"--(?:out|workdir)={re.escape(name)}(?![\w/])", made):
            text = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])", here, text)
    text = text.replace("/tmp/", "tmp/")
    for pattern, shorter in SHORTER:
        text = re.sub(pattern, shorter, text)
    return text


def run_command(command: str, folder: Path) -> Ended:
    environment, split = words(command)
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **environment}
    if split[:2] == ["python", "-m"]:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {XLA_FLAGS}"
        return run_forked(*split[1:], cwd=folder, environment=environment)
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=os.environ | environment,
        capture_output=True, text=True,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN)
def test_a_page_runs(page, world, tmp_path):
    folder = tmp_path / "here"
    shutil.copytree(world, folder)
    (folder / "tmp").mkdir()
    python = [block.text for block in python_of(page)]
    for text in python:
        if named := FILE.match(text):
            (folder / named[1]).write_text(text)
    wrong = []
    for block, command in commands_that_run(page):
        here = as_here(page, command)
        ended = run_command(here, folder)
        if ended.returncode:
            wrong.append(f"{page}:{block.line}: {command}\nas {here}\n{ended.stderr[-600:]}")
    left_out = (*NOT_RUN_PYTHON.get(page, ()), *EXCERPTS.get(page, ()))
    run = [as_here(page, text) for text in python if not begins_with(text, left_out)]
    script = folder / "blocks_of_the_page.py"
    script.write_text("\n\n".join([IN_HAND.get(page, ""), *run]))
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "XLA_FLAGS": XLA_FLAGS}
    if run and (ended := run_forked(script, cwd=folder, environment=paths)).returncode:
        wrong.append(f"the Python of {page}\n{ended.stderr[-1500:]}")
    assert not wrong, "\n\n".join(wrong)
