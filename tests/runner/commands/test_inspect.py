"""`runner.inspect`: the data of a run as its config has it, against batches taken by hand."""

import json
import re
from pathlib import Path

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest
from byte_texts import write_texts
from forked_processes import run_forked

from data_tools.hf_stream.source import HFStream
from data_tools.inspect.batches import row_origins
from lmlib.checkpoint import Checkpoints
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from runner.config import configs
from runner.inspect import data_sets, source_at


def config_on(path, **more):
    data = fdl.Config(
        FlatTokens, path=str(path), split="train", batch_size=3, sequence_length=9, seed=4, **more
    )
    validation = fdl.Config(Synthetic, vocab_size=64, batch_size=2, sequence_length=5)
    return fdl.Config(Experiment, data=data, validation=validation, steps=3)


def inspect(*arguments):
    return run_forked("-m", "runner.inspect", *map(str, arguments))


def test_the_data_of_a_run(tmp_path):
    write_texts(tmp_path / "data")
    cfg = config_on(tmp_path / "data", reset_positions=False)
    assert data_sets(cfg) == [(tmp_path / "data", "train")]
    assert data_sets(cfg, "validation") == []
    expected = FlatTokens(
        str(tmp_path / "data"), "train", 3, 9, seed=4, reset_positions=False
    ).batch(2)
    found = source_at(tmp_path, cfg, 2).batch(2)
    for field in ("tokens", "targets", "segment_ids", "positions", "loss_mask"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
    assert source_at(tmp_path, cfg, 0, "validation").sequence_length == 5
    with pytest.raises(ValueError, match="train and validation, not 'test'"):
        source_at(tmp_path, cfg, 0, "test")


def test_the_data_of_a_run_on_a_mixture(tmp_path):
    sources = {}
    for name in ("code", "prose"):
        write_texts(tmp_path / name)
        sources[name] = fdl.Config(
            FlatTokens, path=str(tmp_path / name), split="train", batch_size=2, sequence_length=6
        )
    stages = [fdl.Config(Stage, weights={"code": 1.0, "prose": 3.0})]
    mixture = fdl.Config(Mixture, sources=sources, stages=stages)
    cfg = fdl.Config(Experiment, data=mixture, steps=3)
    assert data_sets(cfg) == [(tmp_path / "code", "train"), (tmp_path / "prose", "train")]
    expected = fdl.build(mixture).batch(5)
    np.testing.assert_array_equal(source_at(tmp_path, cfg, 5).batch(5).tokens, expected.tokens)

    # The origins of the rows, found again by comparing them with all sequences of each source.
    for origin, tokens_S in zip(row_origins(fdl.build(mixture), 5), expected.tokens, strict=True):
        name, sequence, total = re.fullmatch(r"(\w+), sequence (\d+) of (\d+)", origin).groups()
        stored = FlatTokens(str(tmp_path / name), "train", int(total), 6, seed=None)
        np.testing.assert_array_equal(stored.batch(0).tokens[int(sequence)], tokens_S)


@pytest.mark.landing
def test_the_stream_of_a_run_is_advanced_to_the_step(tmp_path, monkeypatch):
    """It starts at the beginning, or at checkpoints of two processes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # `datasets` looks hosts up otherwise
    texts = [{"text": f"{number}:" + "x" * (number * 7 % 31)} for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    data = fdl.Config(HFStream, str(tmp_path / "texts.jsonl"), "bytes", 4, 8, shuffle_documents=9)
    cfg = fdl.Config(Experiment, data=data, validation=data, steps=20)
    one = fdl.build(data)
    expected = [one.batch(step).tokens for step in range(10)]
    np.testing.assert_array_equal(source_at(tmp_path, cfg, 7).batch(7).tokens, expected[7])

    two = fdl.build(fdl.copy_with(data, streams=2))
    found = []
    with Checkpoints(tmp_path / "checkpoints", keep=9) as checkpoints:
        for step in range(10):
            found.append(two.batch(step).tokens)
            if step + 1 in (3, 6):
                state = {"x": jnp.zeros(1)}
                checkpoints.save(step + 1, state, {"data": [two.state(step + 1)]})
    cfg.data = fdl.copy_with(data, streams=2)
    for step in (2, 3, 5, 6, 9):
        np.testing.assert_array_equal(
            source_at(tmp_path, cfg, step).batch(step).tokens, found[step]
        )
        validation = source_at(tmp_path, cfg, step, "validation")  # begins anew each time
        np.testing.assert_array_equal(validation.batch(step).tokens, expected[step])


def test_the_command_shows_the_batch_of_a_run_and_what_it_reads(tmp_path):
    write_texts(tmp_path / "data")
    configs.save(config_on(tmp_path / "data"), tmp_path / "run")
    ended = inspect(tmp_path / "run", "--batch=1", "--rows=1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("step 1: 3 rows of 9 tokens, 1 shown\n\nrow 0 (sequence ")
    ended = inspect(tmp_path / "run", "--verify")
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path}/data/train: all data is whole\n")
    (chunk,) = Path(tmp_path, "data/train").glob("*/tokens/c/0")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert inspect(tmp_path / "run", "--verify").returncode == 1
