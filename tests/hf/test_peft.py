"""Adapters in PEFT's format. Of folders that tests/hf/update.py wrote with PEFT lmlib computes what
PEFT does; what is written here is checked against merged weights and, with lmlib[parity], by PEFT
itself."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_families import (
    ADAPTERS,
    FAMILIES,
    GOLDEN,
    GOLDEN_ADAPTERS,
    KEPT,
    tensors,
    tokens,
)
from sentinels import sentinels

from lmlib import Compute, hf, make_mesh, whole_rows
from lmlib.adapters import merged, with_adapters
from lmlib.hf.families import described
from lmlib.hf.peft import adapters_in, read_config
from lmlib.hf.tensor_files import FolderError
from lmlib.models.adapted import map_adapted

FLOAT32 = Compute(dtype="float32")
PROMPT = 300
# Every other family with rsLoRA; Llama both ways.
ALTERNATING = [
    ("llama", True),
    *((name, bool(i % 2)) for i, name in enumerate(FAMILIES)),
]


@functools.cache
def base_of(name):
    return hf.load(GOLDEN / name)


@jax.jit
def logits(model, ids):
    return model(ids, whole_rows(ids, FLOAT32))


def assert_same_logits(model, ids, expected, kept=slice(None)):
    with jax.default_matmul_precision("highest"):
        found = np.asarray(logits(model, jnp.asarray(ids, jnp.int32)))[0, kept]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def with_values(model):
    """Adapters that change what the model computes, but not its scale."""

    def filled(path, one):
        key = jax.random.key(len(path))
        return dataclasses.replace(one, up=0.1 * jax.random.normal(key, one.up.shape))

    return map_adapted(filled, model)


def adapted(name, **settings):
    key = jax.random.key(1)
    return jax.jit(lambda base: with_values(with_adapters(base, **settings, key=key)))(
        base_of(name)
    )


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_of_a_folder_that_peft_wrote(name):
    base, folder = base_of(ADAPTERS[name][0]), GOLDEN_ADAPTERS / name
    expected = tensors(folder / "expected.safetensors")["logits"]
    assert_same_logits(hf.load_adapters(folder, base), tokens(base.vocab)[0], expected, KEPT)


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_written_is_what_peft_wrote(name, tmp_path):
    base, folder = base_of(ADAPTERS[name][0]), GOLDEN_ADAPTERS / name
    model = hf.load_adapters(folder, base)
    hf.save_adapters(model, tmp_path / "out", base=f"golden/{name}")
    found, expected = (
        tensors(each / "adapter_model.safetensors") for each in (tmp_path / "out", folder)
    )
    expected = {
        key: each for key, each in expected.items() if not key.endswith("base_layer.weight")
    }
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values)
    told, before = (
        json.loads((each / "adapter_config.json").read_text())
        for each in (tmp_path / "out", folder)
    )
    assert set(told.pop("target_modules")) == set(before["target_modules"])
    assert {key: before[key] for key in told} == told


@pytest.mark.parametrize("name", sentinels(FAMILIES, lambda name: name == "phi3"))
def test_the_product_of_what_is_written_is_what_merging_adds(name, tmp_path):
    """A reference in NumPy, of PEFT's definition: W + alpha / √r · B · A."""
    model = adapted(name, rank=3, alpha=5.0, rank_stabilized=True)
    kind = FAMILIES[name][0]
    hf.save_adapters(model, tmp_path / "adapters", model_type=kind)
    hf.save(jax.jit(merged)(model), tmp_path / "merged", model_type=kind, dtype="float32")
    config = read_config(tmp_path / "adapters")
    found, before = (
        tensors(folder / "model.safetensors") for folder in (tmp_path / "merged", GOLDEN / name)
    )
    pairs = tensors(tmp_path / "adapters" / "adapter_model.safetensors")
    turned = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    changed = 0
    for tensor, values in found.items():
        module = tensor.removesuffix(".weight")
        key = f"base_model.model.{module}.lora_A.weight"
        expected = before[tensor]
        if key in pairs:
            a, b = pairs.pop(key), pairs.pop(key.replace("lora_A", "lora_B"))
            assert len(a) == config.rank_of(module)
            added = config.alpha_of(module) / len(a) ** 0.5 * (b @ a)
            expected = expected + (added.T if turned["fan_in_fan_out"] else added)
            changed += 1
        assert np.abs(values - expected).max() <= 1e-6 * np.abs(expected).max(), tensor
    assert changed and not pairs


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_again(name, tmp_path):
    """In some layers alone, and not in all matrices of them."""
    paths = ("stack.0.0.*.query",) if name in ("phi3", "phi4_mini", "gpt2") else ("stack.0.0.*",)
    model = adapted(name, rank=2, alpha=5.0, paths=paths, dropout=0.25)
    kind = FAMILIES[name][0]
    hf.save_adapters(model, tmp_path / "out", model_type=kind)
    again = hf.load_adapters(tmp_path / "out", base_of(name), model_type=kind)
    if paths == ("stack.0.0.*",):
        assert_same(again, model)
    added = [jax.jit(merged)(each).stack[0][0].attention.query for each in (again, model)]
    np.testing.assert_allclose(*added, atol=1e-6)


