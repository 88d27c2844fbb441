"""Whole runs: their files and output, how they resume, and how they refuse."""

import json
import os
import re
import shutil
import signal

import fiddle as fdl
import numpy as np
import pytest
from folder_contents import files_of
from forked_processes import succeeded
from small_runs import SmallRun
from states import assert_same_bits, cut_short, without_times

from lmlib.metrics.log import read_metrics
from lmlib.runs.goodput import read_starts
from lmlib.terminal.table import WIDTH
from runner import Options, fit
from runner.config import configs
from runner.errors import ConfigError
from runner.training.report import Summary

SMALL = ("model.layers=1", "model.embed=16", "model.mlp=16", "mesh.fsdp=1", "validation=None")
TINY = ("--fdl_config=experiments/llama_84m", "--fiddler=tiny")
MESH = ("mesh.fsdp=4", "mesh.tensor=2", "compute.dtype=float32")


def tiny(*overrides):
    return configs.load("experiments/llama_84m", ["tiny"], overrides)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Twenty steps on a mesh of 4 × 2, with the workdir they left."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    return fit(tiny(*MESH), workdir), workdir


@pytest.mark.several_devices
def test_a_run_describes_itself(undisturbed):
    result, workdir = undisturbed
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    always = {
        *("step", "loss", "grad_norm", "parameter_norm", "update_norm", "learning_rate"),
        *("valid_tokens", "tokens", "tokens_per_second", "step_seconds", "data_wait_seconds"),
        *("step_flops", "goodput", "skipped_updates", "skipped_in_a_row", "empty_batches"),
    }
    system = {"process_memory_bytes", "cpu_cores"}
    assert lines[0].keys() >= system
    for line in lines:
        evaluated = {"evaluation_loss"} if line["step"] in (10, 20) else set()
        assert set(line) - system == always | evaluated
        assert line["tokens_per_second"] == pytest.approx(8 * 64 / line["step_seconds"])
    assert [line["tokens"] for line in lines] == np.cumsum(
        [line["valid_tokens"] for line in lines]
    ).tolist()
    assert lines == result.metrics
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert result.summary.validation_loss < lines[0]["loss"]
    data = fdl.build(tiny().data)
    counted = [int(data.batch(step).loss_mask.sum()) for step in range(20)]
    assert [line["valid_tokens"] for line in lines] == counted
    assert sorted(path.name for path in workdir.iterdir()) == [
        *("checkpoints", "config.json", "config.txt", "goodput.json", "metrics.jsonl"),
        *("report.html", "result.json", "run.log", "settings.json", "starts", "tensorboard"),
        "validation.json",
    ]
    assert "optimizer.peak_lr = 0.003" in (workdir / "config.txt").read_text()
    assert list((workdir / "tensorboard").glob("events.*"))
    log = (workdir / "run.log").read_text()
    for line in (lines[9], lines[19]):
        assert f"step {line['step']}/20  evaluation loss {line['evaluation_loss']:.4f}" in log
    assert " s initialisation, " in log and "restore" not in log


@pytest.mark.several_devices
def test_a_finished_run_says_so_and_changes_nothing(undisturbed, capsys):
    result, workdir = undisturbed
    before = files_of(workdir)
    again = fit(tiny(*MESH, "optimizer.peak_lr=0.5"), workdir)
    told = capsys.readouterr().err
    assert "+ optimizer.peak_lr = 0.5" in told
    assert "has already finished all its 20 steps" in told
    assert files_of(workdir) == before
    assert again.summary == result.summary
    assert_same_bits(again.state, result.state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        (("mesh.expert=2", "mesh.tensor=1"), {"fsdp": 4, "expert": 2}),
        (
            ("mesh.context=2", "mesh.tensor=2", "compute.context_method=ring"),
            {"fsdp": 2, "context": 2, "tensor": 2},
        ),
    ],
)
def test_resumed_on_another_mesh_the_curve_is_the_same(undisturbed, mesh, sizes, tmp_path):
    expected, whole = undisturbed
    found = fit(tiny(*mesh, "compute.dtype=float32"), cut_short(whole, 10, tmp_path / "parted"))
    there = found.state.model.stack.patterns[0][0].mlp.up.sharding.mesh.shape
    assert {axis: size for axis, size in there.items() if size > 1} == sizes
    assert without_times(found.metrics)[:10] == without_times(expected.metrics)[:10]
    assert [line["step"] for line in found.metrics] == list(range(1, 21))
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert [line["loss"] for line in found.metrics] != [line["loss"] for line in expected.metrics]


