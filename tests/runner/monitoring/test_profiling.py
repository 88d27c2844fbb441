"""Profiles of training steps: traces on disk, and summaries of their time."""

import functools
import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lmlib import Experiment, adamw, llama, make_mesh
from lmlib.data.synthetic import Synthetic
from runner.__main__ import steps_range
from runner.errors import ConfigError
from runner.monitoring.profiling import Profiler, where_the_time_went


def test_the_range_of_steps_includes_both_ends():
    for text, steps in (("10:12", [10, 11, 12]), ("1:1", [1]), ("9:11", [9, 10, 11])):
        assert list(steps_range(text)) == steps


@pytest.mark.parametrize(
    "text", ["", "10", "10:", ":12", "12:10", "0:3", "-1:3", "1:2:3", "1.5:3", "a:b", "²:³"]
)
def test_other_texts_than_ranges_are_refused(text):
    with pytest.raises(ConfigError, match="write the first and the last step"):
        steps_range(text)


def traces(folder: Path) -> list[str]:
    """Returns the text of each trace for Perfetto."""
    files = folder.rglob("perfetto_trace.json.gz")
    return [gzip.decompress(file.read_bytes()).decode() for file in files]


@jax.jit
def traced_step(x):
    return jnp.tanh(x @ x)


def run(profiler: Profiler, steps: range) -> None:
    def make(step, x, batch):
        with jax.profiler.TraceAnnotation(f"made step {step}"):
            x = traced_step(x)
        return x, x

    x, made = jnp.ones((64, 64)), profiler.traced(make)
    for step in steps:
        x, _ = made(step, x, None)


def test_the_trace_has_exactly_the_steps_of_the_range(tmp_path):
    with Profiler(tmp_path, range(3, 5)) as profiler:
        run(profiler, range(1, 7))
        (trace,) = traces(tmp_path)  # written at the end of the range
    names = {event.get("name") for event in json.loads(trace)["traceEvents"]}
    made = {name for name in names if name and name.startswith("made step")}
    assert made == {"made step 3", "made step 4"}
    assert any("traced_step" in name for name in names if name)


@pytest.mark.slow
@pytest.mark.parametrize("made", [range(1, 4), range(4, 9)], ids=["stopped", "resumed"])
def test_a_run_that_stops_or_resumes_inside_the_range_is_traced(tmp_path, made):
    told = []
    with Profiler(tmp_path, range(3, 7), written=told.append) as profiler:
        run(profiler, made)
    (trace,) = traces(tmp_path)
    assert f"made step {max(3, made.start)}" in trace
    assert told == [len({*made} & {3, 4, 5, 6})]


@pytest.mark.slow
def test_an_error_inside_the_range_ends_the_trace(tmp_path):
    told = []
    with (
        pytest.raises(KeyError),
        Profiler(tmp_path / "first", range(1, 7), written=told.append) as profiler,
    ):
        run(profiler, range(1, 3))
        raise KeyError
    assert len(traces(tmp_path / "first")) == 1
    assert not told
    with Profiler(tmp_path / "second", range(1, 2)) as profiler:
        run(profiler, range(1, 2))
    assert len(traces(tmp_path / "second")) == 1


@pytest.mark.parametrize("steps", [None, range(50, 60)])
def test_without_steps_nothing_is_traced(tmp_path, steps):
    with Profiler(tmp_path, steps) as profiler:
        run(profiler, range(1, 3))
    assert not list(tmp_path.iterdir())


def test_a_failed_summary_does_not_end_the_run(tmp_path):
    experiment = Experiment(
        model=functools.partial(llama, vocab=8, embed=8, layers=1, heads=1, mlp=8),
        data=Synthetic(8, 1, 8),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(),
        steps=4,
    )
    x = jnp.ones((64, 64))
    compiled = traced_step.lower(x).compile()

    def told() -> str:
        return where_the_time_went(tmp_path, compiled, experiment, steps=2)

    assert told().startswith("WARNING: where the time went is not known: ")
    with Profiler(tmp_path, range(1, 3)) as profiler:
        run(profiler, range(1, 4))
    assert told().startswith("a step of ")
    (tmp_path / "kernels.txt").unlink()
    (tmp_path / "kernels.txt").mkdir()
    *tables, last = told().splitlines()
    assert tables[0].startswith("a step of ") and last.startswith("WARNING: not all kernels are")
