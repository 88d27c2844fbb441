"""Weights that runs begin with: of folders and of other runs."""

import functools
import hashlib
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from adapter_runs import write_adapter_run
from byte_texts import write_ids, write_texts
from run_on_bytes import write_run_on_bytes
from sentinels import sentinels
from small_folder import assert_same_weights

from experiments import dpo
from experiments.base.pretraining import multi_token
from lmlib import hf
from lmlib.adapters.lora import lora, merged
from lmlib.checkpoint import Checkpoints
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.synthetic import Synthetic
from lmlib.hf.families import described
from lmlib.models.decoder import Decoder
from lmlib.models.matrices.int8 import in_int8
from lmlib.models.matrices.lora import without_adapters
from lmlib.models.multi_token import without_heads
from lmlib.models.reward import RewardModel
from lmlib.optim.schedules import warmup_constant
from lmlib.optim.trainable import Group, adapters
from lmlib.parallel.axes import map_weights
from lmlib.parallel.mesh import make_mesh
from lmlib.recipe import Recipe
from lmlib.state import abstract_model
from runner import Options, convert, fit
from runner.config import configs
from runner.config.text import flattened
from runner.errors import ConfigError
from runner.weights.initial_weights import InitialWeights
from runner.weights.models import read_weights
from runner.weights.target import LoadOptions, LoadTarget

GOLDEN = Path(__file__).parents[2] / "hf" / "golden"
LLAMA = GOLDEN / "llama"


def config(folder, *overrides):
    small = ("compute.dtype=float32", "validation=None", "mesh.fsdp=1")
    cfg = configs.load("experiments/from_hf", ["tiny"], [f"folder={folder}", *small, *overrides])
    # However many steps a run has, it is the same program.
    cfg.optimizer.schedule = fdl.Partial(warmup_constant, warmup=0.0)
    return cfg


