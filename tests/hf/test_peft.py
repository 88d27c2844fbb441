"""Adapters in PEFT's format: golden folders that tests/hf/update.py wrote with PEFT, PEFT's
definition in NumPy, and refusals. tests/hf/test_peft_parity.py compares with PEFT itself."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted_models import adapted, assert_same_logits, base_of, merge
from expert_adapters import (
    ALL_WEIGHTS,
    EXPERT_TENSORS,
    save_tensors,
    two_ranks,
    write_expert_modules,
)
from hugging_face_families import (
    ADAPTERS,
    FAMILIES,
    GOLDEN,
    GOLDEN_ADAPTERS,
    KEPT,
    KINDS,
    tensors,
    tokens,
)
from refusals import refusals
from sentinels import sentinels
from states import assert_same_bits

from lmlib import hf, make_mesh
from lmlib.adapters.lora import with_adapters
from lmlib.hf.families import described
from lmlib.hf.peft.config import read_config
from lmlib.hf.peft.load import adapters_in
from lmlib.models.families.hugging_face.settings import FolderError

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def written(model, folder, name):
    hf.save_adapters(model, folder, model_type=FAMILIES[name][0], trained=())
    return folder


def read(folder, name):
    return hf.load_adapters(folder, base_of(name), model_type=FAMILIES[name][0])


def merged_and_before(model, folder, name):
    """Returns the tensors of the model with merged adapters, and of its base."""
    hf.save(merge(model), folder, model_type=FAMILIES[name][0], dtype="float32")
    return [tensors(each / "model.safetensors") for each in (folder, GOLDEN / name)]


def assert_merges_alike(one, other):
    near = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(near, merge(one), merge(other))


@pytest.mark.landing
@pytest.mark.parametrize("name", ADAPTERS)
def test_golden_folders_give_the_logits_of_peft(name):
    base, folder = base_of(ADAPTERS[name][0]), GOLDEN_ADAPTERS / name
    expected = tensors(folder / "expected.safetensors")["logits"]
    assert_same_logits(hf.load_adapters(folder, base), tokens(base.vocab)[0], expected, KEPT)


@pytest.mark.parametrize("name", ADAPTERS)
def test_golden_folders_are_written_as_peft_wrote_them(name, tmp_path):
    base, folder = base_of(ADAPTERS[name][0]), GOLDEN_ADAPTERS / name
    model = hf.load_adapters(folder, base)
    whose, _, trained = ADAPTERS[name]
    hf.save_adapters(model, tmp_path / "out", base=f"golden/{whose}", trained=trained)
    found, expected = (tensors(each / FILE) for each in (tmp_path / "out", folder))
    expected = {n: each for n, each in expected.items() if not n.endswith("base_layer.weight")}
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values)
    told, before = (json.loads((each / CONFIG).read_text()) for each in (tmp_path / "out", folder))
    for names in ("target_modules", "modules_to_save"):
        assert set(told.pop(names) or ()) == set(before[names] or ())
    assert {key: before[key] for key in told} == told


@pytest.mark.parametrize("name", sentinels(KINDS, lambda name: name == "phi3"))
def test_written_factors_multiply_to_what_merging_adds(name, tmp_path):
    """PEFT's definition: W + alpha / √r · B · A."""
    model = adapted(name, rank=3, alpha=5.0, rank_stabilized=True)
    config = read_config(written(model, tmp_path / "adapters", name))
    found, before = merged_and_before(model, tmp_path / "merged", name)
    pairs = tensors(tmp_path / "adapters" / FILE)
    turned = json.loads((tmp_path / "adapters" / CONFIG).read_text())["fan_in_fan_out"]
    changed = 0
    for tensor, values in found.items():
        module = tensor.removesuffix(".weight").replace("embed_out", "lm_head")
        # Names of Kimi's class.
        module = re.sub(r"(self_attn)\.(f_[ab]_proj)", r"\1.forget_gate.\2", module)
        module = module.replace("block_sparse_moe.shared_experts", "mlp.shared_experts")
        key = f"base_model.model.{module}.lora_A.weight"
        expected = before[tensor]
        if key in pairs:
            a, b = pairs.pop(key), pairs.pop(key.replace("lora_A", "lora_B"))
            assert len(a) == config.rank_of(module)
            added = config.alpha_of(module) / len(a) ** 0.5 * (b @ a)
            expected = expected + (added.T if turned else added)
            changed += 1
        assert np.abs(values - expected).max() <= 1e-6 * np.abs(expected).max(), tensor
    assert changed and not pairs


