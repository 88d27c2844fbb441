"""Runs on a streamed data set: resumed, and with more than one process."""

import json
import os
import signal
from pathlib import Path

import fiddle as fdl
import pytest
from forked_processes import run_forked
from small_experiment import small
from states import assert_same_bits, cut_short, without_times
from two_processes import run_two

from data_tools.hf_stream.source import HFStream
from lmlib.data.synthetic import Synthetic
from lmlib.metrics.log import read_metrics
from runner import fit
from runner.errors import ConfigError

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported: it looks hosts up otherwise


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of 60 different documents of 10 to 66 bytes: six steps see each more than twice."""
    folder = tmp_path_factory.mktemp("texts")
    lines = (json.dumps({"text": f"{n:03}" + "abcdefg" * (1 + n // 7)}) for n in range(60))
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return str(folder)


def streamed(texts, **settings):
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


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    return fit(streamed(texts), workdir), workdir


@pytest.mark.slow
def test_resumed_from_a_checkpoint_the_run_is_bitwise_the_undisturbed_one(
    undisturbed, texts, tmp_path
):
    expected, workdir = undisturbed
    found = fit(streamed(texts, prefetch_batches=9), cut_short(workdir, 2, tmp_path / "cut"))
    assert without_times(found.metrics) == without_times(expected.metrics)
    assert_same_bits(found.state, expected.state)


@pytest.mark.slow
def test_other_data_than_the_checkpoint_was_made_with_is_refused(undisturbed, texts, tmp_path):
    _, workdir = undisturbed
    cut = cut_short(workdir, 4, tmp_path / "cut")
    shuffled = streamed(texts)
    shuffled.data.shuffle_documents = 7
    with pytest.raises(ConfigError, match="shuffle_documents = 25, not 7"):
        fit(shuffled, cut)

    made_up = fdl.Config(Synthetic, vocab_size=512, batch_size=2, sequence_length=8)
    fit(streamed(texts, data=made_up, validation=None, steps=1), tmp_path / "synthetic")
    with pytest.raises(
        ConfigError, match="checkpoint 1 was trained on other data: it came from another"
    ):
        fit(streamed(texts), tmp_path / "synthetic")


PROCESS = """
import json, sys
folder, address, process = sys.argv[1:]
import jax
jax.distributed.initialize(address, 2, int(process))
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
print(json.dumps({"rows": found, "states": states}))
"""


@pytest.mark.slow
def test_two_processes_share_the_data_and_know_both_states(texts):
    one, other = map(json.loads, run_two(PROCESS, texts))
    assert one["states"] == other["states"]
    assert [set(state["positions"]) for state in one["states"][0]] == [{"0"}, {"1"}]

    seen = []
    for result in (one, other):
        tokens = [t for batch in result["rows"] for row in batch for t in row if 0 <= t <= 256]
        # Between begin tokens (256) are the bytes of a document.
        _, *documents = " ".join(map(str, tokens)).split("256")
        seen += [bytes(map(int, document.split())).decode() for document in documents]
    lines = (Path(texts) / "texts.jsonl").read_text().splitlines()
    assert sorted(seen) == sorted(json.loads(line)["text"] for line in lines)


# Asked for the batch of step 8 for the first time, the process kills itself: step 4 is saved.
EXPERIMENT = """
import os, pathlib, signal
import fiddle as fdl
from data_tools.hf_stream.source import HFStream
import small_experiment

class KilledOnce(HFStream):
    def batch(self, step, rows=slice(None)):
        mark = pathlib.Path("{mark}")
        if step == 8 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, rows)

def config():
    cfg = small_experiment.small("mesh.fsdp=-1")
    cfg.data = fdl.Config(KilledOnce, "{texts}", "bytes", 16, 64, shuffle_documents=25)
    cfg.steps, cfg.checkpoints.every = 10, 2
    return cfg
"""


@pytest.mark.slow
def test_a_run_killed_between_checkpoints_goes_on_where_it_was(texts, tmp_path):
    """Through the command line, with SIGKILL."""
    experiment = tmp_path / "streamed.py"
    experiment.write_text(EXPERIMENT.format(texts=texts, mark=tmp_path / "killed_once"))

    def run(workdir):
        return run_forked("-m", "runner", f"--fdl_config={experiment}", f"--workdir={workdir}")

    killed = run(tmp_path / "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = []
    for name in ("killed", "undisturbed"):
        done = run(tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert ("resuming after step" in done.stderr) == (name == "killed")
        found.append(without_times(read_metrics(tmp_path / name)))
    assert found[0] == found[1]
    assert [line["step"] for line in found[0]] == list(range(1, 11))
