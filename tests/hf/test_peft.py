"""Adapters in PEFT's format. Of folders that tests/hf/update.py wrote with PEFT lmlib computes what
PEFT does; what is written here is checked against merged weights and, with lmlib[parity], by PEFT
itself."""

import fnmatch
import functools
import itertools
import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted_models import (
    adapted,
    assert_same,
    assert_same_logits,
    base_of,
    ids_of,
    merge,
    theirs,
)
from hugging_face_families import (
    ADAPTERS,
    FAMILIES,
    GOLDEN,
    GOLDEN_ADAPTERS,
    KEPT,
    KINDS,
    WITH_EXPERTS,
    tensors,
    tokens,
)
from refusals import refusals
from sentinels import sentinels

from lmlib import hf, make_mesh
from lmlib.adapters.lora import with_adapters
from lmlib.hf.families import described
from lmlib.hf.peft import adapters_in, read_config
from lmlib.hf.peft.config import PeftConfig
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.parallel.axes import map_weights

# Every other family with rsLoRA; Llama both ways.
ALTERNATING = [
    ("llama", True),
    *((name, bool(i % 2)) for i, name in enumerate(KINDS)),
]


def with_others(model, paths):
    """The weights of these names are others, what they hold besides adapters."""

    def changed(weight, array):
        if not any(fnmatch.fnmatch(weight.path, path) for path in paths):
            return array
        random = np.random.default_rng(len(weight.path))
        return jnp.asarray(array + 0.3 * random.standard_normal(array.shape, np.float32))

    return map_weights(changed, model)


@pytest.mark.landing
@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_of_a_folder_that_peft_wrote(name):
    base, folder = base_of(ADAPTERS[name][0]), GOLDEN_ADAPTERS / name
    expected = tensors(folder / "expected.safetensors")["logits"]
    assert_same_logits(hf.load_adapters(folder, base), tokens(base.vocab)[0], expected, KEPT)


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_written_is_what_peft_wrote(name, tmp_path):
    base, folder = base_of(ADAPTERS[name][0]), GOLDEN_ADAPTERS / name
    model = hf.load_adapters(folder, base)
    whose, _, trained = ADAPTERS[name]
    hf.save_adapters(model, tmp_path / "out", base=f"golden/{whose}", trained=trained)
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
    for names in ("target_modules", "modules_to_save"):
        assert set(told.pop(names) or ()) == set(before[names] or ())
    assert {key: before[key] for key in told} == told


