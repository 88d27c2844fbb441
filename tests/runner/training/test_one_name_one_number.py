"""A number that two places show under one name is one number: in files, tables, pages, trackers."""

import contextlib
import functools
import json
import math
import re

import fiddle as fdl
import pytest
from byte_texts import write_texts
from small_experiment import small
from tensorboardX.proto.event_pb2 import Event
from tracker_stores import in_mlflow, in_trackio, in_wandb

from lmlib import trackers
from lmlib.data.flat_tokens import FlatTokens
from lmlib.report import page, seen
from lmlib.runs import read_run, runs
from runner import fit
from runner.training.options import Options

pytestmark = pytest.mark.slow

# Words in place of a name.
NAMES = {"tokens seen": "tokens", "memory in use, at most": "peak_memory_bytes", "step": "step"}
SCALES = {"k": 1e3, "M": 1e6, "KB": 1e3, "MB": 1e6, "GB": 1e9, "%": 0.01}
METRICS = ("training_loss", "validation_loss", "validation_bits_per_byte")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs whose evaluations see one batch of several, and the trackers that they had."""
    folder = tmp_path_factory.mktemp("shown")
    write_texts(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("WANDB_MODE", "offline")
        sinks = [
            trackers.Trackio,
            trackers.WeightsAndBiases,
            functools.partial(trackers.MLflow, tracking_uri=f"sqlite:///{folder}/mlflow.db"),
        ]
        for seed in (0, 1):
            cfg = small("steps=4", f"seed={seed}", "evaluation.every=3", "evaluation.batches=1")
            cfg.optimizer.peak_lr = 0.1
            cfg.data = fdl.Config(FlatTokens, str(folder / "data"), "train", 4, 16)
            cfg.validation = fdl.Config(
                FlatTokens, str(folder / "data"), "train", 1, 16, seed=None, epochs=1
            )
            fit(cfg, folder / f"runs/{seed}", Options(sinks=sinks))
    return folder


def number(text):
    """The number that a text begins with, and how far off its last digit may be."""
    found = re.match(r"(-?[\d,]+(?:\.(\d+))?(?:e[+-]\d+)?)\s?(?:(k|M|KB|MB|GB|%)(?!\w))?", text)
    scale = SCALES.get(found[3], 1)
    value = float(found[1].replace(",", ""))
    return value * scale, 0.51 * 10.0 ** -len(found[2] or "") * scale


def named(place, texts):
    """Numbers as texts, by words."""
    for words, text in texts:
        name = NAMES.get(words, words.replace(" ", "_").replace("MFU", "mfu"))
        with contextlib.suppress(TypeError):  # no number
            yield place, name, *number(text)


def exact(place, numbers):
    for name, value in numbers.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield place, name, float(value), 1e-6 * abs(value)


def of_page(run):
    text = page(seen([run]))
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(.*?) <small>(.*?)</small>", text)
    yield from named("tile", ((name, value) for name, value, _ in tiles))
    over = {name: about for name, _, about in tiles}
    assert over["training loss"].endswith("mean of the last 4 steps")
    assert over["validation loss"].endswith("the whole split")
    charts = json.loads(re.search(r'<script id="data".*?>(.*?)</script>', text, re.DOTALL)[1])
    last = {chart["metric"]: chart["series"][0]["value"][-1] for chart in charts["charts"]}
    yield from ((*each[:3], 1e-5 * abs(each[2])) for each in exact("chart", last))


def of_files(run):
    result = json.loads((run / "result.json").read_text())
    yield from exact("result.json", result)
    yield from exact(
        "result.json", {name: each["value"] for name, each in result["validation"].items()}
    )
    last = {name: value for line in read_run(run).metrics for name, value in line.items()}
    yield from exact("metrics.jsonl", last)
    table = runs(run)
    assert len(table) == 1
    yield from exact("runs()", table.iloc[0].to_dict())


def of_trackers(folder, run):
    scalars = {}
    for file in (run / "tensorboard").iterdir():
        data = file.read_bytes()
        while data:
            end = 12 + int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12:end])
            scalars |= {value.tag: value.simple_value for value in event.summary.value}
            data = data[end + 4 :]
    yield from exact("TensorBoard", scalars)
    for place, rows in (
        ("W&B", in_wandb(run, "lmlib")[1]),
        ("Trackio", in_trackio(run, "lmlib")[1]),
        ("MLflow", in_mlflow(run, "lmlib", f"sqlite:///{folder}/mlflow.db")[1]),
    ):
        yield from exact(place, {name: value for _, name, value in sorted(rows, key=by_step)})


def by_step(row):
    return row[0]


def test_no_two_places_show_two_numbers_under_one_name(folder):
    run = folder / "runs/0"
    shown = {}
    for place, name, value, off in (
        *of_page(run),
        *of_files(run),
        *of_trackers(folder, run),
    ):
        shown.setdefault(name, []).append((place, value, off))
    for name, places in shown.items():
        for place, value, off in places:
            first, expected, most = places[0]
            near = math.isclose(value, expected, abs_tol=off + most, rel_tol=0)
            assert near, f"{name} is {value} in {place} and {expected} in {first}"
    files = {"result.json", "runs()"}
    trackers = {"W&B", "Trackio", "MLflow"}
    of_steps = {"metrics.jsonl", "runs()", "chart", "TensorBoard", *trackers}
    whole = files | {"tile"} | trackers
    for name, expected in (
        ("validation_loss", whole),
        ("training_loss", whole),
        ("validation_bits_per_byte", whole),
        ("mean_tokens_per_second", whole),
        ("loss", of_steps),
        ("evaluation_loss", of_steps),
        ("tokens_per_second", of_steps),
    ):
        assert {place for place, _, _ in shown[name]} == expected, name
    # They differ, so that one in the place of another would be found.
    for one, another in (
        ("validation_loss", "evaluation_loss"),
        ("training_loss", "loss"),
        ("mean_tokens_per_second", "tokens_per_second"),
    ):
        (_, value, off), (_, near, most) = shown[one][0], shown[another][0]
        assert abs(value - near) > 2 * (off + most), (one, value, near)
