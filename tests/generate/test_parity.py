"""Greedy continuations equal those of transformers. Needs lmlib[parity]."""

import numpy as np
import pytest
from golden_models import FLOAT32, golden_model
from hugging_face_families import FAMILIES, GOLDEN

from lmlib.generate import GREEDY, generate

torch = pytest.importorskip("torch", reason="needs lmlib[parity]")
golden = pytest.importorskip("golden_by_transformers", reason="needs lmlib[parity]")
pytestmark = pytest.mark.slow

NEW = 200


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_equal_transformers(name):
    theirs = golden.loaded(GOLDEN / name, "float32")
    prompts = np.random.default_rng(3).integers(3, theirs.config.vocab_size, (3, 40))
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor(prompts), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    model = golden_model(name)
    made = generate(model, prompts.tolist(), NEW, GREEDY, compute=FLOAT32)
    for (found,), ids in zip(made, expected[:, 40:].tolist(), strict=True):
        assert found.tokens == ids