@pytest.mark.parametrize("name", sentinels(KINDS, lambda name: name == "phi3"))
def test_the_product_of_what_is_written_is_what_merging_adds(name, tmp_path):
    """A reference in NumPy, of PEFT's definition: W + alpha / √r · B · A."""
    model = adapted(name, rank=3, alpha=5.0, rank_stabilized=True)
    kind = FAMILIES[name][0]
    hf.save_adapters(model, tmp_path / "adapters", model_type=kind, trained=())
    config = read_config(tmp_path / "adapters")
    hf.save(merge(model), tmp_path / "merged", model_type=kind, dtype="float32")
    found, before = (
        tensors(folder / "model.safetensors") for folder in (tmp_path / "merged", GOLDEN / name)
    )
    pairs = tensors(tmp_path / "adapters" / "adapter_model.safetensors")
    turned = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    changed = 0
    for tensor, values in found.items():
        module = tensor.removesuffix(".weight").replace("embed_out", "lm_head")
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
@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read_again(name, tmp_path):
    """In some layers alone, and not in all matrices of them."""
    kind = FAMILIES[name][0]
    joined = kind in ("phi3", "gpt2", "gpt_neox", "deepseek_v3")
    paths = ("stack.patterns.0.0.*.query*",) if joined else ("stack.patterns.0.0.*",)
    model = adapted(name, rank=2, alpha=5.0, paths=paths, dropout=0.25)
    hf.save_adapters(model, tmp_path / "out", model_type=kind, trained=())
    again = hf.load_adapters(tmp_path / "out", base_of(name), model_type=kind)
    if not joined:
        assert_same(again, model)
    added = [jax.tree.leaves(merge(each).stack.patterns[0][0].attention) for each in (again, model)]
    for one, other in zip(*added, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_adapters_lie_as_the_weights_beside_which_they_are(tmp_path):
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    folder = GOLDEN_ADAPTERS / "llama"
    split = hf.load_adapters(folder, hf.load(GOLDEN / "llama", mesh))
    down = split.stack.patterns[0][0].attention.query.down
    assert len({str(shard.index) for shard in down.addressable_shards}) == 4
    assert_same(split, hf.load_adapters(folder, base_of("llama")))
    hf.save_adapters(split, tmp_path / "out", trained=())


@functools.cache
def shapes(name="llama"):
    found = described(GOLDEN / name)
    return jax.eval_shape(found.build, jax.random.key(0)), found.family.names


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(GOLDEN_ADAPTERS / "llama", tmp_path / "adapters")


def test_values_that_are_not_finite_are_refused(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + np.float32("nan").tobytes())
    base, names = shapes()
    found = adapters_in(folder, base, names)
    with pytest.raises(FolderError, match=r"1 of \d+ values of base_model.* are not finite"):
        found.values(found.beside(base))


HUGE = ("alpha_pattern", {"q_proj": 10**400}, "alpha_pattern: q_proj = 10+ is invalid")


@pytest.mark.parametrize(("key", "value", "told"), [*refusals(__file__, "adapters"), HUGE])
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
        {"alpha_pattern": {"^model.embed_tokens": 4.5, "embed_tokens": 5, "^q_proj": 100}},
        {"rank_pattern": {"^v_proj": 2, "^q_proj": 4, "embed": 4, "layers.0.self_attn": 4}},
    ],
)
def test_what_a_config_may_say(folder, changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    found = adapters_in(folder, *shapes())
    assert found.sizes["embedding"] == (2, 4.5 if "alpha_pattern" in changes else 3.0)
    assert found.sizes["stack.patterns.0.0.attention.query"] == (2, 3.0)
    if "alpha_pattern" in changes:
        with pytest.raises(FolderError, match="several ranks or alphas"):
            found.arguments(shapes()[0])
    else:
        paths = ["embedding", *(f"stack.*.{each}" for each in ("attention.query",))]
        assert set(paths) < set(found.arguments(shapes()[0])["paths"])


@pytest.mark.landing
def test_keys_of_patterns_stand_for_the_modules_that_they_do_in_peft(peft):
    layer = "model.layers.1.self_attn"
    modules = ("q_proj", "lm_head", f"{layer}.q_proj", f"{layer}.xq_proj", f"{layer}_q_proj")
    keys = (
        *("q_proj", "^q_proj", "^lm_head", f"^{layer}.q_proj", f"{layer}.q_proj", "self_attn"),
        *(r".*\.self_attn\.q_proj", r"^.*\.q_proj", r"self_attn\.q_proj", "self_attn.q_proj"),
        *("1.self_attn.q_proj", "layers.1", "proj", "lm_head"),
    )
    for one, other in itertools.permutations(keys, 2):
        ranks = {one: 1, other: 2}
        config = PeftConfig(rank=3, alpha=1.0, ranks=ranks)
        for module in modules:
            key = peft.get_pattern_key(ranks.keys(), module)
            assert config.rank_of(module) == ranks.get(key, 3), (ranks, module)


def test_a_pickle_is_never_read(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FolderError, match="is a pickle"):
        adapters_in(folder, *shapes())


def test_what_peft_has_not_is_refused(tmp_path):
    tied, _ = shapes("llama_tied_one_head")
    make = functools.partial(with_adapters, paths=(), axes=("vocab",), key=jax.random.key(0))
    with pytest.raises(ValueError, match="for the adapters of embedding"):
        hf.save_adapters(jax.eval_shape(make, tied), tmp_path, trained=())
    model = jax.eval_shape(functools.partial(with_adapters, key=jax.random.key(0)), shapes()[0])
    with pytest.raises(
        ValueError, match=r"no place for the trained model\.layers\.0\.self_attn\.q"
    ):
        hf.save_adapters(model, tmp_path, trained=("*attention.query",))
    with pytest.raises(TypeError, match="'trained'"):  # or what trained besides would be left out
        hf.save_adapters(model, tmp_path)
    with pytest.raises(ValueError, match="the model has no adapters"):
        hf.save_adapters(shapes()[0], tmp_path, trained=())


def test_adapters_of_a_tied_table_are_refused_by_name(folder):
    with pytest.raises(
        FolderError, match=r"lm_head\.lora_A\.weight adapts lm_head, but lm_head and model\.embed_t"
    ):
        adapters_in(folder, *shapes("llama_tied_one_head"))


@pytest.mark.slow
@pytest.mark.parametrize("table", ["lm_head", "embed_tokens"])
def test_they_are_read_for_a_base_that_has_the_table_twice(peft, table, tmp_path):
    name = "llama_tied_one_head"
    model = peft.adapted(name, r=2, target_modules=["q_proj", table])
    model.save_pretrained(tmp_path / "peft")
    with pytest.raises(FolderError, match=rf"adapts (model\.)?{table}, but lm_head and model\.emb"):
        hf.load_adapters(tmp_path / "peft", base_of(name))
    tied = base_of(name)
    apart = eqx.tree_at(
        lambda m: m.unembedding, tied, tied.embedding.T, is_leaf=lambda x: x is None
    )
    hf.save(apart, tmp_path / "base", dtype="float32")
    found = hf.load_adapters(tmp_path / "peft", hf.load(tmp_path / "base"))
    assert_same_logits(found, ids_of(name), theirs(model, ids_of(name)))


def test_what_float16_cannot_hold_is_refused_by_name(tmp_path):
    model = jax.tree.map(lambda w: jnp.asarray(1e6 * np.asarray(w)), adapted("llama", rank=3))
    with pytest.raises(ValueError, match=r"lora_A\.weight holds .* become infinite in float16"):
        hf.save_adapters(model, tmp_path / "new", dtype="float16", trained=())
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("golden_by_peft", reason="needs lmlib[parity]")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stabilized"), ALTERNATING)
def test_peft_computes_the_same_of_what_is_written_here(peft, name, stabilized, tmp_path):
    kind = FAMILIES[name][0]
    model = adapted(name, rank=3, alpha=5.0, rank_stabilized=stabilized)
    hf.save_adapters(model, tmp_path / "out", model_type=kind, trained=())
    expected = theirs(peft.read(name, tmp_path / "out"), ids_of(name))
    assert_same_logits(model, ids_of(name), expected)
    assert_same_logits(merge(model), ids_of(name), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stabilized"), ALTERNATING)
def test_of_what_peft_writes_lmlib_computes_the_same(peft, name, stabilized, tmp_path):
    targets = [
        "q_proj", "v_proj", "qkv_proj", "c_attn", "c_proj", "query_key_value", "dense", "q_b_proj",
        "kv_b_proj",
        *(() if name in WITH_EXPERTS else ("down_proj",)),  # there PEFT adapts a parameter
    ]  # fmt: skip
    model = peft.adapted(
        name, r=4, lora_alpha=6, use_rslora=stabilized, target_modules=targets,
        rank_pattern={"^v_proj": 2, "down_proj": 3},
        alpha_pattern={"^q_proj": 100, "c_proj": 5, "v_proj": 7},
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    found = hf.load_adapters(tmp_path, base_of(name), model_type=FAMILIES[name][0])
    expected = theirs(model, ids_of(name))
    assert_same_logits(found, ids_of(name), expected)
    assert_same_logits(merge(found), ids_of(name), expected)


# What trains besides adapters: the adapted matrices, the rest, and PEFT's names of the rest.
BESIDES = json.loads(Path(__file__).with_name("trained_besides.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDES)
def test_peft_computes_the_same_of_what_trained_besides_adapters(peft, name, tmp_path):
    adapts, besides, _ = BESIDES[name]
    model = with_others(adapted(name, rank=3, alpha=5.0, paths=adapts), besides)
    kind = FAMILIES[name][0]
    hf.save_adapters(model, tmp_path / "out", model_type=kind, trained=besides)
    expected = theirs(peft.read(name, tmp_path / "out"), ids_of(name))
    assert_same_logits(model, ids_of(name), expected)
    with pytest.raises(AssertionError):  # they matter
        assert_same_logits(adapted(name, rank=3, alpha=5.0, paths=adapts), ids_of(name), expected)
    again = hf.load_adapters(tmp_path / "out", base_of(name), model_type=kind)
    assert_same_logits(again, ids_of(name), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDES)
def test_of_what_peft_trained_besides_adapters_lmlib_computes_the_same(peft, name, tmp_path):
    model = peft.adapted(
        name, r=3, lora_alpha=5, modules_to_save=BESIDES[name][2],
        target_modules=[
            {"phi3": "o_proj", "gpt2": "c_attn", "gpt_neox": "query_key_value"}.get(name, "q_proj")
        ],
        bias="lora_only", ensure_weight_tying=name == "llama_tied_one_head",
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    found = hf.load_adapters(tmp_path, base_of(name), model_type=FAMILIES[name][0])
    assert_same_logits(found, ids_of(name), theirs(model, ids_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_golden_folder_is_what_peft_computes(peft, name, tmp_path):
    peft.write(tmp_path, *ADAPTERS[name][:2])
    for file in ("adapter_model", "expected"):
        found, expected = (
            tensors(folder / f"{file}.safetensors") for folder in (tmp_path, GOLDEN_ADAPTERS / name)
        )
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, atol=1e-5 * np.abs(values).max())
