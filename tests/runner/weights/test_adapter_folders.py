"""PEFT folders: runs begin with them and are exported as them, and their bases may move."""

import json
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_runs import NO_BATCHES, write_adapter_run
from forked_processes import run_forked
from hugging_face_families import tensors
from small_folder import assert_same_tensors, assert_same_weights

from lmlib import Compute, hf, single_document_context
from lmlib.adapters.lora import lora, merged
from lmlib.checkpoint import Checkpoints
from lmlib.optim.trainable import adapters
from lmlib.parallel.mesh import make_mesh
from runner import Options, convert, fit
from runner.config import configs
from runner.errors import ConfigError
from runner.inference.loaded import load
from runner.weights.models import read_weights
from runner.weights.target import LoadOptions, LoadTarget

HF = Path(__file__).parents[2] / "hf"
BASE = HF / "golden" / "llama"
ADAPTERS = "adapter_model.safetensors"
PATHS = (
    "embedding",
    "unembedding",
    *(f"stack.*.{m}" for m in ("attention.query", "attention.output", "mlp.down")),
)


@pytest.fixture
def folder(tmp_path):
    """Adapters of PEFT's that know where their base is."""
    copied = shutil.copytree(HF / "golden_adapters" / "llama", tmp_path / "peft")
    file = copied / "adapter_config.json"
    told = json.loads(file.read_text()) | {"base_model_name_or_path": str(BASE)}
    file.write_text(json.dumps(told))
    return copied


def experiment(**settings):
    cfg = configs.load(
        "experiments/from_hf", ["tiny"], [f"folder={str(BASE)!r}", "validation=None", "mesh.fsdp=1"]
    )
    arguments = {"rank": 2, "alpha": 3.0, "paths": PATHS, "rank_stabilized": True} | settings
    cfg.model = fdl.Partial(lora, of=cfg.model, **arguments)
    cfg.trainable, cfg.frozen_dtype = fdl.Config(adapters), "float32"
    return cfg


@pytest.mark.slow
def test_runs_and_load_read_an_adapter_folder(folder):
    run = fdl.build(experiment())
    begun, name = read_weights(str(folder), LoadTarget(run.recipe, run.mesh))
    assert name == str(folder)
    at = jax.tree.map(lambda array: array.sharding, run.abstract_state().whole_model)
    assert at == jax.tree.map(lambda array: array.sharding, begun)
    loaded = load(str(folder), mesh=make_mesh(devices=jax.devices()[:1]))
    assert_same_weights(begun, loaded.model)
    assert_same_weights(begun, hf.load_adapters(folder, hf.load(BASE)))
    assert (loaded.name, loaded.longest) == (str(folder), 512)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rank": 3}, "embedding: rank 2 and alpha 3 of √rank, here rank 3 and alpha 3 of √rank"),
        ({"rank_stabilized": False}, "here rank 2 and alpha 3[)]"),
        ({"paths": ("stack.*",)}, "embedding: rank 2 and alpha 3 of √rank, here none"),
    ],
)
def test_adapters_of_another_size_are_refused(folder, settings, told):
    run = fdl.build(experiment(**settings))
    with pytest.raises(ConfigError, match=told):
        read_weights(str(folder), LoadTarget(run.recipe, run.mesh))


def test_adapters_without_a_base_are_refused(folder):
    file = folder / "adapter_config.json"
    for base, told in (
        (None, "base_model_name_or_path is not set"),
        (str(folder), "is not a base model"),
    ):
        content = json.loads(file.read_text()) | {"base_model_name_or_path": base}
        file.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=told):
            convert.bring_in(str(folder), folder.parent / "run")


@pytest.mark.slow
def test_imported_adapters_are_exported_unchanged(folder, tmp_path):
    told = convert.bring_in(str(folder), tmp_path / "run", LoadOptions(init_from=str(BASE)))
    assert told.startswith(f"the adapters of {folder}")
    cfg = configs.load(str(tmp_path / "run"))
    assert fdl.get_callable(cfg.model) is lora
    assert set(cfg.model.paths) == set(PATHS)
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        names = checkpoints.verify(0).arrays
    assert all(name.endswith((".down", ".up")) for name in names)

    saved = str(tmp_path / "run")
    convert.bring_adapters_out(saved, tmp_path / "out")
    found, expected = (tensors(each / ADAPTERS) for each in (tmp_path / "out", folder))
    for name, values in expected.items():
        if not name.endswith("base_layer.weight"):
            np.testing.assert_array_equal(found.pop(name), values)
    assert not found
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(BASE)

    convert.bring_out(saved, tmp_path / "merged", None, "float32")
    whole = merged(hf.load_adapters(folder, hf.load(BASE)))
    hf.save(whole, tmp_path / "expected", dtype="float32")
    one, other = (
        tensors(each / "model.safetensors") for each in (tmp_path / "merged", tmp_path / "expected")
    )
    assert one.keys() == other.keys()
    for name, values in other.items():
        np.testing.assert_allclose(one[name], values, atol=1e-6)


