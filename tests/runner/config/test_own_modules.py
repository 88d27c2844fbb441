"""Models and families in modules of the user's own, outside of the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import user_model
from compiled_programs import XLA_FLAGS
from forked_processes import run_forked, succeeded
from hugging_face_families import GOLDEN
from small_folder import assert_same_tensors, change, copy_small_folder, rewritten

from lmlib.hf.families import FAMILIES
from runner.config import configs
from runner.config.references import known_families
from runner.errors import ConfigError
from runner.weights.target import LoadOptions

ROOT = Path(configs.__file__).parents[2]
EXPERIMENT = """
import fiddle as fdl
import my_model
from experiments import llama_84m

def config():
    cfg = llama_84m.config()
    llama_84m.tiny(cfg)
    cfg.model = fdl.Partial(
        my_model.Learned, vocab=512, embed=16, layers=1, heads=2, positions=64
    )
    cfg.validation, cfg.steps, cfg.mesh.fsdp = None, 1, 1
    return cfg
"""


@pytest.mark.slow
def test_the_suggested_command_works_when_pasted(tmp_path):
    experiment = tmp_path / "my work" / "my_experiment.py"
    experiment.parent.mkdir()
    shutil.copy(user_model.__file__, experiment.with_name("my_model.py"))
    experiment.write_text(EXPERIMENT)
    first = (f"--fdl_config={experiment}", "--fdl.steps", "2", f"--workdir={tmp_path / 'a run'}")
    environment = {"XLA_FLAGS": XLA_FLAGS}
    shown = succeeded("-m", "runner", *first, cwd=tmp_path, environment=environment)
    command = shown.stdout.partition("try next")[2].splitlines()[0].strip()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    pasted = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert pasted.returncode == 0, pasted.stderr
    assert "training loss" in pasted.stdout
    assert (tmp_path / "a run_next" / "result.json").is_file()


OWN = """
import dataclasses
from lmlib.models.families.hugging_face import shared
from lmlib.models.families.llama import llama as build

def blocks(vocab, embed, layers, heads, mlp, norm_epsilon, *, key, **others):
    return build(vocab, embed, layers, heads, mlp, norm_epsilon=norm_epsilon, key=key, **others)

FAMILIES = [
    dataclasses.replace(
        shared.LLAMA, model_type="blocks", transformers_class="BlocksForCausalLM",
        build=blocks,
        names=dataclasses.replace(shared.llama_names(), prefix="model.blocks.{layer}."),
    )
]
"""
TRUSTED = LoadOptions(trusted=["own.blocks"])


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of Python that holds own/blocks.py, and a folder of such a model."""
    (tmp_path / "python" / "own").mkdir(parents=True)
    (tmp_path / "python" / "own" / "blocks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "python")
    (tmp_path / "folder").mkdir()
    folder = copy_small_folder(tmp_path / "folder")
    change(folder, model_type="blocks")
    rewritten(folder, lambda held: {n.replace("layers", "blocks"): v for n, v in held.items()})
    yield tmp_path / "python", folder
    for name in ("own", "own.blocks"):
        sys.modules.pop(name, None)


def test_registered_families_come_first(own):
    python, _ = own
    found = known_families(["own.blocks", "json"])
    assert found[0].model_type == "blocks" and found[1:] == FAMILIES
    (python / "own" / "broken.py").write_text("1 / 0")
    (python / "own" / "strange.py").write_text("FAMILIES = ['llama']")
    for name, told in (
        ("own.absent", r"No module named 'own\.absent'.*set PYTHONPATH"),
        ("own.broken", "ZeroDivisionError"),
        ("own.strange", r"its FAMILIES is \['llama'\], and has to be a list of lmlib"),
    ):
        with pytest.raises(ConfigError, match=f"--trust_module={name}.*{told}"):
            known_families([name])


def test_an_experiment_gets_the_registered_families(own):
    _, folder = own
    named = f"folder={str(folder)!r}"
    with pytest.raises(ConfigError, match=r"'blocks' is not supported; .* --trust_module=MODULE"):
        configs.load("experiments/from_hf", (), [named])
    cfg = configs.load("experiments/from_hf", (), [named], TRUSTED.trusted)
    assert cfg.model.__fn_or_cls__.__module__ == "own.blocks"
    with pytest.raises(ConfigError, match="families"):
        configs.load("experiments/from_hf", (), [named, "families=()"], TRUSTED.trusted)
    based = configs.load("experiments/lora", (), [f"base={str(folder)!r}"], TRUSTED.trusted)
    assert based.model.of.__fn_or_cls__.__module__ == "own.blocks"


@pytest.mark.slow
def test_every_model_command_knows_registered_families(own, tmp_path):
    python, folder = own
    small = ("--fiddler=tiny", "--fdl.validation=None", "--fdl.mesh.fsdp=1", "--fdl.steps=1")
    commands = (
        ("runner.convert", f"--from={folder}", f"--to={tmp_path}/run"),
        ("runner.convert", f"--from={tmp_path}/run", f"--to={tmp_path}/out"),
        ("runner.generate", f"--from={folder}", "--tokens=1,2", "--max_tokens=3"),
        ("runner.evaluate", f"--from={folder}", "--suite"),
        ("runner.upcycle", f"--from={folder}", f"--to={tmp_path}/mix", "--experts=2", "--top=2"),
        ("runner", "--fdl_config=experiments/from_hf", f"--fdl.folder={folder}", *small,
         f"--workdir={tmp_path}/trained"),
        ("runner", "--fdl_config=experiments/lora", f"--fdl.base={folder}", *small,
         f"--workdir={tmp_path}/lora"),
        ("runner.convert", f"--from={tmp_path}/lora", f"--to={tmp_path}/peft", "--adapters"),
        ("runner.generate", f"--from={tmp_path}/peft", "--tokens=1,2", "--max_tokens=3"),
    )  # fmt: skip
    answers = []
    for command in commands:
        environment = {"PYTHONPATH": f"{python}"}
        ended = run_forked("-m", *command, "--trust_module=own.blocks", environment=environment)
        assert ended.returncode == 0, (command, ended.stderr)
        answers.append(ended.stdout)
    assert_same_tensors(tmp_path / "out", folder)
    llama = run_forked("-m", "runner.generate", f"--from={GOLDEN / 'llama'}", *commands[2][2:])
    assert answers[2].splitlines()[0] == llama.stdout.splitlines()[0]
    refused = run_forked("-m", *commands[2], environment=environment)
    assert refused.returncode == 2 and "--trust_module=MODULE" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
