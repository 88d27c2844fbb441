"""Imports point one way. The table is the architecture; the code is checked against it, unimported.

runner ──▶ experiments (by name) ──▶ lmlib          data_tools ──▶ lmlib.data
inside runner: errors ──▶ config ──▶ command_line ──▶ processes, monitoring ──▶ weights
               ──▶ inference ──▶ evaluation and training ──▶ the commands
inside lmlib: parallel, compute ──▶ models ──▶ optim, losses ──▶ recipe, guard ──▶ train, evaluate
              ──▶ experiment ──▶ generate, inspect ──▶ plan ──▶ profile
"""

import ast
import collections
import functools
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TABLE = ROOT / "tests/may_import.toml"
MAY_IMPORT = {
    part: set(may.split()) for part, may in tomllib.loads(TABLE.read_text("utf-8")).items()
}
MAY_IMPORT_FIDDLE = {"runner", "experiments"}
NAMES_THAT_SAY_NOTHING = {"utils", "helpers", "common", "misc"}
LONGEST_FILE = 600
# experiments are a list to choose from; runner has a file for each command
MOST_FILES = {"lmlib": 8, "experiments": 54, "runner": 17}
MOST_FILES_ELSEWHERE = 16

FOLDERS = sorted({part.partition(".")[0] for part in MAY_IMPORT})
SOURCES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The part of the table that a module, or a name in a module, belongs to."""
    whole, _, rest = module.partition(".")
    part = f"{whole}.{rest.partition('.')[0]}"
    is_room = part in MAY_IMPORT or (ROOT / part.replace(".", "/")).is_dir()
    return part if rest and (whole == "lmlib" or (whole == "runner" and is_room)) else whole


def imported(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module that `source` imports, anywhere in it; `from a import b` counts as `a.b`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


@functools.cache
def imports_of(file: Path) -> set[str]:
    source = file.read_text(encoding="utf-8")
    return set(imported(source, module_name(file), file.name == "__init__.py"))


def wrong_imports(module: str, imports: set[str]) -> list[str]:
    """One line for each import of `module` that the table does not allow."""
    own, wrong = part_of(module), []
    for name in sorted(imports):
        part = part_of(name)
        if part.partition(".")[0] not in FOLDERS or part == own:
            continue
        if part not in MAY_IMPORT:
            wrong.append(f"{module} imports {name}: {part} is not in the table; add it")
        elif not {part, part.partition(".")[0]} & MAY_IMPORT[own]:
            wrong.append(f"{module} imports {name}: {own} may not import {part}")
    return wrong


def test_the_table_has_no_cycles():
    rooms = {
        whole: [part for part in MAY_IMPORT if part.startswith(f"{whole}.")]
        for whole in ("lmlib", "runner")
    }
    graph = {
        part: {name for each in may for name in rooms.get(each, [each])}
        for part, may in MAY_IMPORT.items()
    }
    assert set(TopologicalSorter(graph).static_order()) == set(MAY_IMPORT)


def test_every_part_is_in_the_table():
    unlisted = {part_of(module_name(file)) for file in SOURCES} - set(MAY_IMPORT)
    assert not unlisted, f"add to MAY_IMPORT, with what they may import: {sorted(unlisted)}"
    loose = {file.parent.name for file in ROOT.glob("[!.]*/*.py")} - {*FOLDERS, "tests"}
    assert not loose, f"folders of code that are not in MAY_IMPORT: {sorted(loose)}"


def test_modules_import_only_what_the_table_allows():
    wrong = [
        line for file in SOURCES for line in wrong_imports(module_name(file), imports_of(file))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_permission_is_used():
    used = {
        (part_of(module_name(file)), part_of(name)) for file in SOURCES for name in imports_of(file)
    }
    used |= {(part, name.partition(".")[0]) for part, name in used if part != name}
    unused = [(part, name) for part, may in MAY_IMPORT.items() for name in may]
    assert not set(unused) - used - {("lmlib", "lmlib")}  # which imports by name


def uses_fiddle(file: Path) -> bool:
    return any(name.partition(".")[0] == "fiddle" for name in imports_of(file))


def test_only_experiments_and_the_runner_import_fiddle():
    users = {file for file in SOURCES if uses_fiddle(file)}
    assert users  # or this test sees nothing
    assert not names(
        [file for file in users if module_name(file).partition(".")[0] not in MAY_IMPORT_FIDDLE]
    )


def reaches_into_others(file: Path) -> bool:
    if "_src" not in (source := file.read_text(encoding="utf-8")):
        return False
    nodes = ast.walk(ast.parse(source))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return "_src" in attributes or any("_src" in name.split(".") for name in imports_of(file))


def writes(names: set[str], file: Path) -> bool:
    """Returns True if one of `names` is a string of the code."""
    source = file.read_text(encoding="utf-8")
    return any(name in source for name in names) and any(
        isinstance(node, ast.Constant) and node.value in names
        for node in ast.walk(ast.parse(source))
    )


def test_only_lmlib_parallel_writes_axes_of_the_mesh_down():
    writers = {module_name(file) for file in SOURCES if writes({"fsdp", "tensor"}, file)}
    assert {part_of(module) for module in writers} == {"lmlib.parallel", "benchmarks"}


def test_nothing_private_of_other_packages_is_used():
    assert not names([file for file in SOURCES + TESTS if reaches_into_others(file)])


def test_the_packages_that_are_installed_ship_their_types_and_templates():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    packages = {name.rstrip("*") for name in settings["setuptools"]["packages"]["find"]["include"]}
    assert {file.parent.name for file in ROOT.glob("*/py.typed")} == packages
    shipped = {
        "*": ["py.typed"],
        "data_tools.prepare_chats": ["templates/*.jinja"],
        "lmlib.evaluate.suite": ["texts/*.txt"],
        "lmlib.hardware": ["accelerators.toml"],
        "lmlib.metrics": ["meanings.toml"],
        "lmlib.report": ["template/*"],
        "runner.serving": ["page/*"],
    }
    assert settings["setuptools"]["package-data"] == shipped
    templates = {file.parent for folder in FOLDERS for file in (ROOT / folder).rglob("*.jinja")}
    places = {ROOT / "data_tools/prepare_chats/templates", ROOT / "lmlib/report/template"}
    assert templates == places


def test_every_file_name_says_what_is_in_it():
    assert not names([file for file in SOURCES + TESTS if file.stem in NAMES_THAT_SAY_NOTHING])


def test_every_file_can_be_read_in_one_go():
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in SOURCES}
    assert not names([file for file, length in lengths.items() if length > LONGEST_FILE])


def test_every_folder_can_be_seen_at_a_glance():
    counts = collections.Counter(file.parent.relative_to(ROOT).as_posix() for file in SOURCES)
    crowded = {
        folder: count
        for folder, count in counts.items()
        if count > MOST_FILES.get(folder, MOST_FILES_ELSEWHERE)
    }
    assert not crowded


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import lmlib.train as t, jax", {"lmlib.train", "jax"}),
        ("from lmlib import data", {"lmlib.data"}),
        ("from lmlib.models.decoder import Decoder", {"lmlib.models.decoder.Decoder"}),
        ("def f():\n    import runner", {"runner"}),
        ("from . import layers", {"lmlib.models.layers"}),
        ("from ..train import step", {"lmlib.train.step"}),
    ],
)
def test_imports_are_seen_however_they_are_written(source, expected):
    assert set(imported(source, "lmlib.models.decoder")) == expected
    assert set(imported(source, "lmlib.models", is_package=True)) == expected


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("lmlib.models.decoder", "lmlib.train.step", "lmlib.models may not import lmlib.train"),
        ("lmlib.data.batch", "lmlib.parallel.mesh", "lmlib.data may not import lmlib.parallel"),
        ("lmlib.train", "runner.config.text.nodes", "lmlib.train may not import runner.config"),
        ("lmlib.train", "lmlib.novelty", "lmlib.novelty is not in the table; add it"),
        ("data_tools.tokenizer", "lmlib.models", "data_tools may not import lmlib.models"),
        ("runner.plan", "experiments.llama_1b", "runner may not import experiments"),
        (
            "runner.config.text",
            "runner.weights.notes",
            "runner.config may not import runner.weights",
        ),
        ("runner.monitoring.phases", "runner.plan", "runner.monitoring may not import runner"),
        ("lmlib.data", "data_tools", "lmlib.data may not import data_tools"),
    ],
)
def test_a_wrong_import_is_reported(module, name, expected):
    assert wrong_imports(module, {name}) == [f"{module} imports {name}: {expected}"]


def test_a_right_import_is_not_reported():
    assert not wrong_imports("lmlib.state", {"jax.numpy", "lmlib.models.decoder.Decoder"})
    assert not wrong_imports("runner.plan", {"lmlib.train.step", "runner.config.configs.load"})
    assert not wrong_imports("data_tools.tokenizer", {"lmlib.data.FlatTokensWriter"})
