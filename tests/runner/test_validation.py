"""Several validation sets: each by its name, and their total; which metric ranks checkpoints."""

import dataclasses
import json
import math

import fiddle as fdl
import numpy as np
import pytest
from small_experiment import small

from lmlib.checkpoint.manifest import read_manifest
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.validation import Evaluator
from lmlib.experiment import CheckpointSettings, EvaluationSettings, Experiment
from lmlib.losses.dpo import DPO
from runner import fit
from runner.training.report import finished_summary, totals_of
from runner.training.validation import Validation

TWO_BATCHES = EvaluationSettings(batches=2)
WITH_AN_ENDLESS_ONE = "the whole of each set, of one that never ends the first 2 batches"


class Text(Synthetic):
    """Ids that stand for so many bytes each."""

    def __init__(self, in_bytes: float | None, **settings: int):
        super().__init__(vocab_size=512, batch_size=2, sequence_length=16, **settings)
        self.bytes_per_target = in_bytes


def config():
    cfg = small()
    cfg.validation = {
        "web": fdl.Config(Text, 4.0, seed=1),
        "code.py": fdl.Config(Text, 2.5, seed=2),
    }
    return cfg


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return fdl.build(config())


@pytest.fixture(scope="module")
def evaluated(experiment):
    """The state, and each set evaluated alone."""
    state = experiment.initial_state()
    evaluate = Evaluator(experiment.mesh, experiment.compute)
    sets = experiment.validation_sets.items()
    return state, {name: evaluate(state.model, source, 2) for name, source in sets}


@pytest.mark.parametrize(
    ("in_a_split", "some", "whole"),
    [
        ([7], "the first 2 of 7 batches", "the whole split"),
        ([2], "the whole split", "the whole split"),
        ([1], "the whole split", "the whole split"),
        ([None], "the first 2 batches", "the first 2 batches"),
        ([7, 5], "the first 2 batches of each set", "the whole of each set"),
        ([1, 2], "the whole of each set", "the whole of each set"),
        ([7, None], "the first 2 batches of each set", WITH_AN_ENDLESS_ONE),
    ],
)
def test_a_part_of_a_split_is_told_from_the_whole(experiment, in_a_split, some, whole):
    sets = {}
    for number, batches in enumerate(in_a_split):
        sets[str(number)] = Text(None)
        sets[str(number)].batches = batches
    validation = sets if len(sets) > 1 else sets["0"]
    found = Validation(
        dataclasses.replace(experiment, validation=validation, evaluation=TWO_BATCHES)
    )
    assert (found.seen(whole=False), found.seen(whole=True)) == (some, whole)


@pytest.mark.parametrize("weights", [None, {"web": 3.0, "code.py": 1.0}])
def test_each_set_has_its_metrics_and_all_have_a_total(experiment, evaluated, weights):
    state, alone = evaluated
    evaluation = EvaluationSettings(batches=2, weights=weights)
    experiment = dataclasses.replace(experiment, evaluation=evaluation)
    experiment.check()
    found = Validation(experiment).metrics(state)
    assert set(found) == set(experiment.evaluation_metrics)
    in_bytes = {"web": 4.0, "code.py": 2.5}
    for name, one in alone.items():
        assert found[f"evaluation_loss/{name}"] == one.loss
        bits = one.loss / math.log(2) / in_bytes[name]
        assert found[f"evaluation_bits_per_byte/{name}"] == pytest.approx(bits)
    losses = [alone[name].loss for name in in_bytes]
    tokens = np.array([alone[name].count for name in in_bytes])
    sizes = tokens * np.array(list(in_bytes.values()))
    bits = [found[f"evaluation_bits_per_byte/{name}"] for name in in_bytes]
    by_tokens, by_bytes = (tokens, sizes) if weights is None else ([3, 1], [3, 1])
    assert tokens[0] != tokens[1]  # or the weights of tokens would not show
    assert found["evaluation_loss"] == pytest.approx(np.average(losses, weights=by_tokens))
    assert found["evaluation_bits_per_byte"] == pytest.approx(np.average(bits, weights=by_bytes))
    if weights is None:  # as if all were one text
        nats = found["evaluation_loss"] * tokens.sum()
        assert found["evaluation_bits_per_byte"] == pytest.approx(nats / math.log(2) / sizes.sum())


def test_sets_without_text_have_no_bits_and_nor_has_their_total(experiment, evaluated):
    sets = {**experiment.validation_sets, "ids": Text(None, seed=2)}
    experiment = dataclasses.replace(experiment, validation=sets)
    found = Validation(experiment).metrics(evaluated[0])
    assert set(found) == set(experiment.evaluation_metrics)
    assert "evaluation_bits_per_byte" not in found and "evaluation_loss/ids" in found
    one = dataclasses.replace(experiment, validation=Text(None))
    assert one.evaluation_metrics == ("evaluation_loss",)