@pytest.mark.slow
def test_adapters_lie_as_the_weights_beside_which_they_are(tmp_path):
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    folder = GOLDEN_ADAPTERS / "llama"
    split = hf.load_adapters(folder, hf.load(GOLDEN / "llama", mesh))
    down = split.stack[0][0].attention.query.down
    assert len({str(shard.index) for shard in down.addressable_shards}) == 4
    assert_same(split, hf.load_adapters(folder, base_of("llama")))
    hf.save_adapters(split, tmp_path / "out")


@functools.cache
def shapes(name="llama"):
    found = described(GOLDEN / name)
    return jax.eval_shape(found.build, jax.random.key(0)), found.family.names


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN_ADAPTERS / "llama", tmp_path / "adapters")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("peft_type", "IA3", "only 'LORA'"),
        ("task_type", "SEQ_CLS", "only 'CAUSAL_LM'"),
        ("use_dora", True, "use_dora = True is not supported"),
        ("bias", "all", "bias = 'all' is not supported"),
        ("modules_to_save", ["lm_head"], "modules_to_save = "),
        ("init_lora_weights", "pissa", "init_lora_weights = 'pissa'"),
        ("layers_to_transform", [1], "layers_to_transform = "),
        ("ensure_weight_tying", True, "ensure_weight_tying = True"),
        ("target_parameters", ["experts.up"], "target_parameters = "),
        ("a_new_key", 1, "a_new_key = 1: unknown here"),
        ("lora_alpha", 0, "an alpha of 0.0"),
        ("r", 0, "a rank of 0"),
        ("r", 3, r"has shape \(2, 16\) instead of \(3, 16\)"),
        ("rank_pattern", {"q_proj": 4}, r"has shape \(2, 16\) instead of \(4, 16\)"),
        ("rank_pattern", {"layers.[01].*": 4}, "has the pattern"),
        ("alpha_pattern", {"layers.1.self_attn.q_proj": 4}, "must be alike"),
        ("target_modules", ["q_proj", "o_proj", "v_proj"], "v_proj.lora_A.weight is missing"),
        ("target_modules", ["q_proj"], "lora_A.weight is unknown"),
        ("exclude_modules", ["lm_head"], "lm_head.base_layer.weight is unknown"),
    ],
)
def test_what_a_config_may_not_say(folder, key, value, told):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(FolderError, match=told):
        adapters_in(folder, *shapes())


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r".*(q_proj|o_proj|down_proj|embed_tokens|lm_head)"},
        {"fan_in_fan_out": True},
        {"alpha_pattern": {"model.embed_tokens": 4.5}},
    ],
)
def test_what_a_config_may_say(folder, changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    found = adapters_in(folder, *shapes())
    assert found.sizes["embedding"] == (2, 4.5 if "alpha_pattern" in changes else 3.0)
    assert found.sizes["stack.0.0.attention.query"] == (2, 3.0)
    if "alpha_pattern" in changes:
        with pytest.raises(FolderError, match="several ranks or alphas"):
            found.arguments(shapes()[0])
    else:
        paths = ["embedding", *(f"stack.*.{each}" for each in ("attention.query",))]
        assert set(paths) < set(found.arguments(shapes()[0])["paths"])


def test_a_pickle_is_never_read(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FolderError, match="is a pickle"):
        adapters_in(folder, *shapes())


def test_what_peft_has_not_is_refused(tmp_path):
    tied, _ = shapes("llama_tied_one_head")
    make = functools.partial(with_adapters, paths=(), axes=("vocab",), key=jax.random.key(0))
    with pytest.raises(ValueError, match="for the adapters of embedding"):
        hf.save_adapters(jax.eval_shape(make, tied), tmp_path)
    with pytest.raises(ValueError, match="the model has no adapters"):
        hf.save_adapters(shapes()[0], tmp_path)


def ids_of(name):
    return np.random.default_rng(1).integers(0, base_of(name).vocab, (1, PROMPT))


def theirs(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)).logits[0].numpy()


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("golden_by_peft", reason="needs lmlib[parity]")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stabilized"), ALTERNATING)
def test_peft_computes_the_same_of_what_is_written_here(peft, name, stabilized, tmp_path):
    model = adapted(name, rank=3, alpha=5.0, rank_stabilized=stabilized)
    hf.save_adapters(model, tmp_path / "out", model_type=FAMILIES[name][0])
    expected = theirs(peft.read(name, tmp_path / "out"), ids_of(name))
    assert_same_logits(model, ids_of(name), expected)
    assert_same_logits(merged(model), ids_of(name), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stabilized"), ALTERNATING)
def test_of_what_peft_writes_lmlib_computes_the_same(peft, name, stabilized, tmp_path):
    targets = ["q_proj", "v_proj", "down_proj", "qkv_proj", "c_attn", "c_proj"]
    model = peft.adapted(
        name, r=4, lora_alpha=6, use_rslora=stabilized, target_modules=targets,
        rank_pattern={"down_proj": 3}, alpha_pattern={"c_proj": 5, "v_proj": 7},
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    found = hf.load_adapters(tmp_path, base_of(name), model_type=FAMILIES[name][0])
    expected = theirs(model, ids_of(name))
    assert_same_logits(found, ids_of(name), expected)
    assert_same_logits(merged(found), ids_of(name), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_golden_folder_is_what_peft_computes(peft, name, tmp_path):
    peft.write(tmp_path, *ADAPTERS[name])
    for file in ("adapter_model", "expected"):
        found, expected = (
            tensors(folder / f"{file}.safetensors") for folder in (tmp_path, GOLDEN_ADAPTERS / name)
        )
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, atol=1e-5 * np.abs(values).max())
