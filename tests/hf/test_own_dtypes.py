"""Weights with a dtype of their own keep it: in files, frozen in a run, and when a text goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import golden_model
from hugging_face_families import GOLDEN

from lmlib.generate.weights import ready
from lmlib.hf.families import described
from lmlib.hf.names import placed
from lmlib.optim.trainable import Group
from lmlib.parallel.axes import map_weights
from lmlib.recipe import Recipe

CORRECTION = "mlp.gate.e_score_correction_bias"
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
# Ends of names in `_keep_in_fp32_modules` and its `_strict`, by folder and dtype.
KEPT = {
    ("deepseek_v3", "bfloat16"): (CORRECTION,),
    ("deepseek_v3", "float16"): (CORRECTION,),
    ("gpt_oss", "bfloat16"): (),
    ("gpt_oss", "float16"): NORMS,
    ("mixtral", "float16"): (),
}


@pytest.mark.parametrize(("name", "dtype"), KEPT)
def test_a_family_declares_tensors_that_stay_in_float32(name, dtype):
    found = described(GOLDEN / name)
    for each in placed(found.shapes, found.family.names):
        kept = each.name.endswith(KEPT[name, dtype]) and KEPT[name, dtype] != ()
        assert each.dtype_in(dtype) == ("float32" if kept else dtype), each.name
        assert each.dtype_in("float32") == "float32"


def dtypes(model):
    found = {}
    map_weights(lambda weight, array: found.update({weight.path: array.dtype.name}), model)
    return found


@pytest.mark.parametrize("frozen", ["bfloat16", "int8"])
def test_frozen_weights_with_a_dtype_of_their_own_are_not_rounded(frozen):
    recipe = Recipe(
        described(GOLDEN / "deepseek_v3").build, 0, {"norm": Group(("norm.scale",))}, frozen
    )
    kept = dtypes(recipe.abstract_model)
    own = {path for path in kept if path.endswith((".router.correction", ".router.logits"))}
    assert len(own) == 2 and {kept[path] for path in own} == {"float32"}
    assert kept["embedding"] == "bfloat16"


def test_generation_keeps_the_router_corrections_in_float32():
    """Routers in bfloat16 would choose other experts than in training."""
    model = golden_model("deepseek_v3")
    weights = ready(model, "bfloat16", None, whole=True, int8=False)
    (mixtures,) = (pattern for pattern in model.stack.patterns if hasattr(pattern[0].mlp, "router"))
    expected = np.asarray(mixtures[0].mlp.router.correction)
    found = [
        layer.mlp.router.correction
        for layer in jax.tree.leaves(weights.model.stack, is_leaf=lambda x: hasattr(x, "mlp"))
        if hasattr(layer.mlp, "router")
    ]
    np.testing.assert_array_equal(np.concatenate([np.ravel(x) for x in found]), expected.ravel())
    assert not np.array_equal(expected, expected.astype(jnp.bfloat16))
