"""PEFT and lmlib compute and train the same with `use_dora`. Needs lmlib[parity]."""

import json

import equinox as eqx
import fiddle as fdl
import jax
import numpy as np
import optax
import pytest
from adapted_models import adapted, assert_same_logits, base_of, ids_of, merge, theirs
from golden_models import FLOAT32
from hugging_face_families import FAMILIES, GOLDEN, tensors

from lmlib import hf
from lmlib.adapters.lora import lora
from lmlib.data.batch import Batch
from lmlib.hf.peft.config import read_config
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.matrices.dora import DoRAMatrix
from lmlib.optim.trainable import adapters, grouped
from lmlib.parallel.matrix import is_matrix
from lmlib.state import split_by_training
from runner import convert
from runner.config import configs

peft = pytest.importorskip("golden_by_peft", reason="needs lmlib[parity]")
torch = pytest.importorskip("torch", reason="needs lmlib[parity]")

# One with vocabulary tables, one with biases and inputs as rows, one with several weights in a
# module, and one whose groups of queries share keys.
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj", "embed_tokens", "lm_head"],
    "gpt2": ["c_attn", "c_proj"],
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "up_proj"],
}


def theirs_adapted(name, **settings):
    """PEFT's model with adapters that are not zero, and magnitudes that are not the norms."""
    model = peft.adapted(name, use_dora=True, target_modules=TARGETS[name], **settings)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "magnitude" in path:
                weight *= 1 + 0.3 * torch.rand_like(weight)
    return model


def read(name, folder):
    return hf.load_adapters(folder, base_of(name), model_type=FAMILIES[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_lmlib_and_peft_read_each_other_s_magnitudes(name, tmp_path):
    model = theirs_adapted(name, r=4, lora_alpha=6, use_rslora=name == "gpt2", lora_dropout=0.1)
    model.save_pretrained(tmp_path / "peft")
    expected, found = theirs(model, ids_of(name)), read(name, tmp_path / "peft")
    nodes = [x for x in jax.tree.leaves(found, is_leaf=is_matrix) if is_matrix(x)]
    assert nodes and all(isinstance(node, DoRAMatrix) for node in nodes)
    for each in (found, merge(found)):
        assert_same_logits(each, ids_of(name), expected)
    hf.save_adapters(found, tmp_path / "out", model_type=FAMILIES[name][0], trained=())
    written = read_config(tmp_path / "out")
    assert written.magnitude and written.dropout == 0.1
    assert_same_logits(found, ids_of(name), theirs(peft.read(name, tmp_path / "out"), ids_of(name)))
    if name == "llama":  # without blocks of zeros
        before = tensors(tmp_path / "peft" / "adapter_model.safetensors")
        for key, values in tensors(tmp_path / "out" / "adapter_model.safetensors").items():
            np.testing.assert_allclose(values, before[key], rtol=1e-6)


@pytest.mark.slow
def test_twenty_steps_equal_those_of_peft(tmp_path):
    name, settings = "llama", {"r": 4, "lora_alpha": 8}
    model = theirs_adapted(name, **settings).train()
    model.save_pretrained(tmp_path / "peft")
    whole = read(name, tmp_path / "peft")
    trains, _, frozen = split_by_training(whole, grouped(whole, adapters()).keys())
    optimizer, V = optax.adamw(1e-3, weight_decay=0.0), base_of(name).vocab

    def mean_loss(trains, batch):
        loss = batch_loss(eqx.combine(trains, frozen), batch, FLOAT32)[0]
        return loss.loss_sum / batch.targets.size

    @jax.jit
    def step(trains, state, batch):
        loss, gradient = jax.value_and_grad(mean_loss)(trains, batch)
        updates, state = optimizer.update(gradient, state, trains)
        return optax.apply_updates(trains, updates), state, loss

    state, draw = optimizer.init(trains), np.random.default_rng(2)
    chosen = [each for each in model.parameters() if each.requires_grad]
    their_optimizer = torch.optim.AdamW(chosen, lr=1e-3, weight_decay=0.0)
    for _ in range(20):
        rows = draw.integers(0, V, (4, 17), np.int32)
        ones = np.ones((4, 16), np.int32)
        positions = np.cumsum(ones, 1, np.int32) - 1
        batch = Batch(rows[:, :-1], rows[:, 1:], ones, positions, ones == 1)
        trains, state, loss = step(trains, state, batch)
        ids, targets = (torch.tensor(np.asarray(x)).long() for x in (batch.tokens, batch.targets))
        their_loss = torch.nn.functional.cross_entropy(
            model(ids).logits.reshape(-1, V), targets.reshape(-1)
        )
        their_optimizer.zero_grad()
        their_loss.backward()
        their_optimizer.step()
        np.testing.assert_allclose(loss, their_loss.item(), atol=1e-4)
    hf.save_adapters(eqx.combine(trains, frozen), tmp_path / "out", trained=())
    model.save_pretrained(tmp_path / "trained")
    names = ("peft", "trained", "out")
    before, expected, found = (
        tensors(tmp_path / each / "adapter_model.safetensors") for each in names
    )
    for key, values in expected.items():
        if not key.endswith("base_layer.weight"):
            assert np.abs(values - before[key]).max() > 1e-3, key
            np.testing.assert_allclose(found[key], values, atol=1e-4, err_msg=key)


@pytest.mark.slow
def test_a_run_begins_with_magnitudes_and_exports_them(tmp_path):
    theirs_adapted("llama", r=4, lora_alpha=6).save_pretrained(tmp_path / "peft")
    about = tmp_path / "peft" / "adapter_config.json"
    told = json.loads(about.read_text()) | {"base_model_name_or_path": str(GOLDEN / "llama")}
    about.write_text(json.dumps(told))
    convert.bring_in(str(tmp_path / "peft"), tmp_path / "run")
    cfg = configs.load(str(tmp_path / "run"))
    assert fdl.get_callable(cfg.model) is lora and cfg.model.magnitude
    convert.bring_adapters_out(str(tmp_path / "run"), tmp_path / "out")
    before, after = (
        tensors(tmp_path / each / "adapter_model.safetensors") for each in ("peft", "out")
    )
    for key, values in after.items():  # the run keeps the base in bfloat16, the export in float32
        bound = 3e-3 if "magnitude" in key else 0
        np.testing.assert_allclose(values, before[key], rtol=bound)
    assert sum("magnitude" in key for key in after) == sum("magnitude" in key for key in before)


@pytest.mark.landing
def test_what_peft_has_no_magnitudes_for_is_refused(tmp_path):
    model = adapted("phi3", rank=2, paths=("*.query",), magnitude=True)
    with pytest.raises(ValueError, match=r"magnitudes of the whole .*qkv_proj: adapt .*key and"):
        hf.save_adapters(model, tmp_path / "part", model_type="phi3", trained=())
    experts = adapted("mixtral", rank=2, paths=("*.experts.down",))
    hf.save_adapters(experts, tmp_path / "experts", model_type="mixtral", trained=())
    file = tmp_path / "experts" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    with pytest.raises(FolderError, match="use_dora = True is not supported for experts"):
        read("mixtral", tmp_path / "experts")
