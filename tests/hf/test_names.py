"""Declarations of any family, for models of any size, are the same thing read both ways."""

import functools
import inspect
import json
from collections import Counter, defaultdict

import jax
import pytest
from hugging_face_families import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlib.hf.families import FAMILIES, described, described_by, family_of
from lmlib.hf.names import placed
from lmlib.models.differences import differences
from lmlib.parallel.axes import map_weights


@st.composite
def models(draw):
    """A family, and a function that makes a model of it."""
    family = draw(st.sampled_from(FAMILIES))
    known = inspect.signature(family.build).parameters
    kv_heads = draw(st.integers(1, 3)) if "kv_heads" in known else 1
    heads, head_dim = kv_heads * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3))
    free, least = "head_dim" in known, 2 if family.model_type == "olmo_hybrid" else 1
    layers = draw(st.integers(least, 5))
    sizes = {
        "vocab": draw(st.integers(1, 9)),
        "embed": draw(st.integers(1, 9)) if free else heads * head_dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp": draw(st.integers(1, 9)),
        "expert_mlp": draw(st.integers(1, 9)),
        "experts": 4,
        "top": draw(st.integers(1, 4)),
        "groups": 1,
        "top_groups": 1,
        "dense_layers": (0,) if family.model_type == "qwen3_next" else draw(st.integers(0, layers)),
        "rotary_dim": 2,
        "value_dim": draw(st.integers(1, 4)),
        "latent": draw(st.integers(1, 9)),
        "query_latent": draw(st.one_of(st.none(), st.integers(1, 9))),
        "tied": draw(st.booleans()),
        "multi_token_depths": draw(st.integers(0, 1)),
        # A Llama with a window is a Mistral.
        "window": None if family.model_type == "llama" else draw(st.integers(1, 9)),
        "period": draw(st.integers(1, 4)),
        "positions": draw(st.integers(1, 9)),
        # Families of hybrids read sizes from a layer of each kind.
        "attention_layers": (draw(st.integers(0, layers - 1)),),
        **dict.fromkeys(("linear_heads", "mamba_heads"), 4),
        **dict.fromkeys(("linear_kv_heads", "mamba_groups"), draw(st.sampled_from([1, 2, 4]))),
        **dict.fromkeys(("linear_key_dim", "mamba_state", "key_dim"), draw(st.integers(1, 4))),
        "linear_value_dim": draw(st.integers(1, 4)),
        **dict.fromkeys(("linear_head_dim", "shared_dim", "width"), draw(st.integers(1, 4))),
        "shared_mlp": draw(st.integers(1, 9)),
        "rotary_fraction": draw(st.sampled_from([1.0, 2 / head_dim]))
        if family.model_type in ("phi3", "gpt_neox")
        else 1.0,
    }
    sizes["mamba_head_dim"] = sizes["embed"]  # a config.json has the multiple of it
    return family, functools.partial(
        family.build, **{k: v for k, v in sizes.items() if k in known}, key=jax.random.key(0)
    )


@given(models())
@settings(max_examples=60)
def test_declarations_hold_each_weight_once_and_describe_the_model(made):
    family, build = made
    model = jax.eval_shape(build)
    content = {"model_type": family.model_type, **family.settings(model)}
    again = described_by(content, "config.json")
    assert not list(differences(jax.eval_shape(again.build, jax.random.key(0)), model))

    tensors = placed(model, family.names)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    held = defaultdict(Counter)  # experts with a tensor each, by weight and repetition
    for tensor in tensors:
        end = 0
        for piece in tensor.pieces:  # they follow each other without a gap, and are as wide
            share, along = piece.share, piece.share.along
            assert share.start == end
            end += share.length
            assert (*share.shape[:along], tensor.shape[along], *share.shape[along + 1 :]) == (
                tensor.shape
            )
            held[piece.path, piece.repetition][tuple(piece.fixed)] += 1
        assert end * share.groups == tensor.shape[along]

    def check(weight, array):
        stacked = weight.stacked > 0
        for repetition in range(array.shape[0]) if stacked else [None]:
            of_experts = held.pop((weight.path, repetition))
            assert set(of_experts.values()) == {1}
            sizes = dict(zip(weight.axes, array.shape, strict=True))
            assert len(of_experts) == (1 if () in of_experts else sizes["experts"])

    map_weights(check, model)
    assert not held


@pytest.mark.parametrize("layers", [1, 3])
def test_a_deepseek_with_only_dense_layers_is_described(layers):
    """Nothing in it says how its experts would be."""
    content = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    content |= {"num_hidden_layers": layers, "first_k_dense_replace": layers}
    model = described_by(content, "config.json").shapes
    family, told = family_of(model)
    assert (family.model_type, told["first_k_dense_replace"]) == ("deepseek_v3", layers)
    again = described_by(json.loads(json.dumps(told)), "config.json").shapes
    assert not list(differences(again, model))


def test_dense_layers_that_transformers_writes_as_experts_have_the_usual_names():
    names, module = described(GOLDEN / "kimi_linear").family.names, "block_sparse_moe"
    assert names.usual(f"a.{module}.gate_proj.weight") == "a.mlp.gate_proj.weight"
    of_shared = f"a.{module}.shared_experts.gate_proj.weight"
    assert names.usual(of_shared) == of_shared


def test_norms_named_as_in_olmo_core_have_the_usual_names():
    names = described(GOLDEN / "olmo_hybrid").family.names
    assert names.usual("a.attention_layer_norm.weight") == "a.input_layernorm.weight"
    assert names.usual("a.feedforward_layer_norm.weight") == "a.post_attention_layernorm.weight"
    assert names.usual("a.self_attn.q_norm.weight") == "a.self_attn.q_norm.weight"
