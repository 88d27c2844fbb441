"""Heads of multi-token prediction in Hugging Face folders, both ways."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from adapted_models import adapted
from golden_models import FLOAT32, golden_model
from hugging_face_families import GOLDEN, assert_close, tensors
from small_folder import assert_same_weights

from lmlib import hf
from lmlib.adapters.lora import with_adapters
from lmlib.hf import tensor_files
from lmlib.hf.families import described, described_by
from lmlib.hf.load import load_weights
from lmlib.hf.peft.load import adapters_in
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import single_document_context
from lmlib.models.multi_token import MultiTokenDecoder, multi_token, without_heads
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import named_weights

HEADS = {  # by name of a golden folder: a prefix for each head
    "deepseek_v3": ("model.layers.3.", "model.layers.4."),
    "deepseek_v3_direct_queries": ("model.layers.3.",),
    "qwen3_next": ("mtp.",),
    "qwen3_next_some_dense": ("mtp.",),  # whose last layer is recurrent
}
MATRIX = {"model.layers.3.": "eh_proj", "model.layers.4.": "eh_proj", "mtp.": "fc"}


@functools.cache
def model(name):
    content = json.loads((GOLDEN / name / "config.json").read_text())
    content["num_nextn_predict_layers"] = len(HEADS[name])
    shapes = described_by(content, "config.json").shapes
    return MultiTokenDecoder(golden_model(name), laid_out.drawn(shapes, seed=3).predictors)


@pytest.fixture(scope="module", params=HEADS)
def folder(request, tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved") / request.param
    hf.save(model(request.param), saved, file_bytes=20_000)
    return saved


def changed(folder, to, change):
    """A copy of a folder with one file, after `change` of its tensors."""
    values = values_of(folder)
    change(values)
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    kinds = {name: (value.dtype, value.shape) for name, value in values.items()}
    placed = tensor_files.laid_out(to, kinds, 10**9)
    tensor_files.begin_files(placed)
    for name, tensor in placed.items():
        tensor_files.write(tensor, 0, values[name])
    return to


def values_of(folder):
    return {n: x for file in folder.glob("*.safetensors") for n, x in tensors(file).items()}


def test_a_folder_with_heads_is_the_same_both_ways(folder):
    content = json.loads((folder / "config.json").read_text())
    assert content["num_nextn_predict_layers"] == len(HEADS[folder.name])
    found, values = hf.load(folder), values_of(folder)
    jax.tree.map(np.testing.assert_array_equal, found, model(folder.name))
    E, table = content["hidden_size"], values["model.embed_tokens.weight"]
    for head in HEADS[folder.name]:
        assert values[f"{head}{MATRIX[head]}.weight"].shape == (E, 2 * E)
        if head != "mtp.":
            np.testing.assert_array_equal(values[f"{head}embed_tokens.weight"], table)
            of = values.get("lm_head.weight", table)  # tied
            np.testing.assert_array_equal(values[f"{head}shared_head.head.weight"], of)


def test_the_tensors_decide_whether_there_are_heads(folder, tmp_path):
    def without(values):
        for name in [name for name in values if name.startswith(HEADS[folder.name])]:
            del values[name]

    plain = hf.load(changed(folder, tmp_path / "plain", without))  # config.json says otherwise
    own = without_heads(model(folder.name))
    assert type(plain) is type(own) is Decoder
    jax.tree.map(np.testing.assert_array_equal, plain, own)
    mesh, names = make_mesh(devices=jax.devices()[:1]), described(folder).family.names
    read = load_weights(folder, own, names, mesh)  # heads that a model lacks are left out
    jax.tree.map(np.testing.assert_array_equal, read, own)


def test_copies_may_be_absent_and_must_not_differ(folder, tmp_path):
    copies = [
        name
        for name in values_of(folder)
        if name.endswith((".head.weight", "3.embed_tokens.weight"))
    ]

    def absent(values):
        for name in copies:
            del values[name]

    found = hf.load(changed(folder, tmp_path / "absent", absent))
    jax.tree.map(np.testing.assert_array_equal, found, model(folder.name))
    assert copies or folder.name.startswith("qwen")
    for number, name in enumerate(copies):

        def other(values, name=name):
            values[name] = values[name] + 1

        with pytest.raises(FolderError, match=f"{name} differs from .*multi-token heads share it"):
            hf.load(changed(folder, tmp_path / str(number), other))


def test_an_incomplete_head_is_refused(folder, tmp_path):
    prefix = HEADS[folder.name][0]
    (name,) = (
        n for n in values_of(folder) if n in (f"{prefix}enorm.weight", f"{prefix}norm.weight")
    )

    def lacking(values):
        del values[name]

    with pytest.raises(FolderError, match=f"{name} is missing"):
        hf.load(changed(folder, tmp_path / "lacking", lacking))


def test_adapters_of_peft_concern_the_decoder_alone(tmp_path):
    name = "deepseek_v3_direct_queries"
    whole = model(name)  # whose head has a q_proj too
    hf.save_adapters(adapted(name, paths=("*attention.query",)), tmp_path / "peft", trained=())
    plain, found = (hf.load_adapters(tmp_path / "peft", x) for x in (without_heads(whole), whole))
    assert_same_weights(without_heads(found), plain)
    assert_same_weights(found.predictors, whole.predictors)
    for each, to in ((plain, "plain"), (found, "found")):
        hf.save_adapters(each, tmp_path / to, trained=())
    for file in tmp_path.glob("plain/*"):
        assert (tmp_path / "found" / file.name).read_bytes() == file.read_bytes()
    names = described_by(json.loads((GOLDEN / name / "config.json").read_text()), "").family.names
    arguments = adapters_in(tmp_path / "peft", whole, names).arguments(whole)
    made = jax.eval_shape(lambda: with_adapters(whole, **arguments, key=jax.random.key(0)))
    assert named_weights(made).keys() == named_weights(found).keys()
    of_head = with_adapters(whole, paths=("predictors.*.value",), key=jax.random.key(0))
    for case, trained in ((of_head, ()), (found, ("predictors.*",))):
        with pytest.raises(ValueError, match="no place for heads of multi-token prediction"):
            hf.save_adapters(case, tmp_path / "refused", trained=trained)


def test_heads_are_left_out_of_folders_of_other_families(tmp_path):
    of = functools.partial(llama, vocab=32, embed=16, layers=1, heads=2, mlp=8)
    hf.save(multi_token(of, key=jax.random.key(0)), tmp_path / "plain")
    found = hf.load(tmp_path / "plain")
    jax.tree.map(np.testing.assert_array_equal, found, of(key=jax.random.key(0)))


@pytest.mark.slow
def test_each_depth_gives_the_logits_and_gradients_of_transformers(folder, tmp_path):
    torch = pytest.importorskip("torch", reason="needs lmlib[parity]")
    reference = pytest.importorskip("heads_by_transformers", reason="needs lmlib[parity]")
    reference = reference.Heads(folder, HEADS[folder.name], tmp_path / "torch")
    made, S, heads = model(folder.name), 100, len(HEADS[folder.name])
    ids = np.random.default_rng(0).integers(0, made.vocab, (1, S + heads)).astype(np.int32)
    targets = np.random.default_rng(1).integers(0, made.vocab, (heads, S))
    expected = [*reference.logits(torch.tensor(ids.astype(np.int64)), S)]
    pairs = zip(expected, torch.tensor(targets), strict=True)
    loss = sum(torch.nn.functional.cross_entropy(z[0], t, reduction="sum") for z, t in pairs)
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
    hf.save(gradients, tmp_path / "ours")
    ours, theirs = values_of(tmp_path / "ours"), reference.gradients()
    copies = "layers.3.embed_tokens.weight", "layers.4.embed_tokens.weight", ".head.weight"
    assert_close({n: x for n, x in ours.items() if not n.endswith(copies)}, theirs, 2e-5)
