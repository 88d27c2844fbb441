"""Heads of multi-token prediction in Hugging Face folders, both ways."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from golden_models import FLOAT32
from hugging_face_families import GOLDEN, tensors
from safetensors.numpy import save_file

from lmlib import hf
from lmlib.hf.families import described, described_by, family_of
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import single_document_context
from lmlib.models.multi_token import MultiTokenDecoder, multi_token

HEADS = {"deepseek_v3": 2, "deepseek_v3_direct_queries": 1}  # by name of a golden folder


@functools.cache
def model(name):
    content = json.loads((GOLDEN / name / "config.json").read_text())
    content["num_nextn_predict_layers"] = HEADS[name]
    return laid_out.drawn(described_by(content, "config.json").shapes, seed=3)


@pytest.fixture(scope="module", params=HEADS)
def folder(request, tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved") / request.param
    hf.save(model(request.param), saved, file_bytes=20_000)
    return saved


def changed(folder, to, change):
    """A copy of a folder with one file, after `change` of its tensors."""
    values = {}
    for file in folder.glob("*.safetensors"):
        values |= tensors(file)
    change(values)
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    save_file(values, to / "model.safetensors")
    return to


def test_a_folder_with_heads_is_the_same_both_ways(folder, tmp_path):
    content = json.loads((folder / "config.json").read_text())
    heads, layers = HEADS[folder.name], content["num_hidden_layers"]
    assert content["num_nextn_predict_layers"] == heads
    found = hf.load(folder)
    jax.tree.map(np.testing.assert_array_equal, found, model(folder.name))
    values = {}
    for file in folder.glob("*.safetensors"):
        values |= tensors(file)
    for layer in range(layers, layers + heads):
        head = f"model.layers.{layer}."
        E = content["hidden_size"]
        assert values[f"{head}eh_proj.weight"].shape == (E, 2 * E)
        table = values["model.embed_tokens.weight"]
        of = values.get("lm_head.weight", table)  # tied
        np.testing.assert_array_equal(values[f"{head}embed_tokens.weight"], table)
        np.testing.assert_array_equal(values[f"{head}shared_head.head.weight"], of)
        assert f"{head}self_attn.kv_b_proj.weight" in values


def test_the_tensors_decide_whether_there_are_heads(folder, tmp_path):
    def without(values):
        for name in [name for name in values if ".layers.3." in name or ".layers.4." in name]:
            del values[name]

    plain = hf.load(changed(folder, tmp_path / "plain", without))  # config.json says otherwise
    assert type(plain) is Decoder
    own = model(folder.name)
    for field in dataclasses.fields(Decoder):
        one, other = getattr(plain, field.name), getattr(own, field.name)
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_copies_may_be_absent_and_must_not_differ(folder, tmp_path):
    copies = ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]

    def absent(values):
        for name in copies:
            del values[name]

    found = hf.load(changed(folder, tmp_path / "absent", absent))
    jax.tree.map(np.testing.assert_array_equal, found, model(folder.name))
    for number, name in enumerate(copies):

        def other(values, name=name):
            values[name] = values[name] + 1

        with pytest.raises(FolderError, match=f"{name} differs from .*multi-token heads share it"):
            hf.load(changed(folder, tmp_path / str(number), other))


def test_an_incomplete_head_is_refused(folder, tmp_path):
    def lacking(values):
        del values["model.layers.3.enorm.weight"]

    with pytest.raises(FolderError, match="model.layers.3.enorm.weight is missing"):
        hf.load(changed(folder, tmp_path / "lacking", lacking))


def test_families_without_such_tensors_refuse_heads():
    of = functools.partial(llama, vocab=32, embed=16, layers=1, heads=2, mlp=8)
    made = jax.eval_shape(lambda: multi_token(of, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="heads of multi-token prediction"):
        family_of(made, "llama")


@pytest.mark.slow
def test_each_depth_gives_the_logits_and_gradients_of_transformers(folder):
    torch = pytest.importorskip("torch", reason="needs lmlib[parity]")
    golden = pytest.importorskip("golden_by_transformers", reason="needs lmlib[parity]")
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    main = golden.loaded(folder, "float32")
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\."]  # as 61 of DeepSeek-V3
    theirs = modeling_layers.MtpModel.from_pretrained(main).eval()
    made, heads, S = model(folder.name), HEADS[folder.name], 100
    ids = np.random.default_rng(0).integers(0, made.vocab, (1, S + heads)).astype(np.int32)
    targets = np.random.default_rng(1).integers(0, made.vocab, (heads, S))

    inputs = torch.tensor(ids.astype(np.int64))
    hidden, loss = main.model(inputs[:, :S]).last_hidden_state, 0.0
    expected, positions = [], torch.arange(S)[None]
    for depth in range(1, heads + 1):
        hidden = theirs.forward_layer(
            depth - 1, hidden, positions, None, input_ids=inputs[:, depth : depth + S]
        )
        expected.append(theirs.shared_head(hidden))
        loss += torch.nn.functional.cross_entropy(
            expected[-1][0], torch.tensor(targets[depth - 1]), reduction="sum"
        )
    loss.backward()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def found(made):
        context = single_document_context(jnp.asarray(ids[:, :S]), FLOAT32)
        h_BSE = made.features(made.trunk(jnp.asarray(ids[:, :S]), context).x_BSE, context)
        logits, total = [], 0.0
        for depth in range(1, heads + 1):
            ahead = jnp.asarray(ids[:, depth : depth + S])
            h_BSE = made.ahead(depth, h_BSE, ahead, context).x_BSE
            logits.append(made.logits(h_BSE, FLOAT32))
            log_p = jax.nn.log_softmax(logits[-1][0])
            total -= jnp.take_along_axis(log_p, targets[depth - 1][:, None], axis=1).sum()
        return total, logits

    with jax.default_matmul_precision("highest"):
        (total, logits), gradients = found(made)
    assert float(total) == pytest.approx(loss.item(), rel=1e-6)
    for one, other in zip(logits, expected, strict=True):
        other = other.detach().numpy()
        assert np.abs(one - other).max() <= 2e-5 * np.abs(other).max()
    assert isinstance(gradients, MultiTokenDecoder)
    for depth, layer in enumerate(theirs.layers):
        head = gradients.predictors[depth]
        pairs = {
            "matrix": (head.combination.matrix.T, layer.eh_proj),
            "embedding": (head.combination.embedding_norm.scale, layer.enorm),
            "features": (head.combination.features_norm.scale, layer.hnorm),
            "norm": (head.norm.scale, layer.post_norm),
        }
        for one, other in pairs.values():
            other = other.weight.grad.numpy()
            assert np.abs(one - other).max() <= 2e-5 * np.abs(other).max()
    for one, other in (
        (gradients.embedding, main.model.embed_tokens),
        (gradients.norm.scale, main.model.norm),
    ):
        other = other.weight.grad.numpy()
        assert np.abs(one - other).max() <= 2e-5 * np.abs(other).max()