@pytest.mark.slow
def test_killed_and_resumed_the_run_is_bitwise_the_undisturbed_one(tmp_path):
    workdir, whole = tmp_path / "run", tmp_path / "whole"

    def start(workdir):
        # All the simulated devices of this process.
        flags = {"environment": {"XLA_FLAGS": os.environ["XLA_FLAGS"]}, "experiment": TINY}
        return SmallRun(workdir, *MESH, "checkpoints.every=4", **flags)

    # The command adds flags of XLA that this process lacks, so another command is the reference.
    undisturbed = start(whole)
    run = start(workdir)
    run.reach(lambda: len(read_metrics(workdir)) >= 9, "nine steps")
    run.kill()
    assert run.exit_code() == -signal.SIGKILL
    resumed_from = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    assert resumed_from >= 4
    made = read_metrics(workdir)[-1]["step"]
    finished = start(workdir)
    assert finished.exit_code() == 0, finished.output()
    if resumed_from < 20:
        assert re.search(r"resuming after step \d+ of 20", finished.output())
    starts, _ = read_starts(workdir)
    assert len(starts) == 2 and "in 2 starts" in finished.output()
    assert (starts[1].seconds["repeated steps"] > 0) == (made > resumed_from)
    assert undisturbed.exit_code() == 0, undisturbed.output()
    assert without_times(read_metrics(workdir)) == without_times(read_metrics(whole))
    cfg = tiny(*MESH, "checkpoints.every=4")
    assert_same_bits(*(fit(cfg, each).state for each in (workdir, whole)))


@pytest.mark.several_devices
def test_a_checkpoint_of_another_model_is_refused(undisturbed):
    _, workdir = undisturbed
    before = files_of(workdir)
    other_model = tiny(*MESH, "model.embed=128", "steps=30")
    with pytest.raises(ConfigError, match=r"model.embed changed since the run"):
        fit(other_model, workdir)
    with pytest.raises(ConfigError, match=r"embedding as float32\[512, 64\]"):
        fit(other_model, workdir, Options(allowed_changes=["model"]))
    assert files_of(workdir) == before


@pytest.mark.slow
def test_the_command_line_profiles_and_dumps(tmp_path):
    done = succeeded(
        *("-m", "runner", *TINY, f"--workdir={tmp_path}", "--fdl.steps=4", "--profile=2:3"),
        "--dump_hlo",
    )
    assert list((tmp_path / "profile").rglob("perfetto_trace.json.gz"))
    assert re.search(
        r"^a step of [\d.,]+ ms on each device, mean of 2 on ", done.stderr, re.MULTILINE
    )
    kernels = (tmp_path / "profile" / "kernels.txt").read_text()
    for scope in ("attention", "mlp", "loss", "optimizer"):
        assert re.search(rf"^{scope} .*%$", kernels, re.MULTILINE)
        assert re.search(rf"^{scope} .*%$", done.stderr, re.MULTILINE)
    assert "ENTRY" in (tmp_path / "hlo" / "train_step.txt").read_text()
    assert re.search(r"^step 4/4  loss \d", done.stderr, re.MULTILINE)
    told = re.search(r"first step after ([\d.]+) s: (.*)$", done.stderr, re.MULTILINE)
    seconds, phases = zip(*(part.split(" s ", 1) for part in told[2].split(", ")), strict=True)
    assert {"start-up", "initialisation", "compile"} <= set(phases)
    # Each is rounded to a tenth, and what took less than half of one is not told.
    assert sum(map(float, seconds)) == pytest.approx(float(told[1]), abs=0.5)
    for row in ("parameters", "tokens seen", "training loss", "validation loss", "try next"):
        assert re.search(rf"^{row} ", done.stdout, re.MULTILINE)


def test_the_final_table_counts_its_steps_and_leaves_commands_whole(tmp_path):
    command = "python -m runner " + "--fdl.steps=20 " * 20
    summary = Summary(20, 1_000, 500, 1e3, None, 2.5, "loss", "nats per token", ("word " * 50,))
    *table, last = summary.text(tmp_path, [command]).splitlines()
    assert last == f"try next                {command}"
    assert "training loss           2.5000 nats per token, last 20 steps" in table
    assert max(map(len, table)) <= WIDTH


@pytest.mark.slow
def test_a_damaged_checkpoint_is_left_for_the_one_before(undisturbed, tmp_path, capsys):
    result, workdir = undisturbed
    shutil.copytree(workdir, tmp_path / "copy")
    state = tmp_path / "copy" / "checkpoints" / "20" / "state"
    largest = max(
        (file for file in state.rglob("*") if file.is_file()), key=lambda f: f.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)

    cfg = tiny(*MESH)
    with pytest.raises(ConfigError, match=r"checkpoints/20"):
        fit(cfg, tmp_path / "copy", Options(checkpoint_fallback=False))
    capsys.readouterr()
    again = fit(cfg, tmp_path / "copy")
    told = capsys.readouterr().err
    assert "WARNING" in told and "newest sound checkpoint, step 10" in told
    assert without_times(again.metrics) == without_times(result.metrics)
    assert_same_bits(again.state, result.state)