@pytest.mark.parametrize("name", sentinels(EXPERT_TENSORS, lambda name: name == "mixtral"))
def test_written_factors_of_experts_multiply_to_what_merging_adds(name, tmp_path):
    """PEFT's definition for each expert: W + alpha / r · B · A.

    Rows of A belong to one expert after the other, and columns of B to each expert in turn.
    """
    model = adapted(name, rank=2, alpha=5.0, paths=ALL_WEIGHTS)
    config = read_config(written(model, tmp_path / "adapters", name))
    assert {*config.parameters} == {"experts.gate_up_proj", "experts.down_proj"}
    pairs = tensors(tmp_path / "adapters" / FILE)
    found, before = merged_and_before(model, tmp_path / "merged", name)
    module, gate, up, down = EXPERT_TENSORS[name]
    X = base_of(name).stack.patterns[0][0].mlp.router.experts

    def added(prefix, parameter):
        a, b = (pairs[f"{prefix}.lora_{each}.weight"] for each in "AB")
        rank, alpha = config.rank_of(parameter), config.alpha_of(parameter)
        a, b = a.reshape(X, rank, -1), b.reshape(-1, rank, X)
        return alpha / rank * np.einsum("orx,xri->xoi", b, a)

    for layer in range(3):
        holder = f"base_model.model.model.layers.{layer}.mlp.experts"
        gate_up = added(f"{holder}.base_layer", "experts.gate_up_proj")
        changes = dict(zip((gate, up), np.split(gate_up, 2, axis=1), strict=True))
        changes[down] = added(holder, "experts.down_proj")
        for expert in range(X):
            for matrix, change in changes.items():
                key = f"model.layers.{layer}.{module}.experts.{expert}.{matrix}.weight"
                assert np.abs(change[expert]).max() > 0.01
                expected = before[key] + change[expert]
                np.testing.assert_allclose(found[key], expected, atol=1e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_adapters_of_some_layers_and_matrices_are_read_back(name, tmp_path):
    joined = FAMILIES[name][0] in ("phi3", "gpt2", "gpt_neox", "deepseek_v3", "kimi_linear")
    paths = ("stack.patterns.0.0.*.query*",) if joined else ("stack.patterns.0.0.*",)
    family = FAMILIES[name][0]
    if family == "qwen3_next":  # PEFT takes its MLPs for experts
        paths = ("stack.patterns.0.0.attention.*",)
    model = adapted(name, rank=2, alpha=5.0, paths=paths, dropout=0.25)
    again = read(written(model, tmp_path / "out", name), name)
    if not joined and family not in ("lfm2", "qwen3_next", "bamba", "granitemoehybrid"):
        assert_same_bits(again, model)
    assert_merges_alike(again, model)


@pytest.mark.parametrize(
    "paths",
    [("*.experts.down",), pytest.param(("*.query", "*.experts.up"), marks=pytest.mark.slow)],
)
def test_adapters_of_experts_are_read_back(paths, tmp_path):
    model = adapted("mixtral", rank=2, alpha=5.0, paths=paths)
    again = read(written(model, tmp_path / "out", "mixtral"), "mixtral")
    assert_merges_alike(again, model)
    if paths == ("*.experts.down",):
        assert_same_bits(model, again)


def test_attention_and_experts_may_have_different_ranks(tmp_path):
    model = two_ranks("mixtral")
    config = read_config(written(model, tmp_path / "out", "mixtral"))
    names = ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")
    found = [(config.rank_of(name), config.alpha_of(name)) for name in names]
    # Gate and up are one parameter there, with the ranks of both.
    assert found == [(4, 8.0), (4, 8.0), (4, 10.0), (2, 5.0)]
    assert_merges_alike(read(tmp_path / "out", "mixtral"), model)


@pytest.mark.landing
def test_a_module_for_each_expert_is_read(tmp_path):
    model = write_expert_modules(tmp_path / "old", "mixtral")
    assert_same_bits(read(tmp_path / "old", "mixtral"), model)
    file = tmp_path / "old" / FILE
    fewer = {key: each for key, each in tensors(file).items() if ".experts.4." not in key}
    file.unlink()
    save_tensors(fewer, file)
    with pytest.raises(FolderError, match=r"experts\.4\.w1\.lora_A\.weight is missing"):
        read(tmp_path / "old", "mixtral")


@pytest.mark.landing
def test_experts_of_deepseek_are_adapted_though_its_dense_mlps_cannot_be(tmp_path):
    """Their names end alike."""
    model = adapted("deepseek_v3", rank=2, paths=("*.experts.*",))
    config = read_config(written(model, tmp_path / "out", "deepseek_v3"))
    assert {*config.parameters} == {"experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.slow
def test_adapters_take_the_layout_of_their_weights(tmp_path):
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    folder = GOLDEN_ADAPTERS / "llama"
    split = hf.load_adapters(folder, hf.load(GOLDEN / "llama", mesh))
    down = split.stack.patterns[0][0].attention.query.down
    assert len({str(shard.index) for shard in down.addressable_shards}) == 4
    assert_same_bits(split, hf.load_adapters(folder, base_of("llama")))
    hf.save_adapters(split, tmp_path / "out", trained=())


@functools.cache
def shapes(name="llama"):
    found = described(GOLDEN / name)
    return jax.eval_shape(found.build, jax.random.key(0)), found.family.names


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN_ADAPTERS / "llama", tmp_path / "adapters")


def change_config(folder, **changes):
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(content | changes))