def taken(reference, experiment, allowed_changes=()):
    """The initial weights of `experiment`."""
    of = experiment.recipe, experiment.mesh, experiment.data
    return read_weights(reference, LoadTarget(*of, allowed_changes))


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_weights_of_a_folder_get_the_layout_of_the_experiment(mesh):
    fsdp, tensor = mesh
    experiment = fdl.build(config(LLAMA, f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}"))
    model, origin = taken(str(LLAMA), experiment)
    assert origin == str(LLAMA)
    assert_same_weights(model, hf.load(LLAMA))
    assert model.embedding.sharding == experiment.abstract_state().model.embedding.sharding


@pytest.mark.slow
@pytest.mark.several_devices
def test_a_base_read_into_8_bits_equals_the_quantized_base():
    build = functools.partial(lora, described(LLAMA).build)
    recipe = Recipe(build, 0, adapters(), "int8")
    mesh = make_mesh(fsdp=4, tensor=2)
    found, _ = read_weights(str(LLAMA), LoadTarget(recipe, mesh))
    whole = jax.tree.map(lambda x: x.astype("bfloat16"), hf.load(LLAMA))
    assert_same_weights(without_adapters(found), map_weights(in_int8, whole))
    wanted = abstract_model(lambda: recipe.abstract_model, mesh)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.parametrize(
    ("override", "told"),
    sentinels(
        [
            ("model.embed=32", "embedding: float32[62, 16], here float32[62, 32]"),
            ("model.layers=2", "attention.query: float32[3, 16, 4, 4], here float32[2, 16, 4, 4]"),
            ("model.tied=True", "unembedding: float32[16, 62], here None"),
            (
                "model.rope_theta=7.0",
                "stack.patterns.0.0.attention.rotary.theta: 10000.0, here 7.0",
            ),
            ("model.norm_epsilon=0.5", "norm.epsilon: 1e-06, here 0.5"),
        ],
        lambda case: case[0] in ("model.layers=2", "model.rope_theta=7.0"),
    ),
)
def test_another_architecture_is_refused_by_names_and_values(tmp_path, override, told):
    shutil.copy(LLAMA / "config.json", tmp_path)  # no tensors, so that nobody can read them
    experiment = fdl.build(config(LLAMA, override))
    with pytest.raises(ConfigError) as error:
        taken(str(tmp_path), experiment)
    refused = f"the weights of {tmp_path}: its model differs from this experiment's"
    assert refused in str(error.value)
    assert told in str(error.value)


def test_another_tokenizer_is_refused(tmp_path):
    folder, text = shutil.copytree(LLAMA, tmp_path / "folder"), "{ }"
    (folder / "tokenizer.json").write_text("{}")
    other = TokenizerIdentity("other", hashlib.sha256(text.encode()).hexdigest())
    write_ids(tmp_path / "data", [[1] * 70], vocab_size=62, tokenizer=other, tokenizer_json=text)
    cfg = config(folder)
    cfg.data = fdl.Config(FlatTokens, str(tmp_path / "data"), "train", 2, 8)
    with pytest.raises(ConfigError, match=r"other'.*its ids mean other texts.*--allow_change=data"):
        taken(str(folder), fdl.build(cfg))


def with_heads(weights=(0.3,)):
    cfg = config(LLAMA)
    multi_token(cfg, weights)
    return cfg


def test_heads_that_a_folder_or_a_run_lacks_are_new(tmp_path):
    convert.bring_in(str(LLAMA), tmp_path / "run")
    experiment = fdl.build(with_heads())
    new = experiment.recipe.make().predictors
    for reference in (LLAMA, tmp_path / "run"):
        found, _ = taken(str(reference), experiment)
        assert_same_weights(without_heads(found), hf.load(LLAMA))
        assert_same_weights(found.predictors, new)
        layout = [x.sharding for x in jax.tree.leaves(experiment.abstract_state().model)]
        assert [x.sharding for x in jax.tree.leaves(found)] == layout


@pytest.mark.parametrize("alone", [False, True])
def test_heads_of_a_run_are_kept_or_left_out(tmp_path, alone):
    cfg = with_heads()
    cfg.trainable = {"heads": fdl.Config(Group, paths=("predictors.*",))} if alone else None
    saved = write_adapter_run(cfg, LLAMA, tmp_path / "run")
    found, _ = taken(str(tmp_path / "run"), fdl.build(with_heads()), ("data",))
    assert_same_weights(found, saved)
    found, _ = taken(str(tmp_path / "run"), fdl.build(config(LLAMA)), ("data",))
    assert type(found) is Decoder
    assert_same_weights(found, without_heads(saved))
    with pytest.raises(ConfigError, match="predictors: 1 parts, here 2 parts"):
        taken(str(tmp_path / "run"), fdl.build(with_heads((0.1, 0.1))), ("data",))


def losses(result):
    return [line["loss"] for line in result.metrics]


@pytest.mark.slow
def test_a_run_needs_the_folder_of_its_initial_weights_only_once(tmp_path, capsys):
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN / "qwen3", folder)
    convert.bring_in(str(folder), tmp_path / "in")
    cfg = config(folder, "steps=3", "checkpoints.every=2")
    first = fit(cfg, tmp_path / "first")
    named = config(folder, "steps=3", "checkpoints.every=2", "init_from=None")
    for name, origin in (("folder", folder), ("run", tmp_path / "in")):
        found = fit(named, tmp_path / f"from_{name}", Options(init_from=str(origin)))
        assert losses(found) == losses(first)
    # A run in the imported workdir starts from the import.
    assert losses(fit(named, tmp_path / "in")) == losses(first)
    assert (tmp_path / "in" / "hugging_face" / "config.json").exists()

    (folder / "model.safetensors").unlink()
    capsys.readouterr()
    longer = config(folder, "steps=4", "checkpoints.every=2")
    again = fit(longer, tmp_path / "first")
    assert losses(again)[:3] == losses(first) and len(again.metrics) == 4
    assert "resuming after step 3" in capsys.readouterr().err
    shutil.rmtree(folder)
    cfg = configs.load(str(tmp_path / "first"), (), ["steps=5"])
    assert len(fit(cfg, tmp_path / "first").metrics) == 5
    with Checkpoints(tmp_path / "first" / "checkpoints", read_only=True) as checkpoints:
        target = fdl.build(cfg).abstract_state()
        _, notes = checkpoints.restore(5, target)
    assert notes["initialised_from"] == str(folder)


@pytest.mark.parametrize(
    "name",
    sentinels(sorted(each.name for each in GOLDEN.iterdir()), lambda name: name == "qwen2_yarn"),
)
def test_a_config_from_a_folder_is_saved_completely(name, tmp_path):
    cfg = config(GOLDEN / name)
    configs.save(cfg, tmp_path)
    again = configs.load(str(tmp_path))
    assert flattened(again) == flattened(cfg)
    one, other = (fdl.build(each.model) for each in (cfg, again))
    assert one.func is other.func and one.keywords.items() <= other.keywords.items()