def logits(model):
    ids, model = jnp.arange(300)[None] % 62, jax.tree.map(np.asarray, model)
    compute = Compute(dtype="float32")
    return np.asarray(
        jax.jit(lambda model: model(ids, single_document_context(ids, compute)))(model)
    )


@pytest.mark.slow
def test_other_trained_weights_are_exported_with_the_adapters(folder, tmp_path):
    """Including weights that only an earlier run trained."""
    cfg = experiment(paths=("stack.*.mlp.*",))
    cfg.trainable.besides = ("*norm.scale", "unembedding")
    cfg.steps, cfg.optimizer.peak_lr = 3, 0.1
    fit(cfg, tmp_path / "first")
    cfg.trainable.besides = ("embedding",)
    fit(cfg, tmp_path / "second", Options(init_from=str(tmp_path / "first")))
    for name in ("first", "second"):
        out = tmp_path / f"{name}_peft"
        convert.bring_adapters_out(str(tmp_path / name), out)
        ours = logits(load(str(tmp_path / name), mesh=make_mesh(devices=jax.devices()[:1])).model)
        theirs = logits(hf.load_adapters(out, hf.load(BASE)))
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(ours).max()
        told = json.loads((out / "adapter_config.json").read_text())
        besides = {"lm_head", "norm"} | ({"embed_tokens"} if name == "second" else set())
        assert set(told["modules_to_save"]) == besides


@pytest.mark.slow
@pytest.mark.parametrize("before", ["everything", "other adapters"])
def test_matrices_trained_before_the_adapters_need_another_base(tmp_path, before):
    cfg = experiment(paths=("stack.*.mlp.*", "stack.*.query"))
    cfg.steps = 1
    if before == "everything":
        cfg.model, cfg.trainable, cfg.frozen_dtype = cfg.model.of, None, None
    fit(cfg, tmp_path / "first")
    cfg = experiment()
    cfg.steps = 1
    fit(cfg, tmp_path / "second", Options(init_from=str(tmp_path / "first")))
    second = str(tmp_path / "second")
    with pytest.raises(ValueError, match="give as base a folder that has it so"):
        convert.bring_adapters_out(second, tmp_path / "out")
    convert.bring_out(str(tmp_path / "first"), tmp_path / "base", dtype="float32")
    told = convert.bring_adapters_out(second, tmp_path / "out", base=str(tmp_path / "base"))
    assert told.endswith(f" for {tmp_path / 'base'}")


@pytest.mark.slow
def test_a_run_resumes_where_adapters_were_imported(folder, tmp_path):
    convert.bring_in(str(folder), tmp_path / "run")
    shutil.rmtree(folder)
    cfg = configs.load(str(tmp_path / "run"))
    run = experiment()
    cfg.data, cfg.validation, cfg.steps, cfg.checkpoints.keep = run.data, None, 4, 1
    cfg.mesh.fsdp, cfg.checkpoints.every = 1, 1
    with pytest.raises(Exception, match="stopped after step 2"):
        fit(cfg, tmp_path / "run", Options(stop=lambda step: step == 2))
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [0, 2]  # the import is kept, because it may be a base
    assert fit(cfg, tmp_path / "run").summary.steps == 4


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("golden_by_peft", reason="needs lmlib[parity]")


def base_of(kind, peft, tmp_path):
    """The base of a run, with values that need the dtype `kind`, and the same as a folder."""
    folder = tmp_path / "base"
    if kind != "run":
        peft.loaded(BASE, kind).save_pretrained(folder)
        return folder, folder
    cfg = configs.load("experiments/from_hf", ["tiny"], [f"folder={str(BASE)!r}"])
    configs.save(cfg, tmp_path / "first")
    weights = jax.tree.map(lambda x: 1.1 * x, hf.load(BASE))
    hf.save(weights, folder)
    with Checkpoints(tmp_path / "first" / "checkpoints") as checkpoints:
        checkpoints.save(2, {"model": weights}, {"initialised_from": None, "batches": NO_BATCHES})
    return tmp_path / "first", folder


