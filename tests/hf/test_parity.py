"""transformers computes the golden folders, the same as lmlib from exported folders, and the same
continuations. Needs lmlib[parity]; tests/hf/test_golden.py does not."""

import json
import shutil

import changed_keys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import FLOAT32, golden_model, logits
from hugging_face_families import (
    EDGES,
    FAMILIES,
    GOLDEN,
    HYBRIDS,
    KEPT,
    KINDS,
    assert_close,
    tensors,
    tokens,
)
from odd_configs import READ

from lmlib import Inspector, hf, single_document_context
from lmlib.generate import GREEDY, generate
from lmlib.hf.families import described
from lmlib.hf.tensor_files import stored_tensors
from lmlib.models.experts.upcycling import upcycle
from lmlib.models.families.hugging_face.settings import FolderError

torch = pytest.importorskip("torch", reason="needs lmlib[parity]")
golden = pytest.importorskip("golden_by_transformers", reason="needs lmlib[parity]")
pytestmark = pytest.mark.slow

# PyTorch's logarithms in the initial values of decays, and the order of sums, differ between CPUs.
BOUNDS = {"model": 1e-6, "gradients": 1e-4, "after": 1e-5}


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_still_computes_the_golden_folders(name, tmp_path):
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
def test_transformers_computes_the_same_from_exported_folders(name, tmp_path):
    model = golden_model(name)
    folder, kind = tmp_path / "out", FAMILIES[name][0]
    hf.save(model, folder, model_type=kind, dtype="float32", file_bytes=20_000)
    theirs = golden.loaded(folder, "float32")
    assert theirs.config.model_type == kind
    found = golden.logits_of_prompt(theirs, model.vocab).numpy()
    expected = tensors(GOLDEN / name / "expected.safetensors")["logits"]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("case", EDGES)
def test_models_without_a_part_are_the_same_both_ways(case, tmp_path):
    name, keys = EDGES[case]
    kind, usual = FAMILIES[name]
    theirs = golden.random_model(kind, usual | keys)
    golden.save(theirs, tmp_path / "theirs")
    model = hf.load(tmp_path / "theirs")
    expected = golden.logits_of_prompt(theirs, model.vocab).numpy()
    ids = tokens(model.vocab)[0].astype(np.int32)
    with jax.default_matmul_precision("highest"):
        found = np.asarray(logits(model, ids, FLOAT32))[0, KEPT]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    hf.save(model, tmp_path / "ours", model_type=kind)
    again = golden.logits_of_prompt(golden.loaded(tmp_path / "ours", "float32"), model.vocab)
    np.testing.assert_array_equal(again.numpy(), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "mixtral", "llama"])
def test_files_have_the_dtypes_that_transformers_writes(name, dtype, tmp_path):
    golden.loaded(GOLDEN / name, dtype).save_pretrained(tmp_path / "theirs")
    hf.save(golden_model(name), tmp_path / "ours", dtype=dtype)
    theirs, ours = (stored_tensors(tmp_path / each) for each in ("theirs", "ours"))
    assert {n: each.dtype for n, each in ours.items()} == {
        n: each.dtype for n, each in theirs.items()
    }


@pytest.mark.parametrize("name", KINDS)
def test_layers_give_the_activations_of_transformers(name):
    model = golden_model(name)
    ids = tokens(model.vocab)[0][0, :70].tolist()
    inspector, theirs = Inspector(model), golden.layers_of(GOLDEN / name, ids)
    activations = inspector.activations(ids)
    scale = np.abs(activations).max()
    np.testing.assert_allclose(activations[:-1], theirs["activations"][:-1], atol=1e-5 * scale)
    normed = model.features(
        jnp.asarray(activations[-1:]), single_document_context(jnp.array([ids]), FLOAT32)
    )
    expected = theirs["activations"][-1] * model.logits_scale
    np.testing.assert_allclose(normed[0], expected, rtol=1e-4, atol=1e-4)
    if name in HYBRIDS:
        with pytest.raises(ValueError, match="shows no attention weights"):
            inspector.attention(ids)
    else:
        np.testing.assert_allclose(inspector.attention(ids), theirs["attention"], atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_notes_on_changed_keys_match_transformers(name):
    """tests/hf/test_odd_configs.py compares lmlib with the notes."""
    assert golden.outcomes_of_changed_keys(name) == changed_keys.OUTCOMES[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_is_null_or_absent_gives_the_logits_of_transformers(name, tmp_path):
    shutil.copy(GOLDEN / name / "model.safetensors", tmp_path)
    ids = tokens(changed_keys.content_of(name)["vocab_size"])[0].astype(np.int32)
    known = {}  # by the model's arguments: most cases change none
    for case, _, content in changed_keys.cases_of(name):
        expected = golden.logits_of_content(tmp_path, content)
        try:
            arguments = repr(described(tmp_path).arguments)
            if expected is not None and arguments not in known:
                model = hf.load(tmp_path)
                with jax.default_matmul_precision("highest"):
                    known[arguments] = np.asarray(logits(model, ids, FLOAT32))[0, KEPT]
        except FolderError:
            continue
        if expected is not None:
            found = known[arguments]
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max(), case


def logits_of_changed(name, keys, folder):
    """Logits of the golden model with other keys in its config.json."""
    folder.mkdir()
    shutil.copy(GOLDEN / name / "model.safetensors", folder)
    content = json.loads((GOLDEN / name / "config.json").read_text()) | keys
    told = {key: each for key, each in content.items() if each is not ...}
    (folder / "config.json").write_text(json.dumps(told))
    return golden.logits_of_prompt(golden.loaded(folder, "float32"), told["vocab_size"]).numpy()


@pytest.mark.parametrize("case", READ)
def test_transformers_reads_odd_keys_the_same(case, tmp_path):
    name, odd, plain = READ[case]
    found, expected = (
        logits_of_changed(name, keys, tmp_path / kind)
        for kind, keys in {"odd": odd, "plain": plain}.items()
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "mixtral"),
        ("llama_3_1", "mixtral"),
        ("mistral", "mixtral"),
        ("qwen3", "qwen3_moe"),
    ],
)
def test_transformers_computes_the_same_from_upcycled_models(name, kind, tmp_path):
    model = upcycle(golden_model(name), experts=4, top=2, key=jax.random.key(3))
    hf.save(model, tmp_path / "out", dtype="float32")
    theirs = golden.loaded(tmp_path / "out", "float32")
    assert theirs.config.model_type == kind
    found = golden.logits_of_prompt(theirs, model.vocab).numpy()
    expected = tensors(GOLDEN / name / "expected.safetensors")["logits"]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_equal_transformers(name):
    theirs = golden.loaded(GOLDEN / name, "float32")
    prompts = np.random.default_rng(3).integers(3, theirs.config.vocab_size, (3, 40))
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor(prompts), max_new_tokens=200, min_new_tokens=200, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    made = generate(golden_model(name), prompts.tolist(), 200, GREEDY, compute=FLOAT32)
    for (found,), ids in zip(made, expected[:, 40:].tolist(), strict=True):
        assert found.tokens == ids