CLOSE = {"rtol": 1e-6, "atol": 1e-6}
TWO_STEPS = ("steps=2", "checkpoints.every=2", "data.batch_size=8", "mesh.fsdp=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run on bytes whose weights all train, its model, and its data."""
    folder = tmp_path_factory.mktemp("bytes")
    write_texts(folder / "data", split="validation")
    return *write_run_on_bytes(folder), folder / "data"


def based(name, base, data, *overrides):
    return configs.load(
        f"experiments/{name}", (), [f"base={str(base)!r}", f"tokens={str(data)!r}", *overrides]
    )


def distilled(teacher, data):
    """A student of the teacher's size, on the teacher's data."""
    cfg = configs.load("experiments/distil", (), [f"teacher={str(teacher)!r}"])
    of_teacher = configs.load(str(teacher))
    cfg.model, cfg.compute = cfg.objective.teacher, of_teacher.compute
    cfg.data, cfg.validation, cfg.samples.prompts = of_teacher.data, None, ()
    cfg.data.batch_size = 8
    cfg.mesh.fsdp, cfg.steps, cfg.checkpoints.every = 1, 2, 2
    return cfg


def first_weights(cfg):
    return taken(cfg.init_from, fdl.build(cfg))[0]


def reference_model(cfg):
    return InitialWeights(fdl.build(cfg), LoadOptions()).reference_model()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dpo"])
def test_new_adapters_start_from_a_run(run, name):
    workdir, model, data = run
    cfg = based(name, workdir, data)
    assert cfg.data.sequence_length == 24  # as the run's
    found = first_weights(cfg)
    assert_same_weights(without_adapters(found), model)
    assert_same_weights(merged(found), model)  # they start at zero
    assert reference_model(cfg) is None  # of preferences the model without its adapters


@pytest.mark.slow
@pytest.mark.parametrize("base", ["run", "folder", "rewards"])
def test_a_reward_model_starts_from_any_model(run, tmp_path, base):
    """It takes all weights of a language model except the unembedding."""
    workdir, model, data = run
    reference = {"run": workdir, "folder": LLAMA}.get(base, tmp_path / "rewards")
    if base == "folder":
        model = hf.load(LLAMA)
    elif base == "rewards":
        model = RewardModel(model, 0.5 * model.embedding[0])
        hf.save(model, reference)
    cfg = based("dpo", reference, data, "compute.dtype=float32")
    if base != "rewards":
        dpo.reward(cfg)
    text = flattened(cfg)
    assert "lmlib.models.reward.reward_model (partial)" in text
    found = without_adapters(first_weights(cfg))
    assert_same_weights(RewardModel(found, None), RewardModel(model, None))
    if base == "rewards":
        np.testing.assert_array_equal(found.score, model.score)
    else:
        assert found.score.shape == model.embedding.shape[1:] and found.score.std() > 0


def test_a_run_with_another_model_is_refused_by_names_and_values(run):
    workdir, _, data = run
    cfg = based("lora", LLAMA, data)
    cfg.init_from = str(workdir)
    with pytest.raises(ConfigError, match=r"has model\.embedding as float32\[258, 16\], but"):
        first_weights(cfg)


@pytest.mark.slow
def test_a_run_with_adapters_can_be_the_base_of_each_experiment(run, tmp_path):
    workdir, model, data = run
    adapted = tmp_path / "adapted"
    trained = write_adapter_run(based("lora", workdir, data), workdir, adapted)
    base = merged(trained)
    assert not np.allclose(base.stack.patterns[0][0].mlp.up, model.stack.patterns[0][0].mlp.up)
    # It goes on with its adapters.
    assert_same_weights(first_weights(based("lora", adapted, data)), trained)
    other = based("lora", adapted, data)
    other.model.alpha = 7.0
    with pytest.raises(ConfigError, match=r"rank 16 and alpha 32, here rank 16 and alpha 7[)]"):
        first_weights(other)
    preferring = based("dpo", adapted, data)
    assert_same_weights(first_weights(preferring), trained)
    assert_same_weights(reference_model(preferring), base, **CLOSE)
    assert_same_weights(reference_model(distilled(adapted, data)), trained)
    plain = configs.load(str(workdir))
    plain.init_from, plain.mesh.data = str(adapted), 1
    assert_same_weights(first_weights(plain), base, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dpo", "orpo", "kto", "reward", "distil"])
def test_each_experiment_trains_two_steps_on_a_run(run, tmp_path, name):
    workdir, _, data = run
    of_a_base = name != "distil"
    loss = {"orpo": dpo.orpo, "kto": dpo.kto, "reward": dpo.reward}.get(name)
    base = name if loss is None else "dpo"
    cfg = based(base, workdir, data, *TWO_STEPS) if of_a_base else distilled(workdir, data)
    if loss is not None:
        loss(cfg)
    if loss is not None or name == "dpo":  # the run's data lacks pairs
        sizes = {"vocab_size": 258, "batch_size": 8, "sequence_length": 24}
        cfg.data = fdl.Config(Synthetic, **sizes, labels=name == "kto")
        cfg.validation = fdl.copy_with(cfg.data, seed=1)
    result = fit(cfg, tmp_path / "run")
    told = {"lora": "", "distil": "distillation ", "reward": "reward "}.get(
        name, f"{name.upper()} "
    )
    assert f"training {told}loss" in result.summary.text(tmp_path, "")
    assert (result.summary.validation_loss is not None) == of_a_base
    assert fit(cfg, tmp_path / "run").summary.steps == 2  # and it is found again
