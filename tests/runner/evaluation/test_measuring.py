"""`runner.evaluate` on a run of bytes: its data, texts in files, the suite, and mistakes."""

import copy
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_texts import TEXTS, write_ids
from forked_processes import run_forked, succeeded
from run_on_bytes import write_run_on_bytes
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.evaluate.suite.suite import Suite
from lmlib.evaluate.validation import Evaluator
from lmlib.parallel.mesh import make_mesh
from runner.config import configs
from runner.errors import ConfigError
from runner.evaluation.data_sets import data_set, validation_of
from runner.evaluation.measuring import (
    Settings,
    json_text,
    measure,
    measure_suite,
    suite_json,
    suite_table,
    tables,
)
from runner.evaluation.tasks import Tasks, evaluate_tasks
from runner.inference.loaded import load
from runner.training.validation import Validation

pytestmark = pytest.mark.several_devices

GOLDEN = Path(__file__).parents[2] / "hf" / "golden"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_run_on_bytes(folder, steps=(3, 5))
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder / "run"), mesh=make_mesh(fsdp=2))


def measured(loaded, *data_sets, **settings):
    settings = Settings(**{"batch_size": 2, **settings})
    return list(measure(loaded, data_sets, settings, lambda line: None))


@pytest.mark.slow
def test_texts_in_files_are_the_same_as_their_flat_tokens(folder, loaded):
    names = ("data", "texts.jsonl", "texts")
    given = [data_set(str(folder / name), "train", "text") for name in names]
    found = measured(loaded, *given, *validation_of(loaded))
    evaluations = [each.evaluation for each in found]
    assert all(each == evaluations[0] for each in evaluations[1:])  # to the bit
    first = evaluations[0]
    assert (first.documents, first.targets) == (5, sum(len(t.encode()) + 1 for t in TEXTS))
    assert first.bytes == sum(len(text.encode()) for text in TEXTS)
    assert first.characters == sum(map(len, TEXTS))
    assert [each.sequence_length for each in found] == [24] * 4  # the run's own
    assert found[-1].data == "validation"

    content = json.loads(json_text(found, Settings()))
    shown = tables(found)
    assert [each["data"] for each in content["results"]] == [each.data for each in found]
    for name in ("loss", "perplexity", "bits_per_byte", "bits_per_character"):
        number = content["results"][0][name]
        assert number["value"] == getattr(first, name).value
        assert f"{number['value']:.4f}" in shown and f"{number['standard_error']:.4f}" in shown
    assert content["results"][0]["loss"]["unit"] == "nats per token"
    assert [each["first"] for each in content["results"][0]["loss_by_position"]] == [0, 2, 4, 8, 16]


def write_conversations(folder, content):
    writer = ShardWriter(folder, "train", content=content, vocab_size=256)
    mask = np.isin(np.arange(26), (4, 5, 9, 10, 15, 16, 17, 25))
    writer.extend(np.arange(26) + 65, np.array([8, 18]), 0, loss_mask=mask)
    writer.finish()


@pytest.mark.slow
def test_only_answers_of_conversations_count(tmp_path, loaded):
    write_conversations(tmp_path, "conversations")
    (found,) = measured(loaded, data_set(str(tmp_path), "train", "text"))
    assert (found.evaluation.targets, found.evaluation.documents) == (8, 2)
    assert found.data.endswith("train, answers") and found.evaluation.bits_per_byte is None
    source = FlatTokens(str(tmp_path), "train", 2, 24, seed=None)
    in_training = Evaluator(loaded.mesh, loaded.compute)(loaded.model, source, source.batches or 1)
    assert in_training.count == 8
    assert found.evaluation.loss.value == pytest.approx(in_training.loss, rel=1e-5)


def test_pairs_are_refused(tmp_path):
    write_conversations(tmp_path, "pairs")
    with pytest.raises(ConfigError, match="holds pairs of answers, which have no loss"):
        data_set(str(tmp_path), "train", "text")