def run_of(base, workdir, frozen_dtype):
    """A run of adapters that are not zero, on the base as `frozen_dtype` keeps it."""
    cfg = experiment(paths=("stack.*.mlp.*", "stack.*.query"), rank_stabilized=False)
    cfg.init_from, cfg.frozen_dtype = str(base), frozen_dtype
    write_adapter_run(cfg, base, workdir, change=0.01)
    return str(workdir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "frozen_dtype"),
    [
        ("float32", "bfloat16"),
        ("float32", "int8"),
        ("bfloat16", "int8"),
        ("float16", "bfloat16"),
        ("run", "bfloat16"),
        ("run", "int8"),
    ],
)
def test_adapters_are_merged_as_peft_merges_them_in_float32(peft, kind, frozen_dtype, tmp_path):
    """For all dtypes in which the run keeps its base."""
    base, folder = base_of(kind, peft, tmp_path)
    run = run_of(base, tmp_path / "run", frozen_dtype)
    told = convert.bring_out(run, tmp_path / "out")
    assert "in float32, each adapter added in float32 to its matrix as the base stores it" in told
    convert.bring_adapters_out(run, tmp_path / "peft", base=str(folder))
    model = peft.peft.PeftModel.from_pretrained(
        peft.loaded(folder, "float32"), tmp_path / "peft"
    ).merge_and_unload()
    expected, before = model.state_dict(), tensors(folder / "model.safetensors")
    found = tensors(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys() == before.keys()
    changed = set()
    for name, values in found.items():
        wanted, was = expected[name].numpy(), before[name].astype(np.float32)
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
        if (wanted == was).all():
            np.testing.assert_array_equal(values, was)
        else:
            changed.add(name.split(".")[-2])
    assert changed == {"gate_proj", "up_proj", "down_proj", "q_proj"}

    other = jax.tree.map(lambda x: x.at[..., 0].multiply(1.01), hf.load(folder))
    hf.save(other, tmp_path / "other")
    with pytest.raises(ConfigError, match="differ from the weights that the run was trained with"):
        convert.bring_out(
            run, tmp_path / "new", options=LoadOptions(init_from=str(tmp_path / "other"))
        )


GONE = r"cannot be read: .*/base is not a folder; .* if .*base has moved, --init_from says where it"


def moved_run(base: Path, workdir: Path, *besides: str) -> Path:
    """A run of adapters and other trained weights, whose base has moved."""
    cfg = configs.load("experiments/from_hf", ["tiny"], [f"folder={str(base)!r}"])
    cfg.model = fdl.Partial(lora, of=cfg.model, rank=2, paths=("stack.*.mlp.*",))
    cfg.trainable = fdl.Config(adapters, besides=besides)
    write_adapter_run(cfg, base, workdir)
    return workdir


def moved(tmp_path: Path, name: str, *besides: str) -> tuple[Path, Path, Path]:
    """Such a run, where its base is now, and its adapters as they were written before."""
    base = shutil.copytree(HF / "golden" / name, tmp_path / "base")
    run = moved_run(base, tmp_path / "run", *besides)
    convert.bring_adapters_out(str(run), tmp_path / "before")
    return run, base.rename(tmp_path / "moved"), tmp_path / "before"


def told_base(folder: Path) -> str:
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.mark.slow
def test_adapters_and_other_trained_weights_are_exported_without_the_base(tmp_path, capsys):
    run, base, before = moved(tmp_path, "llama", "*norm.scale", "unembedding")
    convert.bring_adapters_out(str(run), tmp_path / "peft")
    assert_same_tensors(tmp_path / "peft" / ADAPTERS, before / ADAPTERS)
    assert f"WARNING: {tmp_path}/base, which adapter_config.json names" in capsys.readouterr().err
    there = LoadOptions(init_from=str(base))
    told = convert.bring_adapters_out(str(run), tmp_path / "new", options=there)
    assert told.endswith(f" for {base}") and told_base(tmp_path / "new") == str(base)
    assert_same_tensors(tmp_path / "new" / ADAPTERS, before / ADAPTERS)
    assert "WARNING" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_moved_base_is_named_by_init_from(tmp_path):
    run, base, before = moved(tmp_path, "llama")
    with pytest.raises(ConfigError, match=GONE):
        load(str(run))
    loaded = load(str(run), init_from=str(base), mesh=make_mesh(devices=jax.devices()[:1]))
    expected = hf.load_adapters(before, hf.load(base))
    expected = jax.tree.map(lambda x, y: x.astype(y.dtype), expected, loaded.model)
    assert_same_weights(loaded.model, expected)

    command = ("-m", "runner.generate", f"--from={run}", "--tokens=1,2", "--max_tokens=2")
    refused, ended = run_forked(*command), run_forked(*command, f"--init_from={base}")
    assert refused.returncode == 2 and "--init_from says where it is now" in refused.stderr
    assert ended.returncode == 0, ended.stderr

    another = jax.tree.map(lambda x: x + 1, hf.load(base))
    hf.save(another, tmp_path / "another")
    with pytest.raises(
        ConfigError, match="differ from the weights that the run was trained with: na"
    ):
        load(str(run), init_from=str(tmp_path / "another"))
