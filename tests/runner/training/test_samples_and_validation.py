"""The texts that a run writes, and its validation sets: which metric ranks checkpoints."""

import dataclasses
import json
import math

import fiddle as fdl
import numpy as np
import pytest
from small_experiment import small
from small_tokenizer import END, write_tokenizer_folder

from data_tools.hf_stream.source import HFStream
from data_tools.prepare_chats.conversations import ConversationField
from data_tools.prepare_chats.prepare import prepare_chats
from data_tools.prepare_chats.template import load_template
from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.files import Files
from data_tools.tokenizer import ByteTokenizer, load_tokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.checkpoint.manifest import read_manifest
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.synthetic import Synthetic
from lmlib.data.text import TextCodec, codec_of_bytes
from lmlib.evaluate.validation import Evaluator
from lmlib.experiment import CheckpointSettings, EvaluationSettings, Experiment
from lmlib.losses.dpo import DPO
from lmlib.losses.next_token import NextToken
from runner import fit
from runner.config import configs
from runner.training.report import finished_summary, totals_of
from runner.training.samples import asked
from runner.training.validation import Validation

TEXTS = ["one two three", "four five", "six"] * 40


class WithoutBeginning(Synthetic):
    """Made-up ids, taken for bytes; no token begins a document."""

    def text_codec(self) -> TextCodec:
        return codec_of_bytes(bos_id=None)


def tiny(prompts, data):
    small = ("model.layers=1", "model.embed=16", "model.mlp=16", "mesh.fsdp=1")
    cfg = configs.load("experiments/llama_84m", ["tiny"], ("steps=1", *small))
    cfg.samples.prompts, cfg.validation = prompts, None
    cfg.data = data
    return cfg


def flat_tokens(folder, tokenizer):
    pretokenize(TEXTS, tokenizer, folder, "train")
    return fdl.Config(FlatTokens, path=str(folder), split="train", batch_size=8, sequence_length=64)


def mixture(source):
    return fdl.Config(Mixture, sources={"all": source}, stages=[fdl.Config(Stage, {"all": 1.0})])


def test_prompts_of_conversations_are_asked_through_their_template(tmp_path):
    tokenizer = str(tmp_path / "tokenizer")
    write_tokenizer_folder(tmp_path / "tokenizer", begins=True)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "The river?", "response": "It runs."}')
    prepare_chats(
        Files([str(tmp_path / "chats.jsonl")], field=ConversationField()),
        load_tokenizer(tokenizer),
        load_template(tokenizer),
        tmp_path / "data",
        "train",
    )
    source = FlatTokens(str(tmp_path / "data"), "train", 1, 64)
    codec = source.text_codec()
    (ids,), stop_ids = asked(source, codec, ["The mill?"])
    assert codec.decode(ids) == "<user> The mill?\n<assistant>"
    assert stop_ids == codec.encode_marked(END) and len(stop_ids) == 1


@pytest.mark.slow
def test_prompts_are_continued_while_training_goes_on(tmp_path):
    cfg = tiny(("one two", "six"), flat_tokens(tmp_path / "data", ByteTokenizer()))
    cfg.steps, cfg.samples.every = 5, 2
    result = fit(cfg, tmp_path / "run")
    pages = sorted((tmp_path / "run" / "samples").iterdir())
    assert [page.name for page in pages] == ["00000002.txt", "00000004.txt", "00000005.txt"]
    for page in pages:
        first, _, second = page.read_text().partition("\n\nsix")
        assert first.startswith("one two") and second
    samples = result.summary.samples
    assert pages[-1].read_text() == "\n\n".join(samples) + "\n"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["samples"] == [*samples]
    files = (tmp_path / "run" / "tensorboard").iterdir()
    assert any(b"samples/text_summary" in file.read_bytes() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WithoutBeginning, "ValueError: prompt 0 is empty; every prompt needs at least one token"),
        (Synthetic, "ConfigError: Synthetic knows no tokenizer"),
    ],
)
def test_a_run_is_finished_without_its_samples(tmp_path, capsys, kind, reason):
    data = fdl.Config(kind, vocab_size=512, batch_size=8, sequence_length=64)
    cfg = tiny(("",), data)
    summary = fit(cfg, tmp_path).summary
    assert f"WARNING: the prompts are not continued: {reason}" in capsys.readouterr().err
    assert summary.samples == ()
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 1
    assert fit(cfg, tmp_path).summary == summary
    assert "has already finished all its 1 steps" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["flat", "mixed", "streamed"])
def test_every_source_with_a_tokenizer_reads_and_writes_text(kind, tmp_path):
    tokenizer = train_byte_level_bpe(TEXTS, 280)
    if kind == "streamed":
        (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
        (tmp_path / "tokenizer.json").write_text(tokenizer.tokenizer_json)
        source = HFStream(str(tmp_path / "texts.jsonl"), str(tmp_path / "tokenizer.json"), 8, 64)
    else:
        cfg = flat_tokens(tmp_path / "data", tokenizer)
        source = fdl.build(cfg if kind == "flat" else mixture(cfg))
    codec = source.text_codec()
    ids = codec.encode("five six")
    assert ids == [tokenizer.bos_id, *tokenizer.encode_batch(["five six"])[0].tolist()]
    assert codec.decode(ids) == "five six"


class Text(Synthetic):
    """Ids with a known number of bytes each."""

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
    """Returns the state, and the losses of each set evaluated separately."""
    state = experiment.initial_state()
    evaluate = Evaluator(experiment.mesh, experiment.compute)
    sets = experiment.validation_sets.items()
    return state, {name: evaluate(state.model, source, 2) for name, source in sets}


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
        (
            ranked_by("evaluation_los"),
            r"checkpoints.best_by='evaluation_los' is not a metric of this",
        ),
        (ranked_by("evaluation_loss/books"), "there are evaluation_loss, evaluation_loss/web"),
    ],
)
def test_invalid_settings_are_refused_before_training(experiment, changes, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(experiment, **changes).check()


def test_the_training_loss_weighs_what_the_objective_counts():
    line = {"step_seconds": 1.0, "tokens": 30}
    lines = [
        {**line, "step": 1, "loss": 1.0, "valid_tokens": 20, "pairs": 1, "reward_accuracy": 1.0},
        {**line, "step": 2, "loss": 4.0, "valid_tokens": 10, "pairs": 2, "reward_accuracy": 0.25},
    ]
    found = [totals_of(lines, each, [range(2)])["training"] for each in (NextToken(), DPO())]
    assert found == [{"loss": 2.0}, {"loss": 3.0, "reward_accuracy": 0.5}]


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
    # The last save began before its own rank was known.
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
