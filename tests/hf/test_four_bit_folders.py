"""Folders in 4 bits, of bitsandbytes and of gpt-oss: read, trained, and written."""

import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import FLOAT32, logits

from lmlib import hf
from lmlib.adapters.lora import lora
from lmlib.data.batch import Batch
from lmlib.hf.families import described
from lmlib.hf.tensor_files import stored_tensors, write
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.experts.gpt_oss import gpt_oss
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.families.llama import llama
from lmlib.models.matrices.four_bit import FourBit
from lmlib.models.matrices.lora import without_adapters
from lmlib.optim.trainable import adapters, grouped
from lmlib.parallel.matrix import dense
from lmlib.parallel.mesh import make_mesh
from lmlib.recipe import Recipe
from lmlib.state import split_by_training
from runner.weights.models import read_weights
from runner.weights.target import LoadTarget

V = 64
LLAMA = {"vocab_size": V, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, V, (1, 40), np.int32)


@functools.cache
def torch_and_transformers():
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    torch = pytest.importorskip("torch", reason="needs lmlib[parity]")
    return torch, pytest.importorskip("transformers", reason="needs lmlib[parity]")


@pytest.fixture(scope="module", params=["llama", "phi3"])
def folders(request, tmp_path_factory):
    """A model's folder in bfloat16, in NF4 by transformers, and that model of transformers."""
    torch, transformers = torch_and_transformers()
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(request.param, **LLAMA, **ids)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "bfloat16")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    packed = loaded(folder / "bfloat16", quantization_config=settings)
    packed.save_pretrained(folder / "nf4")
    return folder, packed


def loaded(folder, **settings):
    torch, transformers = torch_and_transformers()
    settings = {"dtype": torch.float32} | settings
    # bitsandbytes multiplies in bfloat16 in evaluation mode on a CPU.
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings).train()


def theirs(model):
    return model(torch_and_transformers()[0].tensor(IDS).long()).logits.float().detach().numpy()


def ours(model):
    with jax.default_matmul_precision("highest"):
        return np.asarray(logits(model, IDS, FLOAT32))


def base_in(folder, kind, mesh=None):
    """The model of a folder as a run with this `frozen_dtype` keeps it."""
    build = functools.partial(lora, described(folder).build, rank=4, alpha=8.0)
    recipe = Recipe(build, 0, adapters(), kind)
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    return read_weights(str(folder), LoadTarget(recipe, mesh))[0]


def differing(one, other):
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]


@pytest.mark.slow
def test_a_folder_of_bitsandbytes_is_read_and_written(folders, tmp_path):
    folder, packed = folders
    expected = theirs(packed)
    bound = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(ours(hf.load(folder / "nf4")), expected, atol=bound)
    if packed.config.model_type == "llama":  # no tensor of it consists of several matrices
        kept, made = (base_in(folder / name, "nf4") for name in ("nf4", "bfloat16"))
        assert any(isinstance(x, FourBit) for x in jax.tree.leaves(
            without_adapters(kept), is_leaf=lambda x: isinstance(x, FourBit)))  # fmt: skip
        assert differing(kept, made) == []
    kind = packed.config.model_type
    hf.save(hf.load(folder / "bfloat16"), tmp_path / "written", dtype="nf4", model_type=kind)
    one, other = (stored_tensors(each) for each in (folder / "nf4", tmp_path / "written"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if "quant_state" not in name:
            a, b = (each.read(0, each.size) for each in (tensor, other[name]))
            np.testing.assert_array_equal(a, b.astype(a.dtype), err_msg=name)
    again = loaded(tmp_path / "written")
    np.testing.assert_allclose(theirs(again), ours(hf.load(tmp_path / "written")), atol=2e-2)


@pytest.mark.slow
@pytest.mark.several_devices
def test_a_mesh_reads_the_same_codes(folders):
    folder, _ = folders
    one, other = (base_in(folder / "nf4", "nf4", mesh) for mesh in (None, make_mesh(fsdp=2)))
    assert differing(one, other) == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}])