def test_damaged_or_unsafe_tensors_are_refused(folder):
    file = folder / FILE
    file.write_bytes(file.read_bytes()[:-4] + np.float32("nan").tobytes())
    base, names = shapes()
    found = adapters_in(folder, base, names)
    with pytest.raises(FolderError, match=r"1 of \d+ values of base_model.* are not finite"):
        found.values(found.beside(base))
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(FolderError, match="is a pickle"):
        adapters_in(folder, base, names)


HUGE = ("alpha_pattern", {"q_proj": 10**400}, "alpha_pattern: q_proj = 10+ is invalid")


@pytest.mark.parametrize(("key", "value", "told"), [*refusals(__file__, "adapters"), HUGE])
def test_config_values_that_are_refused(folder, key, value, told):
    change_config(folder, **{key: value})
    with pytest.raises(FolderError, match=told):
        adapters_in(folder, *shapes())


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r".*(q_proj|o_proj|down_proj|embed_tokens|lm_head)"},
        {"fan_in_fan_out": True},
        {"alpha_pattern": {"^model.embed_tokens": 4.5, "embed_tokens": 5, "^q_proj": 100}},
        {"rank_pattern": {"^v_proj": 2, "^q_proj": 4, "embed": 4, "layers.0.self_attn": 4}},
    ],
)
def test_config_values_that_are_read(folder, changes):
    change_config(folder, **changes)
    found = adapters_in(folder, *shapes())
    assert found.sizes["embedding"] == (2, 4.5 if "alpha_pattern" in changes else 3.0)
    assert found.sizes["stack.patterns.0.0.attention.query"] == (2, 3.0)
    if "alpha_pattern" in changes:
        with pytest.raises(FolderError, match="several ranks or alphas"):
            found.arguments(shapes()[0])
    else:
        paths = {"embedding", "stack.*.attention.query"}
        assert paths < set(found.arguments(shapes()[0])["paths"])


def test_parameters_and_patterns_of_experts_are_names(tmp_path):
    model = adapted("mixtral", rank=2, paths=("*.experts.down",))
    folder = written(model, tmp_path / "out", "mixtral")
    before = (folder / CONFIG).read_text()
    for names, told in (
        (["experts.w1"], "target_parameters has 'experts.w1', and the model has no such"),
        (["experts.gate_up_proj"], "lora_A.weight has shape"),
    ):
        change_config(folder, target_parameters=names)
        with pytest.raises(FolderError, match=told):
            read(folder, "mixtral")
    (folder / CONFIG).write_text(before)
    change_config(folder, r=9, rank_pattern={r".*\.mlp\.experts\.down_proj": 2})
    found = adapters_in(folder, base_of("mixtral"), described(GOLDEN / "mixtral").family.names)
    assert {rank for rank, _ in found.sizes.values()} == {2}


def test_adapters_that_peft_cannot_hold_are_refused(tmp_path):
    tied, _ = shapes("llama_tied_one_head")
    make = functools.partial(with_adapters, paths=(), axes=("vocab",), key=jax.random.key(0))
    with pytest.raises(ValueError, match="for the adapters of embedding"):
        hf.save_adapters(jax.eval_shape(make, tied), tmp_path, trained=())
    model = jax.eval_shape(functools.partial(with_adapters, key=jax.random.key(0)), shapes()[0])
    with pytest.raises(
        ValueError, match=r"no place for the trained model\.layers\.0\.self_attn\.q"
    ):
        hf.save_adapters(model, tmp_path, trained=("*attention.query",))
    with pytest.raises(TypeError, match="'trained'"):  # or other trained weights would be left out
        hf.save_adapters(model, tmp_path)
    with pytest.raises(ValueError, match="the model has no adapters"):
        hf.save_adapters(shapes()[0], tmp_path, trained=())
    experts = adapted("mixtral", rank=2, paths=("*.experts.down",))
    with pytest.raises(ValueError, match=r"no place for the trained .*experts\.gate_up_proj"):
        hf.save_adapters(experts, tmp_path / "out", trained=("*.experts.gate",))
    huge = jax.tree.map(lambda w: jnp.asarray(1e6 * np.asarray(w)), adapted("llama", rank=3))
    with pytest.raises(ValueError, match=r"lora_A\.weight holds .* become infinite in float16"):
        hf.save_adapters(huge, tmp_path / "new", dtype="float16", trained=())
    assert not (tmp_path / "new").exists()


def test_adapters_of_a_tied_table_are_refused_by_name(folder):
    with pytest.raises(
        FolderError, match=r"lm_head\.lora_A\.weight adapts lm_head, but lm_head and model\.embed_t"
    ):
        adapters_in(folder, *shapes("llama_tied_one_head"))
