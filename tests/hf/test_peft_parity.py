"""PEFT and lmlib compute the same from adapters that either writes. Needs lmlib[parity]."""

import fnmatch
import itertools
import json
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from adapted_models import adapted, assert_same_logits, base_of, ids_of, merge, theirs
from expert_adapters import ALL_WEIGHTS, EXPERT_TENSORS, two_ranks, write_expert_modules
from hugging_face_families import ADAPTERS, FAMILIES, GOLDEN_ADAPTERS, KINDS, WITH_EXPERTS, tensors

from lmlib import hf
from lmlib.hf.peft.config import PeftConfig
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.parallel.axes import map_weights

peft = pytest.importorskip("golden_by_peft", reason="needs lmlib[parity]")

# Every other family with rsLoRA; Llama both ways.
ALTERNATING = [
    ("llama", True),
    *((name, bool(i % 2)) for i, name in enumerate(KINDS)),
]


def read(name, folder):
    return hf.load_adapters(folder, base_of(name), model_type=FAMILIES[name][0])


def write(model, name, folder, trained=()):
    hf.save_adapters(model, folder, model_type=FAMILIES[name][0], trained=trained)
    return peft.read(name, folder)


def assert_computes(model, name, expected):
    """`model` computes the logits of `expected`, and its merged weights do too."""
    logits = theirs(expected, ids_of(name))
    # Delta rules enlarge float32's rounding, and each processor rounds in its own order: for
    # qwen3_next_some_dense transformers is off by 2.8e-5 from its float64 logits, lmlib by 8.7e-6.
    bound = 4e-5 if name.startswith(("qwen3_next", "olmo_hybrid", "kimi")) else 1e-5
    assert_same_logits(model, ids_of(name), logits, bound=bound)
    assert_same_logits(merge(model), ids_of(name), logits, bound=bound)


WRITTEN = [
    *((name, {"rank_stabilized": stabilized}) for name, stabilized in ALTERNATING),
    *((n, {"paths": ALL_WEIGHTS, "rank_stabilized": n == "olmoe"}) for n in EXPERT_TENSORS),
    ("mixtral", {"paths": ("*.experts.down",)}),
    ("qwen3_moe", {"paths": ("*.key", "*.experts.gate")}),
    ("deepseek_v3", {"paths": ("*.experts.*",)}),
    ("gpt_oss", {"paths": ALL_WEIGHTS}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), WRITTEN)
def test_peft_computes_the_same_from_written_adapters(name, settings, tmp_path):
    model = adapted(name, rank=3, alpha=5.0, **settings)
    assert_computes(model, name, write(model, name, tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_TENSORS)
def test_peft_computes_the_same_from_two_ranks(name, tmp_path):
    model = two_ranks(name)
    assert_computes(model, name, write(model, name, tmp_path / "out"))


def dense_settings(name, stabilized):
    targets = ["q_proj", "v_proj", "qkv_proj", "c_attn", "c_proj", "query_key_value", "dense"]
    targets += ["q_b_proj", "kv_b_proj", "in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba"]
    targets += ["w2"] if name.startswith("lfm2") else []  # in other classes of an expert
    targets += [] if name in WITH_EXPERTS else ["down_proj"]  # there PEFT adapts a parameter
    return {
        "use_rslora": stabilized,
        "target_modules": targets,
        "rank_pattern": {"^v_proj": 2, "down_proj": 3},
        "alpha_pattern": {"^q_proj": 100, "c_proj": 5, "v_proj": 7},
    }


EXPERT_SETTINGS = [
    {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 3},
        "alpha_pattern": {"experts.gate_up_proj": 7},
    },
    {"target_modules": [], "target_parameters": ["experts.gate_up_proj"], "use_rslora": True},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, dense_settings(name, stabilized)) for name, stabilized in ALTERNATING),
        *itertools.product([*EXPERT_TENSORS, "gpt_oss"], EXPERT_SETTINGS),
    ],
)
def test_lmlib_computes_the_same_from_adapters_of_peft(name, settings, tmp_path):
    model = peft.adapted(name, r=4, lora_alpha=6, **settings)
    model.save_pretrained(tmp_path)
    assert_computes(read(name, tmp_path), name, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_TENSORS)
def test_both_read_a_module_for_each_expert(name, tmp_path):
    write_expert_modules(tmp_path / "old", name)
    model = peft.read(name, tmp_path / "old")
    expected = theirs(model, ids_of(name))
    assert_same_logits(read(name, tmp_path / "old"), ids_of(name), expected)
    model.save_pretrained(tmp_path / "new")  # its patterns are longer
    assert_same_logits(read(name, tmp_path / "new"), ids_of(name), expected)


# Per family: adapted matrices, other trained weights, and PEFT's names for these weights.
OTHERS_TRAINED = json.loads(Path(__file__).with_name("trained_besides.json").read_text())


def changed(model, paths):
    """Returns `model` with other values for the weights at `paths`."""

    def change(weight, array):
        if not any(fnmatch.fnmatch(weight.path, path) for path in paths):
            return array
        random = np.random.default_rng(len(weight.path))
        return jnp.asarray(array + 0.2 * random.standard_normal(array.shape, np.float32))

    return map_weights(change, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS_TRAINED)
def test_peft_computes_the_same_if_other_weights_were_trained_too(name, tmp_path):
    adapts, others, _ = OTHERS_TRAINED[name]
    model = adapted(name, rank=3, alpha=5.0, paths=tuple(adapts))
    with_others = changed(model, others)
    expected = theirs(write(with_others, name, tmp_path / "out", others), ids_of(name))
    assert_same_logits(with_others, ids_of(name), expected)
    with pytest.raises(AssertionError):  # they matter
        assert_same_logits(model, ids_of(name), expected)
    assert_same_logits(read(name, tmp_path / "out"), ids_of(name), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS_TRAINED)
def test_lmlib_reads_other_weights_that_peft_trained(name, tmp_path):
    target = {"phi3": "o_proj", "gpt2": "c_attn", "gpt_neox": "query_key_value"}.get(name, "q_proj")
    model = peft.adapted(
        name, r=3, lora_alpha=5, modules_to_save=OTHERS_TRAINED[name][2], target_modules=[target],
        bias="lora_only", ensure_weight_tying=name == "llama_tied_one_head",
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    assert_same_logits(read(name, tmp_path), ids_of(name), theirs(model, ids_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("table", ["lm_head", "embed_tokens"])
def test_adapters_of_a_tied_table_need_a_base_with_both_tables(table, tmp_path):
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


@pytest.mark.landing
def test_patterns_match_the_same_modules_as_in_peft():
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_still_computes_the_golden_folders(name, tmp_path):
    peft.write(tmp_path, *ADAPTERS[name][:2])
    for file in ("adapter_model", "expected"):
        found, expected = (
            tensors(folder / f"{file}.safetensors") for folder in (tmp_path, GOLDEN_ADAPTERS / name)
        )
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, atol=1e-5 * np.abs(values).max())
