"""Experiments, fiddlers and overrides."""

import ast
import dataclasses
from pathlib import Path

import fiddle as fdl
import numpy as np
import pytest
from written_experiment import error

from lmlib.compute import Compute
from lmlib.experiment import CheckpointSettings, EvaluationSettings, Experiment, SampleSettings
from lmlib.guard import Guard
from lmlib.losses.next_token import NextToken
from lmlib.optim.average import WeightAverage
from runner.config.configs import load, save
from runner.config.overrides import apply_override, check_values
from runner.config.text import flattened
from runner.errors import ConfigError


def lines_of(table):
    return Path(__file__).with_name(table).read_text().splitlines()


# Fiddlers


def test_fiddlers_are_applied_in_order_and_then_the_overrides(experiment):
    assert load(experiment, ["tiny", "double"]).model.embed == 16
    assert load(experiment, ["double", "tiny"]).model.embed == 8
    assert load(experiment, ["double", "tiny"], ["model.embed=24"]).model.embed == 24
    model = load(experiment, ["scale(3, embed=1_000)"]).model
    assert (model.layers, model.embed) == (3, 1000)


def test_an_unknown_fiddler_lists_the_known_ones(experiment):
    message = error(experiment, ["tinny"])
    assert "mine has no fiddler 'tinny'. Did you mean tiny?" in message
    assert "\n    tiny: One layer of embed 8.\n" in message
    assert "\n    scale: Any size." in message
    assert "_private" not in message and "silu" not in message and "config:" not in message


@pytest.mark.parametrize("call", ["tiny(", "scale(layers=open)", "a.b", "scale(*[1])", "3", ""])
def test_a_malformed_fiddler_is_refused(experiment, call):
    assert f"--fiddler={call}: write a name, or call it with literals" in error(experiment, [call])


def test_a_fiddler_that_fails_is_named_with_its_line(experiment):
    line = Path(experiment).read_text().splitlines().index("    cfg.model.embedd = 8") + 1
    message = error(experiment, ["broken"])
    assert "--fiddler=broken failed" in message and "embedd" in message
    assert message.endswith(f"({experiment}:{line})")
    assert "missing 1 required positional argument: 'layers'" in error(experiment, ["scale"])


# Overrides


@pytest.mark.parametrize("case", lines_of("overrides.txt"))
def test_an_override_sets_a_python_literal(experiment, case):
    override, path, literal = case.split(" | ")
    expected = ast.literal_eval(literal)
    value = eval(f"cfg.{path}", {"cfg": load(experiment, (), [override])})
    assert value == expected
    assert type(value) is type(expected)


def test_parts_left_to_their_defaults_are_overridden_and_saved_as_configs(tmp_path):
    cfg = fdl.Config(Experiment, steps=3)
    apply_override("compute.dtype=float32", cfg)
    save(cfg, tmp_path)
    again = load(str(tmp_path))
    assert flattened(again) == flattened(cfg)
    assert again.compute.dtype == "float32"
    assert fdl.build(again.guard) == Experiment.guard


def test_an_override_changes_a_shared_config_everywhere_and_no_default(experiment):
    load(experiment, (), ["data.rules['mlp']='fsdp'"])
    assert load(experiment).data.rules == {"mlp": "tensor"}
    cfg = load(experiment, (), ["data.files.path=other"])
    assert cfg.validation[0].files.path == "other"


@pytest.mark.parametrize("case", lines_of("wrong_overrides.txt"))
def test_a_wrong_override_says_what_is_expected(experiment, case):
    override, expected = case.split(" | ")
    message = error(experiment, (), [override])
    assert message.startswith(f"--fdl.{override}: ")
    assert expected in message


# Experiments


def test_an_experiment_is_found_by_any_of_its_names():
    names = ["experiments/llama_84m", "experiments/llama_84m.py", "experiments.llama_84m"]
    texts = {flattened(load(name)) for name in names}
    assert len(texts) == 1


def test_an_unknown_experiment_suggests_the_nearest():
    message = error("experiments/lama_84m")
    assert "no experiment or file is called 'experiments/lama_84m'" in message
    assert "Did you mean experiments/llama_84m" in message


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1", "has no function `def config() -> fdl.Config`"),
        ("def config():\n    return 3", "wrong must return a fdl.Config, and returned 3"),
        ("x = 1\nx.y", "has no attribute 'y' ({file}:2)"),
        ("import missing_module", "No module named 'missing_module' ({file}:1)"),
        ("def config(:", "SyntaxError: invalid syntax (wrong.py, line 1)"),
        ("def config():\n    raise KeyError(1)", "of wrong failed: KeyError: 1 ({file}:2)"),
    ],
)
def test_a_wrong_experiment_is_named_with_the_cause(write, source, expected):
    file = write("wrong", source)
    assert expected.format(file=file) in error(str(file))


def test_an_invalid_model_folder_is_refused_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 0}')
    expected = f"{tmp_path}/config.json: vocab_size = 0 is invalid"
    with pytest.raises(ConfigError) as raised:
        load("experiments/from_hf", overrides=[f"folder={str(tmp_path)!r}"])
    assert str(raised.value).startswith(expected) and "from_hf" not in str(raised.value)


# Values of wrong types

SETTINGS = {
    "average": WeightAverage,
    "checkpoints": CheckpointSettings,
    "compute": Compute,
    "evaluation": EvaluationSettings,
    "guard": Guard,
    "objective": NextToken,
    "samples": SampleSettings,
}


@pytest.mark.parametrize("part", SETTINGS)
def test_every_setting_refuses_a_value_of_another_type_by_its_path(part):
    for field in dataclasses.fields(SETTINGS[part]):
        optional = "None" in str(field.type)
        for value in ({1.5}, 1j, *(() if optional else (None,))):
            cfg = load("experiments/llama_84m", ["tiny"])
            setattr(cfg, part, fdl.Config(SETTINGS[part], **{field.name: value}))
            with pytest.raises(ConfigError) as raised:
                check_values(cfg)
            assert f"{part}.{field.name} is {value}, and lmlib." in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("steps", 1e3),
        ("steps", True),
        ("seed", None),
        ("data", None),
        ("actions", None),
        ("samples.prompts", "one text"),
        ("samples.prompts", (None,)),
        ("evaluation.weights", {"web": "much"}),
        ("model.layers", "2"),
        ("data.batch_size", None),
    ],
)
def test_a_value_of_another_type_in_a_file_is_refused_when_it_is_loaded(write, path, value):
    source = f"""
from experiments import llama_84m

def config():
    cfg = llama_84m.config()
    llama_84m.tiny(cfg)
    cfg.{path} = {value!r}
    return cfg
"""
    told = error(str(write("wrong_values", source)))
    assert told.startswith(f"{path} is {value!r}, and ")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("samples.prompts", ["a list"]),
        ("evaluation.weights", {"web": 2}),
        ("optimizer.peak_lr", 1),
        ("compute.saved", ["query"]),
        ("steps", np.int64(5)),
        ("validation", None),
    ],
)
def test_compatible_values_are_accepted(path, value):
    cfg = load("experiments/llama_84m", ["tiny"])
    node, _, name = path.rpartition(".")
    setattr(getattr(cfg, node) if node else cfg, name, value)
    check_values(cfg)
