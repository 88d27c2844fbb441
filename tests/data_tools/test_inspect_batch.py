"""Batches as the inspect command shows them, against batches taken by hand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import numpy as np
import pytest
from byte_texts import BOS, EOS, write_texts

from data_tools.hf_stream import HFStream
from data_tools.inspect import (
    SavedRun,
    batch_rows,
    decoder,
    describe_split,
    is_masked,
    row_origins,
)
from data_tools.inspect.report import description_text, row_text
from lmlib.data import FlatTokens, ShardWriter, Synthetic, TokenizerIdentity
from lmlib.data.mixture import Mixture, Stage
from lmlib.experiment import Experiment
from runner.config import configs

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported: it looks hosts up otherwise

REPOSITORY = Path(__file__).parents[2]


def test_rows_of_a_batch(tmp_path: Path) -> None:
    write_texts(tmp_path)
    source = FlatTokens(str(tmp_path), "train", 1, 12, seed=None)
    (row,) = batch_rows(source.batch(0))
    assert [(piece.start, piece.stop, piece.segment_id) for piece in row.pieces] == [
        (0, 7, 1),
        (7, 9, 2),
        (9, 12, 3),
    ]
    assert row.pieces[0].tokens == (BOS, *b"hello", EOS)
    assert row.pieces[0].targets == (*b"hello", EOS, BOS)
    assert row.pieces[0].loss_mask == (True,) * 6 + (False,)
    assert row.pieces[2].positions == (0, 1, 2)
    assert (row.tokens, row.targets_in_loss) == (12, 10)
    decode = decoder(tmp_path, source.tokenizer)
    assert row_text(row, decode, "sequence 0 of 9").splitlines()[:7] == [
        "row 0 (sequence 0 of 9): 12 tokens, 10 targets in the loss",
        "  places 0 to 6: segment 1, positions 0 to 6",
        "    tokens    256   104   101   108   108   111   257",
        "    targets   104   101   108   108   111   257 (256)",
        "    │ hello",
        "  ── another document; its first token is no target in the loss ──",
        "  places 7 to 8: segment 2, positions 0 to 1",
    ]


def test_rows_whose_documents_share_a_segment_are_cut_as_well(tmp_path: Path) -> None:
    write_texts(tmp_path)
    source = FlatTokens(
        str(tmp_path), "train", 1, 12, seed=None, attend_across_documents=True, epochs=1
    )
    (row,) = batch_rows(source.batch(0))
    assert [piece.start for piece in row.pieces] == [0, 7, 9]
    assert {piece.segment_id for piece in row.pieces} == {1}
    (padding,) = batch_rows(source.batch(1000))[0].pieces
    assert (padding.start, padding.stop, padding.segment_id) == (0, 12, 0)
    text = row_text(batch_rows(source.batch(1000))[0], None)
    assert text == "row 0: 0 tokens, 0 targets in the loss\n  places 0 to 11: padding"


def test_text_of_a_conversation_that_is_no_target_is_marked(tmp_path: Path) -> None:
    writer = ShardWriter(
        tmp_path,
        "train",
        content="conversations",
        vocab_size=258,
        tokenizer=TokenizerIdentity("bytes", None),
    )
    for text, answer in (("Hi? yes.", "yes."), ("Oh no", "no")):
        mask = np.arange(len(text)) >= text.index(answer)
        writer.extend(np.array([*text.encode()]), np.array([len(text)]), 0, loss_mask=mask)
    writer.finish()
    source = FlatTokens(str(tmp_path), "train", 1, 12, seed=None)
    assert is_masked(source) and not is_masked(Synthetic(64, 2, 5))
    (row,) = batch_rows(source.batch(0), masked=True)
    decode = decoder(tmp_path, source.tokenizer)
    text = row_text(row, decode)
    assert [line for line in text.splitlines() if line[4:6] in ("┊ ", "│ ")] == [
        "    ┊ Hi? ",
        "    │ yes.",
        "    ┊ Oh ",
        "    │ no",
    ]
    assert text.splitlines()[0] == "row 0: 12 tokens, 6 targets in the loss"
    assert "targets (105)  (63)  (32)   121   101   115    46  (79)" in text
    assert "\033[90m    ┊ Hi? \033[0m\n    │ yes." in row_text(row, decode, colours=True)
    described = description_text(describe_split(tmp_path / "train"))
    assert re.search(r"content +conversations\n +targets +6, 46.2% of the tokens", described)


def save_run(path: Path, workdir: Path, **more) -> Path:
    data = fdl.Config(
        FlatTokens, path=str(path), split="train", batch_size=3, sequence_length=9, seed=4, **more
    )
    validation = fdl.Config(Synthetic, vocab_size=64, batch_size=2, sequence_length=5)
    configs.save(fdl.Config(Experiment, data=data, validation=validation, steps=3), workdir)
    return workdir


def test_the_data_of_a_run(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    run = SavedRun(save_run(tmp_path / "data", tmp_path / "run", reset_positions=False))
    assert run.data_sets() == [(tmp_path / "data", "train")]
    assert run.data_sets("validation") == []
    expected = FlatTokens(
        str(tmp_path / "data"), "train", 3, 9, seed=4, reset_positions=False
    ).batch(2)
    found = run.source().batch(2)
    for field in ("tokens", "targets", "segment_ids", "positions", "loss_mask"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
    assert run.source("validation").sequence_length == 5
    with pytest.raises(ValueError, match="train and validation, not 'test'"):
        run.source("test")


def test_the_data_of_a_run_on_a_mixture(tmp_path: Path) -> None:
    sources = {}
    for name in ("code", "prose"):
        write_texts(tmp_path / name)
        sources[name] = fdl.Config(
            FlatTokens, path=str(tmp_path / name), split="train", batch_size=2, sequence_length=6
        )
    stages = [fdl.Config(Stage, weights={"code": 1.0, "prose": 3.0})]
    mixture = fdl.Config(Mixture, sources=sources, stages=stages)
    configs.save(fdl.Config(Experiment, data=mixture, steps=3), tmp_path)
    run = SavedRun(tmp_path)
    assert run.data_sets() == [(tmp_path / "code", "train"), (tmp_path / "prose", "train")]
    expected = fdl.build(mixture).batch(5)
    np.testing.assert_array_equal(run.source().batch(5).tokens, expected.tokens)

    # The origins of the rows, found again by comparing them with all sequences of each source.
    for origin, tokens_S in zip(row_origins(fdl.build(mixture), 5), expected.tokens, strict=True):
        name, sequence, total = re.fullmatch(r"(\w+), sequence (\d+) of (\d+)", origin).groups()
        stored = FlatTokens(str(tmp_path / name), "train", int(total), 6, seed=None)
        np.testing.assert_array_equal(stored.batch(0).tokens[int(sequence)], tokens_S)


@pytest.mark.slow
def test_the_stream_of_a_run_is_brought_to_the_step(tmp_path: Path) -> None:
    """From the beginning without checkpoints, and with those of two processes."""
    texts = [{"text": f"{number}:" + "x" * (number * 7 % 31)} for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    data = fdl.Config(HFStream, str(tmp_path / "texts.jsonl"), "bytes", 4, 8, shuffle_documents=9)
    configs.save(fdl.Config(Experiment, data=data, validation=data, steps=20), tmp_path)
    run = SavedRun(tmp_path)
    one = fdl.build(data)
    expected = [one.batch(step).tokens for step in range(10)]
    np.testing.assert_array_equal(run.source_at(7).batch(7).tokens, expected[7])

    data.streams = 2
    two, states = fdl.build(data), {}
    found = []
    for step in range(10):
        found.append(two.batch(step).tokens)
        states[step + 1] = [two.state(step + 1)]
    for step in (3, 6):
        progress = tmp_path / f"checkpoints/{step}/progress"
        progress.mkdir(parents=True)
        (progress / "progress.json").write_text(json.dumps({"tokens": 1, "data": states[step]}))
    for step in (2, 3, 5, 6, 9):
        np.testing.assert_array_equal(run.source_at(step).batch(step).tokens, found[step])
        validation = run.source_at(step, "validation").batch(step)  # begins anew each time
        np.testing.assert_array_equal(validation.tokens, expected[step])

    done = command(tmp_path, ".", "--batch=7", "--rows=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 7: 4 rows of 8 tokens, 1 shown\n\nrow 0: 8 tokens, ")
    assert "    │ " in done.stdout


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"train": null}', None])
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "data.json").write_text(content)
        with pytest.raises(ValueError, match=r"data\.json is no data\.json that a run"):
            SavedRun(tmp_path)
    else:
        with pytest.raises(FileNotFoundError):
            SavedRun(tmp_path)


class Anything:
    """What any arguments make; it is no source."""

    def __init__(self, **arguments: object) -> None:
        made.append(arguments)


made: list[dict[str, object]] = []


def test_values_of_every_kind_come_back(tmp_path: Path) -> None:
    """Tuples stay tuples, keys that are no strings stay what they are, and functions are found."""
    values = {"tuple": (1, (2.5, None)), "dict": {3: [True], "module": "x", "name": "y"}}
    more = {"list": ["a", 1], "limit": float("inf"), "function": FlatTokens}
    configs.save(fdl.Config(Experiment, data=fdl.Config(Anything, **values, **more)), tmp_path)
    with pytest.raises(ValueError, match="has no data for 'train'"):
        SavedRun(tmp_path, [__name__]).source()
    assert made == [values | more]


def test_what_json_cannot_say_is_refused(tmp_path: Path) -> None:
    data = fdl.Config(Anything, a={1, 2})
    configs.save(fdl.Config(Experiment, data=data), tmp_path)
    with pytest.raises(ValueError, match=r"makes no sense: .*unreadable.*\{1, 2\}"):
        SavedRun(tmp_path, [__name__]).source()


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "data_tools.inspect", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "utf-8"},
    )


def test_the_command_shows_the_batch_of_a_run(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    save_run(tmp_path / "data", tmp_path / "run")
    done = command(tmp_path, "run", "--batch=1", "--rows=1")
    assert (done.returncode, done.stderr) == (0, "")
    done = command(tmp_path, "run", "--batch=1", "--batch_size=4")
    assert done.stderr == "inspect: --batch_size is for data sets: a run has its own setting\n"
    done = command(tmp_path, "run", "--batch=1", "--rows=1")
    assert done.stdout.startswith("step 1: 3 rows of 9 tokens, 1 shown\n\nrow 0 (sequence ")
