"""The golden models, put together by NumPy, and their logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hugging_face_families import GOLDEN, tensors

from lmlib import Compute, single_document_context
from lmlib.hf.families import described
from lmlib.hf.names import placed
from lmlib.parallel.axes import map_weights

FLOAT32 = Compute(dtype="float32")


@functools.cache
def golden_model(name):
    """Makes the model of a golden folder without a program for each shape, unlike `hf.load`."""
    found = described(GOLDEN / name)
    weights = {}
    map_weights(
        lambda w, shape: weights.update({w.path: np.zeros(shape.shape, shape.dtype)}), found.shapes
    )
    held = tensors(GOLDEN / name / "model.safetensors")
    for tensor in placed(found.shapes, found.family.names):
        for piece in tensor.pieces:
            weights[piece.path][piece.at] = piece.share.cut(held[tensor.name])
    return map_weights(lambda weight, _: jnp.asarray(weights[weight.path]), found.shapes)


@functools.partial(jax.jit, static_argnums=2)
def logits(model, ids, compute=FLOAT32):
    return model(ids, single_document_context(ids, compute))