def test_training_on_nf4_equals_peft_on_bitsandbytes(folders, settings, tmp_path):
    torch, _ = torch_and_transformers()
    peft = pytest.importorskip("peft", reason="needs lmlib[parity]")
    folder, packed = folders
    if packed.config.model_type != "llama":
        pytest.skip("one family is enough")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **settings
    )
    model = peft.get_peft_model(loaded(folder / "nf4"), config)
    model.save_pretrained(tmp_path / "peft")
    about = tmp_path / "peft" / "adapter_config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {
        "base_model_name_or_path": str(folder / "nf4")}))  # fmt: skip
    build = functools.partial(
        lora, described(folder / "nf4").build, rank=4, alpha=8.0,
        rank_stabilized=bool(settings),
    )  # fmt: skip
    recipe = Recipe(build, 0, adapters(), "nf4")
    mesh = make_mesh(devices=jax.devices()[:1])
    whole, _ = read_weights(str(tmp_path / "peft"), LoadTarget(recipe, mesh))
    trains, _, frozen = split_by_training(whole, grouped(whole, adapters()).keys())
    optimizer = optax.adamw(1e-3, weight_decay=0.0)
    draw = np.random.default_rng(2)

    def mean_loss(trains, batch):
        loss = batch_loss(eqx.combine(trains, frozen), batch, FLOAT32)[0]
        return loss.loss_sum / batch.targets.size

    @jax.jit
    def step(trains, state, batch):
        loss, gradient = jax.value_and_grad(mean_loss)(trains, batch)
        updates, state = optimizer.update(gradient, state, trains)
        return optax.apply_updates(trains, updates), state, loss

    state = optimizer.init(trains)
    chosen = [each for each in model.parameters() if each.requires_grad]
    their_optimizer = torch.optim.AdamW(chosen, lr=1e-3, weight_decay=0.0)
    for _ in range(20):
        rows = draw.integers(0, V, (4, 17), np.int32)
        ones = np.ones((4, 16), np.int32)
        positions = np.cumsum(ones, 1, np.int32) - 1
        batch = Batch(rows[:, :-1], rows[:, 1:], ones, positions, ones == 1)
        with jax.set_mesh(mesh):
            trains, state, loss = step(trains, state, batch)
        ids, targets = (torch.tensor(np.asarray(x)).long() for x in (batch.tokens, batch.targets))
        their_loss = torch.nn.functional.cross_entropy(
            model(ids).logits.reshape(-1, V), targets.reshape(-1)
        )
        their_optimizer.zero_grad()
        their_loss.backward()
        their_optimizer.step()
        np.testing.assert_allclose(loss, their_loss.item(), atol=1e-4)
    trained = eqx.combine(trains, frozen)
    hf.save_adapters(trained, tmp_path / "out", model_type="llama", trained=())
    back = peft.PeftModel.from_pretrained(loaded(folder / "nf4"), tmp_path / "out").train()
    found, expected = theirs(back), theirs(model)
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())


GPT_OSS = functools.partial(
    gpt_oss, vocab=V, embed=128, layers=2, heads=2, kv_heads=1, head_dim=32, mlp=96,
    experts=4, top=2,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.several_devices
def test_experts_in_mxfp4_are_kept_as_they_are_and_written(tmp_path):
    model = GPT_OSS(key=jax.random.key(0))
    hf.save(model, tmp_path / "bfloat16", dtype="bfloat16")
    hf.save(model, tmp_path / "mxfp4", dtype="mxfp4")
    names = stored_tensors(tmp_path / "mxfp4")
    blocks = names["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (4, 192, 4, 16)
    whole = hf.load(tmp_path / "mxfp4")
    for mesh in (None, make_mesh(expert=2, fsdp=2)):
        kept = without_adapters(base_in(tmp_path / "mxfp4", "mxfp4", mesh))
        for name in ("gate", "up", "down"):
            found, expected = (
                getattr(each.stack.patterns[0][0].mlp.experts, name) for each in (kept, whole)
            )
            assert isinstance(found, FourBit)
            np.testing.assert_array_equal(jax.jit(dense)(found), expected)
    hf.save(whole, tmp_path / "again", dtype="mxfp4")
    for name, tensor in names.items():
        other = stored_tensors(tmp_path / "again")[name]
        if not name.endswith(("_blocks", "_scales")):
            np.testing.assert_array_equal(*(x.read(0, x.size) for x in (tensor, other)))
    np.testing.assert_array_equal(ours(hf.load(tmp_path / "again")), ours(whole))


@pytest.mark.slow
def test_transformers_loads_experts_in_mxfp4(tmp_path):
    torch, _ = torch_and_transformers()
    hf.save(GPT_OSS(key=jax.random.key(0)), tmp_path / "mxfp4", dtype="mxfp4")
    model = loaded(tmp_path / "mxfp4", dtype=torch.bfloat16).float()
    expected = theirs(model)
    found = ours(hf.load(tmp_path / "mxfp4"))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def damaged(folder, name):
    return stored_tensors(folder)[f"model.layers.0.mlp.up_proj.weight{name}"]


@pytest.mark.landing
@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        (".quant_map", np.float32(np.linspace(-1, 1, 16)), "differs from bitsandbytes' map"),
        (".nested_absmax", np.float32([np.nan]), "scales of .* are not finite"),
        (".quant_state.bitsandbytes__nf4", np.uint8([*b"[]"] + [32] * 30), "not an object"),
    ],
)
def test_damaged_parts_are_named(part, value, told, tmp_path):
    small = llama(vocab=V, embed=64, layers=1, heads=1, mlp=64, key=jax.random.key(0))
    hf.save(small, tmp_path / "nf4", dtype="nf4")
    tensor = damaged(tmp_path / "nf4", part)
    rest = np.full(tensor.size, 32 if tensor.dtype == np.uint8 else 0, tensor.dtype)
    rest[: len(value)] = value
    write(tensor, 0, rest)
    with pytest.raises(FolderError, match=told):
        hf.load(tmp_path / "nf4")
    assert jnp.isfinite(small.embedding).all()
