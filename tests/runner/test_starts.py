"""What a run was trained with: the config and the code of every start that made a step."""

import json
import os
import subprocess

import jax
import pytest
from small_experiment import small

from runner import Options, fit
from runner.config import configs
from runner.config.code import commit_of
from runner.processes.lock import WorkdirLock
from runner.training.starts import Start

NOT_HELD = WorkdirLock()


def assert_holds(folder, cfg):
    for name, content in configs.saved_files(cfg).items():
        assert (folder / name).read_text() == content


def fails(step):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_the_config_kept_is_the_one_that_trained(tmp_path, capsys):
    first, second, third = (
        small("steps=2"),
        small("steps=2", "optimizer.peak_lr=0.5"),
        small("steps=3", "optimizer.peak_lr=0.25"),
    )
    fit(first, tmp_path)
    start = tmp_path / "starts" / "00000"
    assert_holds(tmp_path, first)
    assert_holds(start, first)
    facts = json.loads((start / "start.json").read_text())
    assert facts["first_step"] == 1 and facts["processes"] == 1
    assert len(facts["start"]) == 16
    assert json.loads((tmp_path / "result.json").read_text())["start"] == facts["start"]
    (account,) = json.loads((tmp_path / "goodput.json").read_text())["starts"]
    assert account["start"] == facts["start"]
    assert facts["versions"].keys() >= {"python", "jax", "jaxlib", "lmlib"}
    assert facts["jax_settings"]["JAX_THREEFRY_PARTITIONABLE"] == "true"
    assert {"lmlib/train.py", "experiments/llama_84m.py", "runner/__main__.py"} <= set(
        facts["code"]
    )

    fit(second, tmp_path)  # the run is finished: it trains nothing
    assert "+ optimizer.peak_lr = 0.5" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):  # before its first step is made
        fit(third, tmp_path, Options(stop=fails))
    assert_holds(tmp_path, first)
    assert [folder.name for folder in (tmp_path / "starts").iterdir()] == ["00000"]

    facts["code"]["lmlib/train.py"] = "another digest"
    facts["versions"]["jax"] = "0.1"
    (start / "start.json").write_text(json.dumps(facts))
    capsys.readouterr()
    fit(third, tmp_path)
    told = capsys.readouterr().err
    assert "- optimizer.peak_lr = 0.003" in told and "+ optimizer.peak_lr = 0.25" in told
    changes = f"jax 0.1 → {jax.__version__}, lmlib/train.py\n"
    assert f"the code has changed since this run was last trained: {changes}" in told
    assert_holds(tmp_path, third)
    assert_holds(tmp_path / "starts" / "00001", third)
    assert_holds(start, first)


EXPERIMENT = """
import fiddle as fdl
from code_beside import VALUE
from experiments import llama_84m

def config():
    return llama_84m.config()
"""


def changes(start):
    told = []
    start.tell_changes(told.append)
    return told


def test_edits_of_code_and_changed_flags_are_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "code_beside.py").write_text("VALUE = 1")
    file = tmp_path / "code_of_mine.py"
    file.write_text(EXPERIMENT)
    cfg = configs.load(str(file))

    def start():
        return Start(cfg, tmp_path / "run", configs.experiment_file(str(file)))

    def told(what):
        return [f"{what} changed since this run was last trained: {change}"]

    assert changes(start()) == []  # there is no earlier one
    start().record(1, NOT_HELD)
    assert changes(start()) == []
    for name, text in (("code_of_mine.py", EXPERIMENT + "# edited"), ("code_beside.py", "VALUE=2")):
        (tmp_path / name).write_text(text)
        change = f"{tmp_path.name}/{name}"
        assert changes(start()) == told("the code has")
        start().record(2, NOT_HELD)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=true"
    monkeypatch.setenv("XLA_FLAGS", flags)
    change = "--xla_cpu_enable_fast_math: absent → true"
    assert changes(start()) == told("flags of XLA have")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"jax_settings": [], "xla_flags": 1}', '{"code": {}, "versions": []}']
)
def test_damaged_facts_of_a_start_are_no_obstacle(tmp_path, content):
    start = Start(small(), tmp_path, None)
    start.record(1, NOT_HELD)
    (tmp_path / "starts" / "00000" / "start.json").write_text(content)
    assert changes(start) == []
    start.record(5, NOT_HELD)
    assert (tmp_path / "starts" / "00001" / "start.json").exists()


def test_the_commit_of_a_file_and_whether_it_was_edited(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=name", "-c", "user.email=name@example.com")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    file = tmp_path / "code.py"
    file.write_text("")
    assert commit_of(file) is None
    git("init", "--quiet")
    assert commit_of(file) is None  # git does not know it
    git("add", "code.py")
    git("commit", "--quiet", "--message=code")
    found = commit_of(file)
    assert len(found["commit"]) == 40 and found["dirty"] is False
    file.write_text("edited")
    assert commit_of(file) == found | {"dirty": True}
