"""Columns of metrics.jsonl equal its lines, however the file was written."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlib.metrics.log import MetricsLog, read_metrics
from lmlib.runs.series import Measurements


def columns(workdir):
    found = Measurements(workdir)
    found.update()
    return as_lists(found)


def as_lists(measurements):
    return {
        name: (series.steps_N.tolist(), series.values_N.tolist())
        for name, series in measurements.series.items()
    }


def from_lines(workdir):
    """The same by a plain loop over the lines."""
    found = {}
    for line in read_metrics(workdir):
        for name, value in line.items():
            steps, values = found.setdefault(name, ([], []))
            steps.append(line["step"])
            values.append(float(value))
    return found


NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False)
METRICS = st.dictionaries(st.sampled_from(["loss", "a/b", "Ω\n"]), NUMBERS)


@given(first=st.lists(METRICS, max_size=5), added=METRICS, then=st.lists(METRICS, max_size=5))
def test_columns_keep_up_with_a_run(tmp_path_factory, first, added, then):
    workdir = tmp_path_factory.mktemp("run")
    kept = Measurements(workdir)
    with MetricsLog(workdir, resume_step=None) as log:
        for step, metrics in enumerate(first, 1):
            log.write(step, metrics)
        kept.update()
        if first:
            log.add(len(first), {f"evaluation_{name}": value for name, value in added.items()})
        kept.update()
        for step, metrics in enumerate(then, len(first) + 1):
            log.write(step, metrics)
    kept.update()
    assert as_lists(kept) == columns(workdir) == from_lines(workdir)
    with MetricsLog(workdir, resume_step=len(first)) as log:  # which begins the file anew
        kept.update()
        assert as_lists(kept) == from_lines(workdir)
        log.write(len(first) + 1, {"loss": 1.0})
    kept.update()
    assert as_lists(kept) == from_lines(workdir)


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=6, max_size=60))
def test_no_measurement_is_taken_back_while_a_line_is_half_written(tmp_path_factory, looks):
    """The file is written byte by byte, as `MetricsLog` writes it: a line, then more of its metrics
    over its end. Of the bytes some are followed by a look."""
    workdir = tmp_path_factory.mktemp("run")
    reader, before = Measurements(workdir), {}
    looks = itertools.cycle(looks)
    with open(workdir / "metrics.jsonl", "w+b", buffering=0) as file:
        for step in (1, 2, 3):
            added = f', "evaluation_loss": {step / 4}}}\n'
            for content, over in ((f'{{"step": {step}, "loss": {step / 2}}}\n', 0), (added, 2)):
                file.seek(-over, 2)
                for byte in content.encode():
                    file.write(bytes([byte]))
                    if next(looks):
                        reader.update()
                        found = as_lists(reader)
                        for name, columns in before.items():
                            assert all(
                                now[: len(then)] == then
                                for now, then in zip(found[name], columns, strict=True)
                            )
                        before = found
    reader.update()
    assert as_lists(reader) == from_lines(workdir)
    assert as_lists(reader)["evaluation_loss"] == ([1, 2, 3], [0.25, 0.5, 0.75])


@pytest.mark.parametrize(
    "damage",
    ["{", "7", "[1]", '{"loss": 3}', '{"step": "2"}', '{"step": -1}', '{"step": 1e3}', "\0",
     json.dumps({"step": 1 << 70}), '{"step": 2, "step": 2}', "\ufffe", '{"step": 1}], [{'],
)  # fmt: skip
def test_a_damaged_line_costs_no_other(tmp_path, damage):
    lines = ['{"step": 1, "loss": 3.0}', damage, '{"step": 3, "loss": 2.0, "note": "a"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo', "utf-8")
    found = columns(tmp_path)
    assert found["loss"] == ([1, 3], [3.0, 2.0])
    assert "note" not in found


def test_numbers_that_are_not_finite_are_there_and_a_deleted_file_is_empty(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": "NaN"}\n{"step": 2, "loss": "-Infinity"}\n'
        f'{{"step": 3, "a": {10**400}, "b": 2}}\n'  # one of them is too large
    )
    found = Measurements(tmp_path)
    found.update()
    steps_N, values_N = found.series["loss"]
    assert steps_N.dtype == np.int64 and math.isnan(values_N[0]) and values_N[1] == -math.inf
    assert as_lists(found)["b"] == ([3], [2.0]) and "a" not in found.series
    (tmp_path / "metrics.jsonl").unlink()
    found.update()
    assert not found.series