def weighted(**weights):
    return {"evaluation": EvaluationSettings(batches=2, weights=weights)}


def ranked_by(metric):
    return {"checkpoints": CheckpointSettings(best_by=metric)}


@pytest.mark.slow
def test_preferences_are_validated_and_ranked_as_what_they_are(experiment):
    experiment = dataclasses.replace(
        experiment,
        objective=DPO(reference_from="a run", beta=10.0),
        checkpoints=CheckpointSettings(best_by="evaluation_reward_accuracy", best_is_highest=True),
    )
    experiment.check()
    recipe = experiment.reference_recipe
    state = experiment.initial_state(reference_model=recipe.new_model(experiment.mesh))
    validation = Validation(experiment)
    found = validation.metrics(state)
    assert set(found) == set(experiment.evaluation_metrics)
    pairs, losses = [], []
    for name, source in experiment.validation_sets.items():
        batches = [source.batch(step) for step in range(2)]
        pairs.append(sum(int(experiment.objective.count(batch)) for batch in batches))
        losses.append(found[f"evaluation_loss/{name}"])
    assert found["evaluation_loss"] == pytest.approx(np.average(losses, weights=pairs))
    text = validation.text(found)
    web, code = (f"{loss:.4f}" for loss in losses)
    each = f" nats per pair (web {web}, code.py {code})  reward margin "
    assert text.startswith(f"evaluation DPO loss {found['evaluation_loss']:.4f}{each}")
    assert f"reward accuracy {found['evaluation_reward_accuracy']:.4f} of pairs (web " in text
    told = "there are evaluation_loss, evaluation_loss/web, .*evaluation_reward_accuracy"
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(experiment, **ranked_by("evaluation_bits_per_byte")).check()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"validation": {}}, "validation names no source"),
        (
            {"validation": Synthetic(512, 2, 16, teacher_k=2)},
            "validation has a stored teacher, and NextToken reads none",
        ),
        ({"validation": {"a b": Text(None)}}, "validation has the name 'a b'"),
        ({"evaluation": EvaluationSettings()}, r"validation\['web'\] never ends"),
        (weighted(web=1.0), "are of 'web', but validation has 'web', 'code.py'"),
        (weighted(**{"web": 0.0, "code.py": 0.0}), "must be positive numbers"),
        ({"validation": Text(None), **weighted(web=1.0)}, "has no names"),
        (ranked_by("evaluation_los"), r"checkpoints.best_by='evaluation_los' is no metric of this"),
        (ranked_by("evaluation_loss/books"), "there are evaluation_loss, evaluation_loss/web"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_trained(experiment, changes, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(experiment, **changes).check()


def test_the_training_loss_weighs_what_the_objective_counts():
    line = {"step_seconds": 1.0, "tokens": 30}
    lines = [
        {**line, "step": 1, "loss": 1.0, "valid_tokens": 20, "pairs": 1},
        {**line, "step": 2, "loss": 4.0, "valid_tokens": 10, "pairs": 2},
    ]
    units = ("tokens", DPO().units)
    found = [totals_of(lines, each, [range(2)])["training_loss"] for each in units]
    assert found == [2.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("highest", [False, True])
def test_the_best_checkpoint_by_one_set(tmp_path, highest):
    cfg = config()
    cfg.steps, cfg.evaluation.every, cfg.checkpoints.every = 6, 1, 1
    cfg.checkpoints.keep, cfg.checkpoints.keep_best = 1, 1
    cfg.checkpoints.best_by, cfg.checkpoints.best_is_highest = "evaluation_loss/code.py", highest
    cfg.validation = {
        name: fdl.Config(Synthetic, vocab_size=512, batch_size=2, sequence_length=16, seed=seed)
        for name, seed in (("web", 1), ("code.py", 2))
    }
    result = fit(cfg, tmp_path)
    ranks = {line["step"]: line["evaluation_loss/code.py"] for line in result.metrics}
    # When the last save began, its own rank was not known.
    best = (max if highest else min)(range(1, 6), key=ranks.__getitem__)
    kept = {int(folder.name) for folder in (tmp_path / "checkpoints").iterdir()}
    assert kept == {best, 6}
    metric = read_manifest(tmp_path / "checkpoints" / "6").metric
    assert metric == (-ranks[6] if highest else ranks[6])

    assert (tmp_path / "run.log").read_text().count("code.py ") >= 6
    summary = finished_summary(tmp_path, 6)
    assert summary == result.summary
    names = ("validation_loss", "validation_loss/web", "validation_loss/code.py")
    assert tuple(summary.validation) == names
    assert "validation loss, code.py" in summary.text(tmp_path, "")
    content = json.loads((tmp_path / "result.json").read_text())["validation"]
    for name in names:
        value = result.metrics[-1][name.replace("validation", "evaluation")]
        assert content[name] == {"value": value, "unit": "nats per token"}