def test_without_data_a_run_is_measured_on_each_set_that_it_validated_on(loaded):
    cfg = copy.deepcopy(loaded.cfg)
    cfg.validation = {"web": cfg.validation, "code": copy.deepcopy(cfg.validation)}
    found = validation_of(dataclasses.replace(loaded, cfg=cfg))
    assert [each.name for each in found] == ["web", "code"]
    cfg.validation = None
    assert validation_of(dataclasses.replace(loaded, cfg=cfg)) == []


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("other ids", "was trained with"),
        ("larger ids", "token ids up to 299, but the vocabulary of .* ends at 257"),
        ("empty.txt", "holds no text"),
        ("latin.txt", "is not UTF-8 text"),
        ("column.jsonl", "no column 'text'"),
        ("nowhere", "no such file or folder"),
        ("data", "no split 'validation'; it has train"),
        ("no tokenizer", "no tokenizer of .* is known"),
        ("batch", "--batch_size=3 cannot be split over these devices: give a multiple of 2"),
    ],
)
def test_mistakes_are_reported_before_computing(folder, loaded, tmp_path, what, told):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "column.jsonl").write_text('{"content": "a"}')
    write_ids(tmp_path / "other ids", [[1, 2]], tokenizer=TokenizerIdentity("other", None))
    write_ids(tmp_path / "larger ids", [[1, 299]])
    path = (folder if what == "data" else tmp_path) / what
    if what == "no tokenizer":
        loaded = dataclasses.replace(loaded, codec=None)
    if what in ("no tokenizer", "batch"):
        path = folder / "texts"
    settings = {"batch_size": 3} if what == "batch" else {}
    split = "validation" if what == "data" else "train"
    with pytest.raises((ConfigError, FileNotFoundError), match=told):
        measured(loaded, data_set(str(path), split, "text"), **settings)


@pytest.mark.slow
def test_all_checkpoints_are_a_curve(folder, tmp_path):
    before = sorted((folder / "run").rglob("*"))
    flags = ("--all_checkpoints", f"--data={folder}/texts.jsonl", f"--json={tmp_path}/out.json")
    ended = succeeded("-m", "runner.evaluate", f"--from={folder}/run", *flags)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [each["step"] for each in results] == [3, 5]
    assert results[0]["loss"] == results[1]["loss"]
    title, _, heads, *rows = ended.stdout.splitlines()
    assert title == f"{folder}/run, sequences of 24 tokens" and heads.startswith("step  data")
    assert [row[0] for row in rows if row.startswith(("3 ", "5 "))] == ["3", "5"]
    assert sorted((folder / "run").rglob("*")) == before  # it only reads


@pytest.mark.slow
def test_a_hugging_face_folder_is_evaluated(folder, tmp_path):
    shutil.copytree(GOLDEN / "gpt2", tmp_path / "gpt2")
    command = ("-m", "runner.evaluate", f"--from={tmp_path}/gpt2", f"--data={folder}/texts")
    refused = run_forked(*command)
    assert refused.returncode == 2
    assert "no tokenizer of" in refused.stderr and "give --tokenizer" in refused.stderr
    vocabulary = {chr(97 + n): n for n in range(26)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = Split(Regex(""), "isolated")
    tokenizer.save(str(tmp_path / "gpt2" / "tokenizer.json"))
    assert "bits per" in succeeded(*command).stdout  # the table may wrap its titles


@pytest.mark.slow
def test_the_suite_scores_a_saved_run_like_its_evaluations(folder, tmp_path):
    loaded = load(str(folder / "run"), mesh=make_mesh())
    assert loaded.cfg is not None
    cfg = copy.deepcopy(loaded.cfg)
    cfg.evaluation.suite = fdl.Config(Suite, longest=16)
    cfg.mesh = fdl.Config(make_mesh)
    configs.save(cfg, tmp_path)
    experiment = fdl.build(configs.load(str(tmp_path / "config.json")))
    experiment.check()
    state = experiment.initial_state(jax.tree.map(jnp.copy, loaded.model))
    written = Validation(experiment).metrics(state)
    assert set(written) == set(experiment.evaluation_metrics)
    name, found = measure_suite(loaded, Suite(longest=16))
    assert found == {name: value for name, value in written.items() if "suite/" in name}
    assert {"suite/copying_loss/8", "suite/induction_loss/4"} <= set(found)
    assert "suite/bits_per_byte/code" in found
    lines = suite_table([(name, found)]).splitlines()
    assert len(lines) == 1 + len(found) and lines[1].startswith("bits_per_byte/prose")
    assert json.loads(suite_json([(name, found)])) == [{"model": name, "results": found}]
    with pytest.raises(ValueError, match=r"evaluation\.suite is measured where validation is"):
        dataclasses.replace(experiment, validation=None).check()


def test_tasks_need_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    loaded = load(str(folder / "run"), mesh=make_mesh())
    with pytest.raises(ConfigError, match=r"--tasks needs lm-eval: pip install 'lmlib\[eval\]'"):
        evaluate_tasks(loaded, Tasks(("arc_easy",)))
