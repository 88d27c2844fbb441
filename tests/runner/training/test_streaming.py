"""Runs on a streamed data set: resumed, and with more than one process."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest
from forked_processes import Ended, run_forked
from small_experiment import small
from states import assert_same_bits, without_times
from two_processes import ends_of_two

from data_tools.hf_stream.source import HFStream
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from runner import fit
from runner.errors import ConfigError

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported: it looks hosts up otherwise


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of 60 different documents of 10 to 66 bytes: six steps see each more than twice."""
    folder = tmp_path_factory.mktemp("texts")
    lines = (json.dumps({"text": f"{n:03}" + "abcdefg" * (1 + n // 7)}) for n in range(60))
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return str(folder)


def streamed(texts: str, **settings: Any) -> fdl.Config[Experiment]:
    """A small run on two devices, six steps, a checkpoint after every second."""
    cfg = small()
    cfg.data = fdl.Config(
        HFStream, texts, tokenizer="bytes", batch_size=16, sequence_length=64, shuffle_documents=25
    )
    cfg.validation = fdl.Config(
        HFStream, texts, tokenizer="bytes", batch_size=8, sequence_length=64, repeat=False
    )
    cfg.steps, cfg.checkpoints.every, cfg.evaluation.every = 6, 2, 3
    cfg.mesh.fsdp = 2
    for setting, value in settings.items():
        setattr(cfg, setting, value)
    return cfg


def stop_after(step: int, workdir: Path) -> None:
    """Leaves of a finished run what one killed after `step` would have left."""
    for checkpoint in (workdir / "checkpoints").iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    (workdir / "result.json").unlink()


@pytest.fixture(scope="module")
def undisturbed(texts: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    workdir = tmp_path_factory.mktemp("undisturbed")
    return fit(streamed(texts), workdir), workdir


@pytest.mark.slow
def test_resumed_from_a_checkpoint_the_run_is_bitwise_the_undisturbed_one(
    undisturbed: tuple[Any, Path], texts: str, tmp_path: Path
) -> None:
    expected, workdir = undisturbed
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    stop_after(2, tmp_path)
    found = fit(streamed(texts, prefetch_batches=9), tmp_path)
    assert without_times(found.metrics) == without_times(expected.metrics)
    assert_same_bits(found.state, expected.state)


@pytest.mark.slow
def test_other_data_than_the_checkpoint_was_made_with_is_refused(
    undisturbed: tuple[Any, Path], texts: str, tmp_path: Path
) -> None:
    _, workdir = undisturbed
    shutil.copytree(workdir, tmp_path / "run")
    stop_after(4, tmp_path / "run")
    shuffled = streamed(texts)
    shuffled.data.shuffle_documents = 7
    with pytest.raises(ConfigError, match="shuffle_documents = 25, not 7"):
        fit(shuffled, tmp_path / "run")

    made_up = fdl.Config(Synthetic, vocab_size=512, batch_size=2, sequence_length=8)
    fit(streamed(texts, data=made_up, validation=None, steps=1), tmp_path / "synthetic")
    with pytest.raises(
        ConfigError, match="checkpoint 1 was trained on other data: it came from another"
    ):
        fit(streamed(texts), tmp_path / "synthetic")


PROCESS = """
import json, sys
folder, out, port, process = sys.argv[1:]
import jax
jax.distributed.initialize(f"localhost:{port}", 2, int(process))
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from data_tools.hf_stream.source import HFStream
from lmlib.data.prefetch import Prefetch
from lmlib.data.resumable import gather_states

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
sharding = NamedSharding(mesh, PartitionSpec("data"))

def source():
    return HFStream(folder, "bytes", batch_size=8, sequence_length=16, repeat=False)

def rows(batch):
    parts = sorted(batch.tokens.addressable_shards, key=lambda part: part.index[0].start)
    masks = sorted(batch.segment_ids.addressable_shards, key=lambda part: part.index[0].start)
    values = np.concatenate([part.data for part in parts])
    return np.where(np.concatenate([mask.data for mask in masks]) > 0, values, -1).tolist()

found, states = [], []
with Prefetch(source(), sharding, 0, 30) as batches:
    for step, batch in batches:
        found.append(rows(batch))
        states.append(gather_states(batches.state))
for step in (1, 10, 27):
    resumed = source()
    resumed.restore(step, states[step - 1])
    with Prefetch(resumed, sharding, step, step + 2) as batches:
        for index, batch in batches:
            assert rows(batch) == found[index], (step, index)
json.dump({"rows": found, "states": states}, open(f"{out}/{process}.json", "w"))
"""


@pytest.mark.slow
def test_two_processes_share_the_data_and_know_both_states(texts: str, tmp_path: Path) -> None:
    for ended in ends_of_two(PROCESS, texts, tmp_path):
        assert ended.returncode == 0, ended.stderr
    outputs = [tmp_path / f"{process}.json" for process in range(2)]
    one, other = (json.loads(output.read_text()) for output in outputs)
    assert one["states"] == other["states"]
    assert [set(state["positions"]) for state in one["states"][0]] == [{"0"}, {"1"}]

    seen: list[str] = []
    for result in (one, other):
        tokens = [t for batch in result["rows"] for row in batch for t in row if t >= 0]
        documents = bytes_between(tokens, begin=256)
        seen += [document.decode() for document in documents]
    lines = (Path(texts) / "texts.jsonl").read_text().splitlines()
    assert sorted(seen) == sorted(json.loads(line)["text"] for line in lines)


def bytes_between(tokens: list[int], begin: int) -> list[bytes]:
    """The bytes of each document; the last end of text is a target only."""
    starts = [place for place, token in enumerate(tokens) if token == begin]
    return [
        bytes(token for token in tokens[start:end] if token < begin)
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
    ]


# Asked for the batch of step 8 for the first time, the process kills itself: step 4 is saved.
EXPERIMENT = """
import os, pathlib, signal
import fiddle as fdl
from data_tools.hf_stream.source import HFStream
import small_experiment
from lmlib.experiment import Experiment

class KilledOnce(HFStream):
    def batch(self, step, rows=slice(None)):
        mark = pathlib.Path("{mark}")
        if step == 8 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, rows)

def config() -> fdl.Config[Experiment]:
    "A stream."
    cfg = small_experiment.small("mesh.fsdp=-1")
    cfg.data = fdl.Config(KilledOnce, "{texts}", "bytes", 16, 64, shuffle_documents=25)
    cfg.steps, cfg.checkpoints.every = 10, 2
    return cfg
"""


@pytest.mark.slow
def test_a_run_killed_between_checkpoints_goes_on_where_it_was(texts: str, tmp_path: Path) -> None:
    """Through the command line, with SIGKILL."""
    experiment = tmp_path / "streamed.py"
    experiment.write_text(EXPERIMENT.format(texts=texts, mark=tmp_path / "killed_once"))

    def run(workdir: Path) -> Ended:
        return run_forked("-m", "runner", f"--fdl_config={experiment}", f"--workdir={workdir}")

    killed = run(tmp_path / "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = []
    for name in ("killed", "undisturbed"):
        done = run(tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert ("resuming after step" in done.stderr) == (name == "killed")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append(without_times(list(map(json.loads, lines))))
    assert found[0] == found[1]
    assert [line["step"] for line in found[0]] == list(range(1, 11))
