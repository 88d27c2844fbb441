"""A family from outside: experts in a tensor each, queries, keys and values merged by head.

Shapes: B batch, S sequence, E embed, F mlp, X experts.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_families import tensors
from jaxtyping import Array, Float

from lmlib import hf, make_mesh
from lmlib.adapters.lora import merged, with_adapters
from lmlib.hf.names import placed
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.llama import llama
from lmlib.models.matrices.lora import map_adapted
from lmlib.models.part import NO_AUX, Part
from lmlib.models.weights import fan_in, initial_values, weight

X = 3
RULES = {"experts": "data"}


class Experts(Part):
    """The mean of plain mlps."""

    up: Float[Array, "experts embed mlp"] = weight(fan_in("embed"), rules=RULES)
    down: Float[Array, "mlp experts embed"] = weight(fan_in("mlp"), rules=RULES)

    def __init__(self, embed, mlp, residual_scale, *, key):
        for field in ("up", "down"):
            setattr(self, field, initial_values(self, field, key, experts=X, embed=embed, mlp=mlp))

    def __call__(self, x_BSE, context):
        h_BSXF = jax.nn.relu(jnp.einsum("bse,xef->bsxf", x_BSE, self.up))
        return jnp.einsum("bsxf,fxe->bse", h_BSXF, self.down) / X, NO_AUX


MERGED = Tensor(
    "attention.query_key_value.weight",
    {
        "attention.query": ("heads head_dim", "embed"),
        "attention.key": ("kv_heads head_dim", "embed"),
        "attention.value": ("kv_heads head_dim", "embed"),
    },
    each="kv_heads",
)
OUTPUT = Tensor("attention.dense.weight", {"attention.output": ("embed", "heads head_dim")})
LAYER = (
    *shared.NORMS_BEFORE,
    MERGED,
    OUTPUT,
    Tensor("experts.{experts}.w1.weight", {"mlp.up": ("mlp", "embed")}),
    Tensor("experts.{experts}.w2.weight", {"mlp.down": ("embed", "mlp")}),
)


def family(layer=LAYER):
    size = Key("intermediate_size", "mlp", lambda model: parts.layers(model)[0].mlp.up.shape[-1])
    keys = [size if key.argument == "mlp" else key for key in shared.llama_keys()]
    return Family(
        "experts", "None", functools.partial(llama, feed_forward=Experts),
        Names(shared.OUTSIDE, layer), keys, fixed={"hidden_act": "relu"},
    )  # fmt: skip


@functools.cache
def model():
    make = functools.partial(family().build, 16, 8, 2, 4, 6, 2)
    return jax.jit(lambda key: make(norm_epsilon=1e-6, key=key))(jax.random.key(0))


def save(model, folder, **settings):
    hf.save(model, folder, families=[family()], **settings)
    return tensors(folder / "model.safetensors")


@pytest.mark.slow
def test_saved_tensors_match_their_declarations(tmp_path):
    found = save(model(), tmp_path / "out")
    (block,) = model().stack.patterns[0]
    for layer in range(2):
        mine = jax.tree.map(lambda array: np.asarray(array[layer]), block)  # noqa: B023
        prefix = f"model.layers.{layer}."
        for expert in range(X):
            up, down = mine.mlp.up[expert], mine.mlp.down[:, expert]
            name = f"{prefix}experts.{expert}"
            np.testing.assert_array_equal(found[f"{name}.w1.weight"], up.T)
            np.testing.assert_array_equal(found[f"{name}.w2.weight"], down.T)
        attention = mine.attention
        rows = []
        for head in range(2):
            rows += [attention.query[:, 2 * head].T, attention.query[:, 2 * head + 1].T]
            rows += [attention.key[:, head].T, attention.value[:, head].T]
        name = prefix + MERGED.name
        np.testing.assert_array_equal(found[name], np.concatenate(rows))
    assert len(found) == 3 + 2 * (4 + 2 * X)


@pytest.mark.slow
@pytest.mark.several_devices
def test_on_a_mesh_as_on_one_device(tmp_path):
    written = save(model(), tmp_path / "out")
    loaded = hf.load(tmp_path / "out", families=[family()])
    jax.tree.map(np.testing.assert_array_equal, loaded, model())
    mesh = make_mesh(data=3, tensor=2, devices=jax.devices()[:6])
    there = hf.load(tmp_path / "out", mesh, families=[family()])
    assert there.stack.patterns[0][0].mlp.up.sharding.spec[1] == "data"
    jax.tree.map(np.testing.assert_array_equal, there, model())
    again = save(there, tmp_path / "again")
    for name, values in written.items():
        np.testing.assert_array_equal(again[name], values)


def test_an_expert_that_a_dtype_cannot_hold_is_named(tmp_path):
    up = model().stack.patterns[0][0].mlp.up.at[1, 2, 0, 0].set(1e6)
    changed = eqx.tree_at(lambda model: model.stack.patterns[0][0].mlp.up, model(), up)
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.experts\.2\.w1\.weight holds 1e\+06"):
        save(changed, tmp_path / "out", dtype="float16")


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (
            Tensor("w1", {"mlp.up": ("mlp", "embed")}),
            r"w1 names the axes mlp, embed for stack\.patterns\.0\.0\.mlp\.up, whose axes are exp",
        ),
        (dataclasses.replace(MERGED, each="group"), "no weight in it has the axis group"),
        (
            Tensor("w1", {"mlp.up": ("mlp experts", "embed")}, along=1, each="experts"),
            r"stack\.patterns\.0\.0\.mlp\.up has 8 entries, which is not a multiple of experts = 3",
        ),
    ],
    ids=("axes", "each", "multiple"),
)
def test_declarations_that_do_not_fit_are_refused(odd, told):
    with pytest.raises(ValueError, match=told):
        placed(jax.eval_shape(model), Names(shared.OUTSIDE, (odd,)))


def with_values(adapters):
    def filled(path, one):
        return dataclasses.replace(one, up=jax.random.normal(jax.random.key(1), one.up.shape))

    return map_adapted(filled, adapters)


@pytest.mark.slow
def test_adapters_of_merged_weights_are_those_of_peft(tmp_path):
    """lora_B · lora_A is added to the merged matrix."""
    adapted = with_values(
        with_adapters(model(), 2, 2.0, ("*.query", "*.value"), key=jax.random.key(2))
    )
    mine = {"families": [family()]}
    hf.save_adapters(adapted, tmp_path / "peft", trained=(), **mine)
    found = tensors(tmp_path / "peft" / "adapter_model.safetensors")
    before, after = save(model(), tmp_path / "before"), save(merged(adapted), tmp_path / "after")
    for layer in range(2):
        name = f"model.layers.{layer}.attention.query_key_value"
        a, b = (found[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
        added = after[f"{name}.weight"] - before[f"{name}.weight"]
        np.testing.assert_allclose(b @ a, added, atol=1e-5)
    again = hf.load_adapters(tmp_path / "peft", model(), **mine)
    np.testing.assert_allclose(
        save(merged(again), tmp_path / "again")[f"{name}.weight"],
        after[f"{name}.weight"],
        atol=1e-5,
    )


def test_adapters_that_peft_cannot_name_are_refused(tmp_path):
    """Those of a matrix whose inputs are not one axis of its tensor."""
    odd = Tensor(OUTPUT.name, {"attention.output": ("embed heads", "head_dim")})
    mine = family(tuple(odd if each is OUTPUT else each for each in LAYER))
    adapted = with_adapters(model(), 2, 2.0, ("*attention.output",), key=jax.random.key(2))
    with pytest.raises(
        ValueError, match=r"no place for the adapters of stack\.patterns\.0\.0\.attention"
    ):
        hf.save_adapters(adapted, tmp_path / "peft", trained=(), families=[mine])


@pytest.mark.landing
def test_a_tied_family_without_a_head_in_its_names_is_refused(tmp_path):
    tied = dataclasses.replace(
        family(),
        names=Names([each for each in shared.OUTSIDE if "unembedding" not in each.holds], LAYER),
    )
    make = functools.partial(family().build, 16, 8, 2, 4, 6, 2, tied=True)
    save(jax.jit(lambda key: make(key=key))(jax.random.key(0)), tmp_path / "out")
    with pytest.raises(ValueError, match=r"no tensor for 'unembedding'.*also where the head"):
        hf.load(tmp_path / "out", families=[tied])
