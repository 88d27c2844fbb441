"""The golden folders are what transformers computes, and of folders that are written here it
computes what lmlib does. Needs lmlib[parity]; tests/hf/test_golden.py does not."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import FLOAT32, golden_model
from hugging_face_families import FAMILIES, GOLDEN, KINDS, assert_close, tensors, tokens
from odd_configs import READ

from lmlib import Inspector, hf, whole_rows
from lmlib.hf.families import described_by
from lmlib.hf.folder import FolderError
from lmlib.models.differences import differences

golden = pytest.importorskip("golden_by_transformers", reason="needs lmlib[parity]")
pytestmark = pytest.mark.slow

# Weights are the very same; all else is as exact as sums whose order differs between processors.
BOUNDS = {"model": 0.0, "gradients": 1e-4, "after": 1e-5}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_golden_folder_is_what_transformers_computes(name, tmp_path):
    golden.write(tmp_path, *FAMILIES[name])
    for file, bound in BOUNDS.items():
        found, expected = (
            tensors(folder / f"{file}.safetensors") for folder in (tmp_path, GOLDEN / name)
        )
        assert_close(found, expected, bound)
    found, expected = (
        tensors(folder / "expected.safetensors") for folder in (tmp_path, GOLDEN / name)
    )
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for key, bound in {"logits": 1e-5, "logits_bfloat16": 2**-5}.items():
        one, other = (each[key].astype(np.float32) for each in (found, expected))
        assert np.abs(one - other).max() <= bound * np.abs(other).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_of_what_is_written_here(name, tmp_path):
    model = golden_model(name)
    folder, kind = tmp_path / "out", FAMILIES[name][0]
    hf.save(model, folder, model_type=kind, dtype="float32", file_bytes=20_000)
    theirs = golden.loaded(folder, "float32")
    assert theirs.config.model_type == kind
    found = golden.logits_of_prompt(theirs, model.vocab).numpy()
    expected = tensors(GOLDEN / name / "expected.safetensors")["logits"]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", KINDS)
def test_its_layers_show_what_those_of_transformers_do(name):
    model = golden_model(name)
    ids = tokens(model.vocab)[0][0, :70].tolist()
    inspector, theirs = Inspector(model), golden.layers_of(GOLDEN / name, ids)
    activations = inspector.activations(ids)
    scale = np.abs(activations).max()
    np.testing.assert_allclose(activations[:-1], theirs["activations"][:-1], atol=1e-5 * scale)
    normed = model.features(jnp.asarray(activations[-1:]), whole_rows(jnp.array([ids]), FLOAT32))
    expected = theirs["activations"][-1] * model.logits_scale
    np.testing.assert_allclose(normed[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(inspector.attention(ids), theirs["attention"], atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_is_left_out_means_what_transformers_means(name):
    whole = json.loads((GOLDEN / name / "config.json").read_text())
    for key in sorted(whole.keys() - {"model_type"}):
        rest = {k: v for k, v in whole.items() if k != key}
        try:
            found = described_by(rest, "config.json")
        except FolderError as error:
            assert str(error).endswith(f" has no {key}")
        else:
            meant = golden.transformers.AutoConfig.for_model(**rest).to_dict().get(key)
            told = described_by(rest | {key: meant}, "config.json")
            assert found == told or not list(differences(found.shapes, told.shapes)), key


def logits_of_changed(name, keys, folder):
    """Of the golden model with other keys in its config.json."""
    folder.mkdir()
    shutil.copy(GOLDEN / name / "model.safetensors", folder)
    content = json.loads((GOLDEN / name / "config.json").read_text()) | keys
    told = {key: each for key, each in content.items() if each is not ...}
    (folder / "config.json").write_text(json.dumps(told))
    return golden.logits_of_prompt(golden.loaded(folder, "float32"), told["vocab_size"]).numpy()


@pytest.mark.parametrize("case", READ)
def test_transformers_reads_odd_keys_so(case, tmp_path):
    name, odd, plain = READ[case]
    found, expected = (
        logits_of_changed(name, keys, tmp_path / kind)
        for kind, keys in {"odd": odd, "plain": plain}.items()
    )
    np.testing.assert_array_equal(found, expected)
