"""The log against a strict JSON reader and a reader of event files, cut at every kind of place."""

import dataclasses
import json
import math
import tempfile
from pathlib import Path

import jax
import pytest
from event_files import shown
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlib.metrics.log import MetricsLog, mfu, read_metrics
from lmlib.metrics.tensorboard import TensorBoard


def strict_lines(workdir: Path) -> list[dict]:
    """Every line, through a parser that refuses NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    text = (workdir / "metrics.jsonl").read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_lines_are_on_disk_at_once_and_read_back(tmp_path):
    with MetricsLog(tmp_path / "run", resume_step=None) as log:
        log.write(1, {"loss": 3.25, "tokens": 1 << 60, "mfu": None})
        assert strict_lines(tmp_path / "run") == [{"step": 1, "loss": 3.25, "tokens": 1 << 60}]
        log.write(2, {"loss": 0.1})
        assert read_metrics(tmp_path / "run")[1] == {"step": 2, "loss": 0.1}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(line.startswith('{"step": ') for line in lines)


def test_later_values_are_added_to_the_newest_line(tmp_path):
    with MetricsLog(tmp_path, resume_step=None, sinks=[TensorBoard]) as log:
        log.write(1, {"loss": 3.25})
        log.write(2, {"loss": 3.0})
        log.add(2, {"evaluation_loss": math.nan, "bits": 1.5, "mfu": None})
        log.write(3, {"loss": 2.5})
    with MetricsLog(tmp_path, resume_step=3) as log:
        log.add(3, {"evaluation_loss": 2.0})
    assert strict_lines(tmp_path) == [
        {"step": 1, "loss": 3.25},
        {"step": 2, "loss": 3.0, "evaluation_loss": "NaN", "bits": 1.5},
        {"step": 3, "loss": 2.5, "evaluation_loss": 2.0},
    ]
    assert (2, "bits", 1.5) in shown(tmp_path)


def test_non_finite_values_are_strict_json_and_read_back(tmp_path):
    with MetricsLog(tmp_path, resume_step=None, sinks=[TensorBoard]) as log:
        log.write(1, {"nan": math.nan, "up": math.inf, "down": -math.inf, "loss": 1.0})
    (line,) = strict_lines(tmp_path)
    assert line == {"step": 1, "nan": "NaN", "up": "Infinity", "down": "-Infinity", "loss": 1.0}
    with MetricsLog(tmp_path, resume_step=1):
        (entry,) = read_metrics(tmp_path)
    assert math.isnan(entry["nan"])
    assert (entry["up"], entry["down"], entry["loss"]) == (math.inf, -math.inf, 1.0)
    assert shown(tmp_path) == [(1, "loss", 1.0)]


def test_no_log_has_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []


def test_a_fresh_start_keeps_the_lines_of_the_runs_before_apart(tmp_path):
    first, kept = tmp_path / "metrics.jsonl.1", []
    for loss in (4.0, 3.0, 2.0):
        with MetricsLog(tmp_path, resume_step=None, sinks=[TensorBoard]) as log:
            kept.append(log.set_aside)
            log.write(0, {"loss": loss})
            log.write(1, {"loss": loss})
    assert kept == [None, first, tmp_path / "metrics.jsonl.2"]
    assert [json.loads(line)["loss"] for line in first.read_text().splitlines()] == [4.0, 4.0]
    assert strict_lines(tmp_path) == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 2.0}]
    assert shown(tmp_path) == [(0, "loss", 2.0), (1, "loss", 2.0)]


def test_a_log_that_another_start_has_opened_again_writes_into_no_file_of_its(tmp_path):
    for resume_step in (None, 1):
        first = MetricsLog(tmp_path, resume_step=None)
        first.write(1, {"loss": 4.0})
        with MetricsLog(tmp_path, resume_step) as second:
            first.write(2, {"loss": 4.0})
            second.write(2, {"loss": 3.0})
            first.close()
        assert strict_lines(tmp_path)[-1] == {"step": 2, "loss": 3.0}
        assert len(strict_lines(tmp_path)) == 1 + (resume_step or 0)


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_file_that_was_deleted_or_exchanged_is_put_back_with_all_lines(tmp_path, exchanged):
    told = []
    path, other = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.1"
    with MetricsLog(tmp_path, resume_step=None, lost=told.append) as log:
        for step in (1, 2, 3, 4):
            path.unlink()
            if exchanged:
                path.write_text("of an editor\n")
            log.write(step, {"loss": 4.0})
        path.unlink()
        log.add(4, {"evaluation_loss": 3.0})
        log.sync()
        path.unlink()
    lines = strict_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["evaluation_loss"] == 3.0
    assert other.exists() == exchanged
    what = "exchanged for another file" if exchanged else "deleted"
    assert told[0] == f"{path} was {what}"


def test_a_file_in_another_runs_place_is_left_alone(tmp_path):
    def lost(what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), MetricsLog(tmp_path, None, lost=lost) as log:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").write_text("another run's\n")
        log.write(1, {"loss": 4.0})
    assert (tmp_path / "metrics.jsonl").read_text() == "another run's\n"
    assert not (tmp_path / "metrics.jsonl.1").exists()


class FailsAtOnce:
    def __init__(self, workdir, first_step):
        self.name = workdir

    def write(self, step, metrics):
        raise RuntimeError("no route to the service")

    def close(self):
        raise AssertionError("what has failed is left alone")


def test_a_failing_sink_is_reported_once_and_ends_nothing(tmp_path):
    told = []
    with MetricsLog(tmp_path, None, sinks=[FailsAtOnce, TensorBoard], tell=told.append) as log:
        for step in (1, 2):
            log.write(step, {"loss": 3.0})
    assert len(told) == 1
    assert told[0].startswith("WARNING: FailsAtOnce gets no more metrics: RuntimeError: no route")
    assert [step for step, _, _ in shown(tmp_path)] == [1, 2]


def test_resuming_purges_tensorboard_from_the_next_step(tmp_path):
    with MetricsLog(tmp_path, resume_step=None, sinks=[TensorBoard]) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": 5.0})
    with MetricsLog(tmp_path, resume_step=2, sinks=[TensorBoard]) as log:
        log.write(3, {"loss": 4.0})
    assert shown(tmp_path) == [(1, "loss", 5.0), (2, "loss", 5.0), (3, "loss", 4.0)]


@settings(max_examples=40)
@given(st.data())
def test_any_cut_and_any_resume_give_every_step_once(data):
    """Resuming is from a step whose line was whole: metrics are written before the checkpoint."""
    steps = data.draw(st.integers(1, 8), "steps")
    number = st.one_of(st.floats(), st.integers(1 - 2**63, 2**63 - 1), st.none())
    values = data.draw(st.lists(number, min_size=steps, max_size=steps), "values")
    with tempfile.TemporaryDirectory() as folder:
        workdir, path = Path(folder), Path(folder, "metrics.jsonl")

        def write(resume_step: int | None) -> None:
            with MetricsLog(workdir, resume_step) as log:
                for step in range((resume_step or 0) + 1, steps + 1):
                    log.write(step, {"loss": values[step - 1], "ü\n": 1})

        write(None)
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)), "cut")
        path.write_bytes(whole[:cut])
        # A line that lacks only its newline is whole.
        last = (whole[:cut] + b"\n").count(b"}\n")
        write(data.draw(st.one_of(st.none(), st.integers(0, last)), "resume_step"))
        assert path.read_bytes() == whole
        assert [line["step"] for line in strict_lines(workdir)] == list(range(1, steps + 1))


def test_a_damaged_line_is_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\0\0\0\n\xff\n[2]\n7\n{"step": 2}\n')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    with MetricsLog(tmp_path, resume_step=2) as log:
        log.write(3, {})
    assert strict_lines(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_other_processes_write_nothing(tmp_path):
    with MetricsLog(tmp_path / "run", resume_step=3, enabled=False) as log:
        log.write(4, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_unknown_metrics_are_refused(tmp_path):
    with MetricsLog(tmp_path, resume_step=None) as log, pytest.raises(ValueError, match='"step"'):
        log.write(1, {"step": 2})


@dataclasses.dataclass(frozen=True)
class Device:
    device_kind: str


def test_mfu_is_a_fraction_of_the_peak_of_all_devices():
    # 6 billion FLOPs a token, 1 million tokens a second: 6 PFLOP/s of 8 × 0.989.
    assert mfu(6e9, 1e6, [Device("NVIDIA H200")] * 8) == pytest.approx(0.75834, abs=1e-5)
    mixed = [Device("TPU v4"), Device("TPU v5 lite")]
    assert mfu(1e9, 118e3, mixed) == pytest.approx(0.25)


def test_without_every_peak_there_is_no_mfu():
    cpu = jax.devices("cpu")[0]
    assert mfu(6e9, 1e6, [cpu]) is None
    assert mfu(6e9, 1e6, [Device("NVIDIA H200"), cpu]) is None


def test_lines_that_are_lost_are_named(tmp_path):
    lines = [f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join([*lines[:2], '{"step": "3"}\n', *lines[5:]]))
    with MetricsLog(tmp_path, resume_step=8) as log:
        assert log.missing is not None
        assert log.missing.startswith(
            f"{tmp_path / 'metrics.jsonl'} has lost the lines of 3 steps from 3 to 5:"
        )
    with MetricsLog(tmp_path, resume_step=2) as log:
        assert log.missing is None
    with MetricsLog(tmp_path, resume_step=3) as log:
        assert log.missing is not None and "the lines of step 3:" in log.missing
    with MetricsLog(tmp_path, resume_step=None) as log:
        assert log.missing is None
