"""Exported upcycled models compute the same in transformers. Needs lmlib[parity]."""

import jax
import numpy as np
import pytest
from hugging_face_families import GOLDEN, tensors

from lmlib import hf
from lmlib.models.experts.upcycling import upcycle

golden = pytest.importorskip("golden_by_transformers", reason="needs lmlib[parity]")
pytestmark = pytest.mark.slow

BECOMES = {
    "llama": "mixtral",
    "llama_3_1": "mixtral",
    "mistral": "mixtral",
    "qwen3": "qwen3_moe",
}


@pytest.mark.parametrize("name", BECOMES)
def test_transformers_computes_the_same_from_upcycled_models(name, tmp_path):
    model = upcycle(hf.load(GOLDEN / name), experts=4, top=2, key=jax.random.key(3))
    hf.save(model, tmp_path / "out", dtype="float32")
    theirs = golden.loaded(tmp_path / "out", "float32")
    assert theirs.config.model_type == BECOMES[name]
    found = golden.logits_of_prompt(theirs, model.vocab).numpy()
    expected = tensors(GOLDEN / name / "expected.safetensors")["logits"]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
