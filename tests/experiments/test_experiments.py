"""The shipped experiments: their defaults as golden text, and two steps of each when tiny."""

import math
import runpy
from pathlib import Path

import fiddle as fdl
import jax
import pytest
from published_configs import PUBLISHED, config
from sentinels import sentinels

from lmlib.hf.families import FAMILIES, described_by
from lmlib.models.differences import differences
from runner import fit
from runner.aot.cost import cost_of
from runner.command_line.command import first_line
from runner.config import configs
from runner.config.text import flattened
from runner.errors import ConfigError

LLAMAS = ("llama_1b", "llama_270m", "llama_2b", "llama_540m", "llama_84m", "llama_8b")
ON_CPUS = {  # on 2 cores
    "quickstart": "5 minutes",
    "quickstart_experts": "8 minutes",
    "hybrid_quickstart": "9 minutes",
    "distil": "2 minutes",
    "query_key_norm": "1 minute",
    "speedrun_parts": "1 minute",
    "transfer": "1 minute",
    "muon_or_adamw": "1 minute",
    "optimizer_lab": "1 minute",
}
ADAPTED = ("llama_405b_lora", "llama_8b_lora", "qwen3_0_6b_lora", "qwen3_0_6b_dpo")
NAMES = (
    *LLAMAS,
    *PUBLISHED,
    *ADAPTED,
    *ON_CPUS,
    "ladder",
    "smollm2_sft",
    "speedrun_124m",
    "nanochat_d12",
    "modded_124m",
)
# Sizes of the tiny quickstart, for the speedruns with every part and with one.
QUICK = ("data.path.max_bytes=400_000", "data.path.vocab_size=512", "model.vocab=512")
SPEEDRUNS = {"speedrun_124m": QUICK, "speedrun_parts": (*QUICK, "model.value_embeddings=True")}
NEED_MORE = ("from_hf", "lora", "dpo", "own_text")  # a folder, a run or a data set
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    # The quickstart's data set is made once for all tests, and not in the user's own cache.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def test_every_experiment_is_listed_with_a_command_and_a_cost():
    listed = configs.experiments()
    assert sorted(listed) == [f"experiments/{name}" for name in sorted([*NAMES, *NEED_MORE])]
    for name in (*NAMES, *NEED_MORE):
        text = Path(configs.__file__).parents[2].joinpath("experiments", f"{name}.py").read_text()
        assert f"python -m runner --fdl_config=experiments/{name} --workdir=" in text


@pytest.mark.parametrize(
    "name", sentinels(NAMES, lambda name: name not in PUBLISHED or name == "qwen3_0_6b")
)
def test_a_header_says_what_the_plan_says(name):
    """The steps, tokens, FLOPs and hours of `python -m runner.plan --fdl_config=…`."""
    cost = cost_of(configs.load(f"experiments/{name}"))
    header = first_line(configs.experiments()[f"experiments/{name}"])
    time = f"{ON_CPUS[name]} on 2 CPU cores" if name in ON_CPUS else cost.time
    assert f", {cost.size}; {cost.flops}, {time}." in header


def test_a_changed_default_shows():
    """After a wanted change: python tests/experiments/update.py, and look at the difference."""
    update = Path(__file__).with_name("update.py")
    found = dict(runpy.run_path(str(update))["texts"]())
    assert found == {name: (GOLDEN / name).read_text() for name in found}


def shapes(cfg):
    make_model = fdl.build(cfg.model)
    return jax.eval_shape(lambda: make_model(key=jax.random.key(0)))


def parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(model))


def test_llama_3_8b_has_the_parameters_of_the_published_model():
    assert parameters(shapes(configs.load("experiments/llama_8b"))) == 8_030_261_248


def test_each_family_has_an_experiment():
    kinds = {keys["model_type"] for _, keys in PUBLISHED.values()}
    assert kinds == {family.model_type for family in FAMILIES}


@pytest.mark.parametrize("name", sentinels(PUBLISHED, lambda name: name == "qwen3_0_6b"))
def test_an_experiment_is_the_published_model(name):
    """It has the parts and settings of the model that hf.load makes from the config.json."""
    model = shapes(configs.load(f"experiments/{name}"))
    described = described_by(config(name), "config.json")
    assert not list(differences(model, jax.eval_shape(described.build, jax.random.key(0))))
    assert parameters(model) == PUBLISHED[name][0]


@pytest.mark.parametrize("name", [name for name in LLAMAS if name != "llama_8b"])
def test_the_published_sizes_are_one_experiment_when_tiny(name):
    """But for the rate; so that the steps below stand for all of them."""
    one, other = (
        flattened(configs.load(f"experiments/{each}", ["tiny"], ["optimizer.peak_lr=1e-3"]))
        for each in (name, "llama_84m")
    )
    assert one == other


def test_longer_rows_are_as_many_tokens_a_step_with_positions_scaled_to_them():
    short = configs.load("experiments/quickstart", ["tiny"])
    longer = configs.load("experiments/quickstart", ["tiny", "longer_rows(256)"])
    for before, after in ((short.data, longer.data), (short.validation, longer.validation)):
        assert after.sequence_length == 256
        assert after.batch_size * 256 == before.batch_size * before.sequence_length
    scaling = fdl.build(longer.model.rope_scaling)
    assert (scaling.factor, scaling.original) == (4.0, 64)
    assert scaling.amplitude == pytest.approx(0.1 * math.log(4) + 1)
    with pytest.raises(ConfigError, match="sequence_length = 64, but rows have 64 already"):
        configs.load("experiments/quickstart", ["tiny", "longer_rows(64)"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_84m", "llama_8b", "quickstart", "distil", *SPEEDRUNS])
def test_two_tiny_steps_on_a_mesh_of_4_by_2(name, tmp_path):
    overrides = ["steps=2", "mesh.fsdp=4", "mesh.tensor=2", *SPEEDRUNS.get(name, ())]
    fiddler = "thousandth" if name == "speedrun_124m" else "tiny"
    result = fit(configs.load(f"experiments/{name}", [fiddler], overrides), tmp_path)
    assert [line["step"] for line in result.metrics] == [1, 2]
    assert int(result.state.step) == 2
    if name in SPEEDRUNS:
        even = math.log(result.state.model.vocab)
        assert result.metrics[0]["loss"] == pytest.approx(even, abs=0.1)
    else:
        up = result.state.model.stack.patterns[0][0].mlp.up
        assert up.sharding.mesh.shape["fsdp"] == 4
        assert result.summary.validation_loss is not None
