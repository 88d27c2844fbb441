"""`~` is the home folder in every flag that takes a path, also after `--flag=`."""

import ast
import functools
from pathlib import Path

import fiddle as fdl
import pytest
from absl import flags
from forked_processes import ROOT, run_forked

from data_tools.command_line import TEXTS, expand_home
from lmlib.experiment import Experiment
from lmlib.storage.local_folder import local_folder
from runner.command_line.command import commands
from runner.config.overrides import apply_override

PATHS = {
    "base", "baseline", "data", "dataset", "fdl_config", "from", "include_path",
    "init_from", "json", "out", "picture", "pictures", "prompts", "template", "to",
    "tokenizer", "workdir",
}  # fmt: skip
# Neither paths nor texts in which `~` may come first.
NAMES = {
    "axis", "coordinator", "date", "depths", "halving", "ignore", "metric", "metrics", "name",
    "pattern", "points", "profile", "prompt_column", "ray", "response_column", "sbatch",
    "search_mesh", "shard", "split", "tasks", "text_column", "text_function", "through", "tokens",
    "topology", "trust_module", "widths",
}  # fmt: skip
KINDS = ("DEFINE_string", "DEFINE_multi_string", "DEFINE_list")


@functools.cache
def defined() -> set[tuple[str, str]]:
    """Kind and name of each flag of the commands that takes text."""
    calls = [
        node
        for folder in ("runner", "data_tools")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    found = {
        (call.func.attr, call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in KINDS
        if isinstance(call.args[0], ast.Constant)
    }
    return {*found, ("DEFINE_string", "fdl_config")}  # Fiddle's


def test_every_flag_is_a_path_a_text_or_a_name() -> None:
    assert len(commands()) > 20
    assert {name for _, name in defined()} == PATHS | NAMES | TEXTS
    assert PATHS.isdisjoint(TEXTS)


def test_paths_are_expanded_and_texts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of")
    for kind, name in defined():
        values = flags.FlagValues()
        getattr(flags, kind)(name, None, "", flag_values=values)
        given, expected = "~/a@3", "/home/of/a@3"
        if kind == "DEFINE_list":
            given, expected = "b,~/a@3,~", "b,/home/of/a@3,/home/of"
        values(["command", f"--{name}={given}"])
        expand_home(values)
        wanted = given if name in TEXTS else expected
        assert values[name].serialize() == f"--{name}={wanted}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("runner", "--fdl_config=~/there.py", "--workdir=~/w"),
        ("data_tools.pretokenize", "--dataset=~/there.py", "--tokenizer=bytes", "--out=~/o"),
    ],
    ids=["runner", "data_tools"],
)
def test_both_kinds_of_commands_expand(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ended = run_forked("-m", *arguments, environment={"HOME": str(tmp_path)})
    assert ended.returncode == 2
    assert f"{tmp_path}/there.py" in ended.stderr and "~" not in ended.stderr


def test_settings_that_are_paths_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = fdl.Config(Experiment)
    for override in ("init_from=~/run@3", "frozen_dtype='~/quoted'"):
        apply_override(override, cfg)
    assert (cfg.init_from, cfg.frozen_dtype) == (f"{tmp_path}/run@3", "~/quoted")
    assert local_folder("~/run") == tmp_path / "run"  # as a config in Python may name it
