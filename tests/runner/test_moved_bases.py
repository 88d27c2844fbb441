"""Adapters whose base has moved: what is written without it, and how its new place is said."""

import json
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from adapter_runs import write_adapter_run
from forked_processes import run_forked

from lmlib import hf
from lmlib.adapters.lora import lora
from lmlib.hf.tensor_files import read_header
from lmlib.optim.trainable import adapters
from lmlib.parallel.mesh import make_mesh
from runner import convert
from runner.config import configs
from runner.errors import ConfigError
from runner.inference.loading import load
from runner.weights.target import LoadOptions

HF = Path(__file__).parents[1] / "hf"
GONE = r"cannot be read: .*/base is no folder; .* if .*/base has moved, --init_from says where it"


def run_of(base: Path, workdir: Path, *besides: str) -> Path:
    """A run of adapters and what is `besides`, all moved from where they began."""
    cfg = configs.load("experiments/from_hf", ["tiny"], [f"folder={str(base)!r}"])
    cfg.model = fdl.Partial(lora, of=cfg.model, rank=2, paths=("stack.*.mlp.*",))
    cfg.trainable = fdl.Config(adapters, besides=besides)
    write_adapter_run(cfg, base, workdir)
    return workdir


def moved(tmp_path: Path, name: str, *besides: str) -> tuple[Path, Path, Path]:
    """Such a run, where its base is now, and its adapters as they were written before."""
    base = shutil.copytree(HF / "golden" / name, tmp_path / "base")
    run = run_of(base, tmp_path / "run", *besides)
    convert.bring_adapters_out(str(run), tmp_path / "before")
    return run, base.rename(tmp_path / "moved"), tmp_path / "before"


def tensors(folder: Path, name: str = "adapter_model.safetensors"):
    return {key: each.read(0, each.size) for key, each in read_header(folder / name).items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, values in other.items():
        np.testing.assert_array_equal(one[name], values)


def told_base(folder: Path) -> str:
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.mark.slow
def test_adapters_and_what_trained_besides_go_out_without_their_base(tmp_path, capsys):
    run, base, before = moved(tmp_path, "llama", "*norm.scale", "unembedding")
    convert.bring_adapters_out(str(run), tmp_path / "peft")
    assert_same(tensors(tmp_path / "peft"), tensors(before))
    assert f"WARNING: {tmp_path}/base, which adapter_config.json names" in capsys.readouterr().err
    there = LoadOptions(init_from=str(base))
    told = convert.bring_adapters_out(str(run), tmp_path / "new", options=there)
    assert told.endswith(f" for {base}") and told_base(tmp_path / "new") == str(base)
    assert_same(tensors(tmp_path / "new"), tensors(before))
    assert "WARNING" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_module_that_trained_in_part_needs_the_base(tmp_path):
    """PEFT saves a norm with its bias, which did not train."""
    run, base, before = moved(tmp_path, "gpt2", "*norm.scale")
    with pytest.raises(ConfigError, match=GONE):
        convert.bring_adapters_out(str(run), tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
    there = LoadOptions(init_from=str(base))
    convert.bring_adapters_out(str(run), tmp_path / "peft", options=there)
    assert_same(tensors(tmp_path / "peft"), tensors(before))


@pytest.mark.slow
def test_a_model_is_made_with_its_base_from_another_place(tmp_path):
    run, base, before = moved(tmp_path, "llama")
    with pytest.raises(ConfigError, match=GONE):
        load(str(run))
    loaded = load(str(run), init_from=str(base), mesh=make_mesh(devices=jax.devices()[:1]))
    expected = hf.load_adapters(before, hf.load(base))
    expected = jax.tree.map(lambda x, y: x.astype(y.dtype), expected, loaded.model)
    for one, other in zip(jax.tree.leaves(loaded.model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)

    another = jax.tree.map(lambda x: x + 1, hf.load(base))
    hf.save(another, tmp_path / "another")
    with pytest.raises(ConfigError, match="are not those that the run was trained with: give tho"):
        load(str(run), init_from=str(tmp_path / "another"))


@pytest.mark.slow
def test_a_folder_of_pefts_too(tmp_path):
    _, base, before = moved(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"/base is no folder; .*runner\.evaluate --init_from"):
        load(str(before))
    told: list[str] = []
    assert load(str(before), init_from=str(base), show=told.append).name == str(before)
    load(str(base), init_from=str(base), show=told.append)
    assert [line for line in told if "ignored" in line] == [
        f"--init_from={base} is ignored: {base} holds the whole model"
    ]


@pytest.mark.slow
def test_the_commands_that_name_the_flag_have_it(tmp_path):
    run, base, _ = moved(tmp_path, "llama")
    expected = tmp_path / "expected"
    base.rename(tmp_path / "base")
    convert.bring_out(str(run), expected, dtype="float32")
    (tmp_path / "base").rename(base)
    for arguments in (
        ["runner.generate", "--tokens=1,2", "--max_tokens=2"],
        ["runner.convert", f"--to={tmp_path}/whole", "--dtype=float32"],
        ["runner.evaluate", "--suite"],
    ):
        arguments += [f"--from={run}"]
        refused = run_forked("-m", *arguments)
        assert refused.returncode == 2 and "--init_from says where it is now" in refused.stderr
        ended = run_forked("-m", *arguments, f"--init_from={base}")
        assert ended.returncode == 0, ended.stderr
    name = "model.safetensors"
    assert_same(tensors(tmp_path / "whole", name), tensors(expected, name))
