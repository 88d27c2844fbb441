"""The page and the view in a terminal show the content of the runs' files, and texts stay texts."""

import html.parser
import json
import math
import os
import re
import statistics
import time

import made_up_runs
import numpy as np
import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_runs import leave_files as leave_run
from made_up_runs import losses
from small_experiment import small

from lmlib.report import page, seen, tables, write_page, write_pictures
from lmlib.report.curves import limits
from lmlib.report.page import _TEMPLATE as TEMPLATE
from lmlib.report.page import _library
from lmlib.report.points import AXES
from lmlib.report.runs_table import runs_table
from lmlib.report.seen import Watched
from lmlib.report.specifications import COLOURS, SEQUENTIAL, VERSION, for_paper
from lmlib.report.terminal import bars, view
from lmlib.runs import read_run, runs
from lmlib.runs.series import Series
from lmlib.terminal.text import shown
from runner import fit
from runner.errors import StoppedEarly, TrainingStopped
from runner.sweep.folder import Point
from runner.sweep.tables import results_text
from runner.training.options import Options

FINISHED = {
    "steps": 2, "parameters": 1000, "tokens": 64, "mean_tokens_per_second": 100.0,
    "training_loss": 2.5, "loss_unit": "nats per token", "validated_on": "the whole split",
    "validation": {"validation_loss": {"value": 2.25, "unit": "nats per token"}},
}  # fmt: skip


class Parsed(html.parser.HTMLParser):
    """The texts of a page by their element, and the elements that scripts can begin from."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.attributes = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.texts.setdefault(tag, []).append("")
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, text):
        if self.open:
            self.texts[self.open[-1]][-1] += text


def data_of(text):
    """The data of a page, whose series have the places of their axis values in "axes"."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    data = json.loads(found[1])
    for series in (each for chart in data["charts"] for each in chart["series"]):
        series |= {axis: data["axes"][series[axis]] for axis in AXES.keys() & series.keys()}
    return data


def test_a_page_of_one_run(tmp_path):
    lines = losses(3.5, "NaN", 2.5)
    lines[0]["mine"], lines[2]["mine"] = 1, 2
    lines[1]["once"] = 7.0  # a single measurement is drawn
    for line in lines:
        line["same"] = 1.0
    run = leave_run(
        tmp_path / "first", {"steps": 3}, lines, FINISHED | {"steps": 3}, {3: "def f"}, {"steps": 3}
    )
    text = page(seen([run]))
    assert len(text.encode()) < 2e6
    parsed = Parsed(text)
    assert parsed.texts["h1"] == ["first"] and "def f" in parsed.texts["pre"]
    tiles = dict(zip(parsed.texts["dt"], parsed.texts["dd"], strict=True))
    assert tiles["validation loss"].split() == ["2.2500"] and "loss" not in tiles
    over = ["nats per token, mean of the last 3 steps", "nats per token, the whole split"]
    assert parsed.texts["small"][:2] == over
    loss, mine, once = data_of(text)["charts"]
    assert once["metric"] == "once" and "Constant so far: same 1." in text
    assert loss["metric"] == "loss" and loss["unit"] == "nats per token"
    (series,) = loss["series"]
    assert series["step"] == [1, 2, 3] and series["value"] == [3.5, None, 2.5]
    assert series["not_finite"] == [0, 1, 0]
    assert mine["metric"] == "mine" and mine["series"][0]["step"] == [1, 3]
    assert data_of(text)["goodput"][0]["share"] == 1.0
    # It lets nothing in but its own scripts.
    (policy,) = [value for _, name, value in parsed.attributes if name == "content"][1:]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert "connect-src 'none'" in policy
    assert not [each for each in parsed.attributes if each[1] in ("src", "href")]


def test_a_run_that_goes_on_has_the_numbers_of_its_last_step(tmp_path):
    """Also one that was made longer, whose result.json is that of its earlier end."""
    lines = losses(3.5, 2.75)
    lines[0]["evaluation_loss"] = 3.25
    run = leave_run(tmp_path / "longer", {"steps": 9}, lines, FINISHED)
    parsed = Parsed(page(seen([run])))
    tiles = dict(zip(parsed.texts["dt"], parsed.texts["dd"], strict=True))
    assert [tiles[name].split()[0] for name in ("loss", "evaluation loss")] == ["2.7500", "3.2500"]
    assert parsed.texts["small"][:2] == ["nats per token, step 2", "nats per token, step 1"]
    assert not {"training loss", "validation loss", "mean tokens per second"} & tiles.keys()
    assert read_run(run).final == {} and "validation_loss" not in runs(run)
    text = page(seen([leave_run(tmp_path / "new", {"steps": 5}, [])]))
    assert "no step yet" in text and data_of(text)["charts"] == []


def test_a_live_page_has_the_names_and_units_of_the_finished_one(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    about = {
        "first_step": 1, "parameters": 1_234_567, "loss_name": "DPO loss",
        "metrics": {"loss": ["nats per pair", "-log σ"], "reward_accuracy": ["of pairs", "right"]},
    }  # fmt: skip
    lines = [{**line, "reward_accuracy": 0.5, "evaluation_reward_accuracy": 0.25, "pairs": i}
             for i, line in enumerate(losses(3.0, 2.0))]  # fmt: skip
    run = leave_run(tmp_path / "a", {"steps": 9}, lines, None, {1: "old", 2: "new"}, {}, about)
    times = {"compile": 50.0, "steps": 80.0, "evaluation": 20.0}
    start = {"began": 1e9 - 200, "until": 1e9 - 50, "last_step": 2, "seconds": times}
    (run / "goodput.json").write_text(json.dumps({"starts": [start]}))
    (run / "lock").write_text("")
    os.utime(run / "lock", (1e9, 1e9))

    def shown_on(text):
        parsed = Parsed(text)
        tiles = dict(zip(parsed.texts["dt"], map(str.split, parsed.texts["dd"]), strict=True))
        charts = {each["metric"]: each for each in data_of(text)["charts"]}
        units = {name: (each["title"], each["unit"], each["text"]) for name, each in charts.items()}
        return {name: " ".join(words) for name, words in tiles.items()}, units, parsed

    tiles, live, parsed = shown_on(page(seen([run])))
    assert tiles["DPO loss"] == "2.0000" and parsed.texts["small"][0] == "nats per pair, step 2"
    assert tiles["reward accuracy"] == "50.0%" and tiles["parameters"] == "1.23 M"
    assert tiles["elapsed"] == "3 min 20 s"
    assert tiles["left"] == "5 min 0 s"  # 2 steps took 100 s, so 7 take 350 s, and 50 s have passed
    assert live["loss"] == ("Training DPO loss", "nats per pair", "-log σ")
    assert "new" in parsed.texts["pre"][0] and "old" in parsed.texts["pre"][1]
    assert "Newest sample, after step 2" in parsed.texts["summary"]
    assert parsed.texts["td"][:6] == ["steps", "1 min 20 s", "53.3%", "compile", "50.0 s", "33.3%"]
    assert data_of(page(seen([run])))["charts"][0]["group"] == "Loss"
    assert "1.23 M parameters" in repr(read_run(run))

    accuracy = {"training_reward_accuracy": {"value": 0.75, "unit": "of pairs"}}
    result = FINISHED | {"steps": 9, "loss_unit": "nats per pair", "training": accuracy}
    (run / "result.json").write_text(json.dumps(result))
    tiles, finished, _ = shown_on(page(seen([run])))
    assert finished == live and tiles["training DPO loss"] == "2.5000"
    assert tiles["training reward accuracy"] == "75.0%" and tiles["wall time"] == "2 min 30 s"
    assert "left" not in tiles and "reward accuracy" not in tiles
    other = leave_run(tmp_path / "b", {"steps": 9}, lines, None, None, times)
    both = data_of(page(seen([run, other])))["charts"][0]
    assert (both["title"], both["unit"]) == ("Training loss", "nats per pair or nats per token")
    header, (_, row), _ = tables.wall_times(seen([run, other]))
    assert header == ("run", "wall time", "steps", "compile", "evaluation")
    shares = ("1 min 20 s · 53.3%", "50.0 s · 33.3%", "20.0 s · 13.3%")
    assert row == ("b", "2 min 30 s", *shares)
    for damaged in ([], {"metrics": [1], "parameters": "9", "loss_name": 7, "first_step": -1},
                    {"metrics": {"loss": "b", "reward_accuracy": [1, 2]}}):  # fmt: skip
        (run / "starts/00000/start.json").write_text(json.dumps(damaged))
        assert shown_on(page(seen([run])))[1]["loss"][:2] == ("Training loss", "nats per token")


def test_a_page_of_several_runs_says_what_differs(tmp_path):
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            settings = {"optimizer.peak_lr": rate, "seed": seed, "steps": 2}
            leave_run(tmp_path / f"{rate}/{seed}", settings, losses(3.0, 2.0 + rate))
    text = page(seen([tmp_path]))
    assert [run["name"] for run in data_of(text)["runs"]] == ["0.1/0", "0.1/1", "0.2/0", "0.2/1"]
    assert [run["group"] for run in data_of(text)["runs"]] == ["peak_lr=0.1"] * 2 + [
        "peak_lr=0.2"
    ] * 2
    cells = Parsed(text).texts["td"]
    assert cells[:6] == ["peak_lr=0.1 ", "2.1000", "0.1", "0, 1", "not running", "2"]
    assert cells[6:12] == ["0.1/0", "2.1000", "0.1", "0", "not running", "2"]
    assert "0 of 4 finished, 4 not running" in text


def test_finished_runs_are_compared(tmp_path):
    for rate in (0.1, 0.2):
        for seed in (0, 1, 2):
            settings = {"optimizer.peak_lr": rate, "seed": seed}
            loss = 2.5 + rate + seed**2 / 100
            made_up_runs.leave_run(tmp_path / f"{rate}/{seed}", loss, settings)
    made_up_runs.leave_run(
        tmp_path / "0.1/3", 0.0, {**settings, "optimizer.peak_lr": 0.1, "seed": 3}, finished=False
    )
    runs = seen([tmp_path])
    columns, groups, has_seeds = runs_table(runs, tables.shown_numbers(runs))
    keys = [column.key for column in columns]
    assert (
        keys[:5] == ["validation_loss", "optimizer.peak_lr", "seed", "state", "step"] and has_seeds
    )
    means = [statistics.fmean(2.5 + rate + each for each in (0, 0.01, 0.04)) for rate in (0.1, 0.2)]
    spread = statistics.stdev((0, 0.01, 0.04))
    for (head, *members), mean, rate in zip(groups, means, ("0.1", "0.2"), strict=True):
        assert head.run is None and head.size == len(members)
        assert head.cells[0] == (f"{mean:.4f}", pytest.approx(mean), f"± {spread:.4f}")
        assert head.cells[1] == (rate, float(rate), None)
        assert not any(row.best for row in members)
    assert groups[0][0].cells[2:4] == [
        ("4 values", None, None),
        ("finished, not running", None, None),
    ]
    assert [row.run for row in groups[1][1:]] == [4, 5, 6] and groups[1][2].cells[2] == (
        "1",
        1,
        None,
    )
    assert {"validation_loss", "training_loss"} <= {keys[i] for i in groups[0][0].best}
    assert "validation_loss" not in {keys[i] for i in groups[1][0].best}
    assert Parsed(page(runs)).texts["small"][:3] == [
        "nats per token",
        "nats per token",
        "bits per byte",
    ]
    judged = Parsed(page(runs, baseline="optimizer.peak_lr=0.1", margin=0.01)).texts
    assert "Verdicts" in judged["h2"] and "Verdicts" not in Parsed(page(runs)).texts["h2"]
    assert [text for text in judged["pre"] if "minus baseline" in text]
    alone = seen([tmp_path / "0.1/0", tmp_path / "0.2/0"])
    assert not runs_table(alone, ["validation_loss"]).has_seeds and "±" not in page(alone)
    with pytest.raises(ValueError, match="peak_lr"):
        page(runs, baseline="optimizer.peak_lr=7")


def test_long_metrics_are_thinned_with_their_extremes(tmp_path):
    values = [3.0] * 20_000
    values[11_111], values[15_000] = 99.0, "Infinity"
    run = leave_run(tmp_path / "long", {"steps": 20_000}, losses(*values))
    (chart,) = data_of(page(seen([run])))["charts"]
    (series,) = chart["series"]
    assert chart["stretch"] == 21 and len(series["value"]) < 1000
    assert max(series["greatest"]) == 99.0 and min(series["least"]) == 3.0
    assert sum(series["not_finite"]) == 1


def test_the_size_of_a_page_follows_from_its_runs_points_and_metrics(tmp_path):
    """Steps are there once, settings that all share once, and a number takes few characters."""
    sizes, metrics = {}, [f"metric {i}" for i in range(6)]
    random = np.random.default_rng(0)
    for count in (4, 8):
        for i in range(count):
            rows = 3e6 + random.standard_normal((1500, len(metrics)))
            lines = [
                {"step": n, **dict(zip(metrics, row, strict=True))} for n, row in enumerate(rows, 1)
            ]
            settings = {"lr": i, **{f"setting {number}": "x" * 50 for number in range(100)}}
            leave_run(tmp_path / f"{count}/{i}", settings, lines)
        text = page(seen([tmp_path / str(count)]))
        assert text.count("x" * 50) == 100
        sizes[count] = len(text)
        data = data_of(text)
        points = sum(len(each["value"]) for chart in data["charts"] for each in chart["series"])
        assert points == 1500 / (count // 2) * count * len(metrics)  # means of 2 or 4 steps
        assert len(data["axes"]) == 1
        # 8 characters for a mean, 3 or 4 digits beyond the shared ones for the ends of a band.
        assert len(json.dumps(data["charts"])) < points * 50
    assert sizes[8] < sizes[4] + 40_000  # as many points: only names, states and settings are more


# Texts that a file can hold and that are not refused before: surrogates as JSON can write them.
TEXTS = st.text(min_size=1, max_size=40) | st.sampled_from(
    ["</script><script>alert(1)</script>", "<!--", "<script", "]]>", "{{ 7 * 7 }}", "&lt;",
     "\x1b]52;c;\x07", "\u202eabc", "' onload='", '" onload="', "\u2028", "\ud800", "<b>\0"]
)  # fmt: skip


@settings(max_examples=40)
@given(name=TEXTS, value=TEXTS, sample=TEXTS)
def test_text_of_runs_stays_text(tmp_path_factory, name, value, sample):
    folder = tmp_path_factory.mktemp("run")
    unit = {"value": 1.5, "unit": value}
    result = FINISHED | {"loss_unit": value, "validation": {name: unit, "validation_loss": unit}}
    writable = sample.encode("utf-8", "replace").decode()
    lines = [{"step": 1, name: 2.0}, {"step": 2, name: 3.0}] if name != "step" else losses(1.0)
    setting = {"a": value.encode("utf-8", "replace").decode()}
    about = {"loss_name": value, "metrics": {name: [value, value], "loss": [sample, value]}}
    leave_run(folder / "a", setting, lines, result, {1: writable}, {name: 2.0}, about)
    write_page(seen([folder / "a"]), folder / "page.html")
    text = (folder / "page.html").read_text("utf-8")
    parsed = Parsed(text)
    assert len(parsed.texts["script"]) == 4 and not parsed.texts.get("b")
    assert not [each for each in parsed.attributes if each[1].startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    as_read = (folder / "a/samples/00000001.txt").read_bytes().decode()
    assert parsed.texts["pre"][0].strip() == shown(as_read).strip()
    names = [chart["metric"] for chart in data_of(text)["charts"]]
    assert name in {"step", "tokens", "step_flops"} or shown(name) in names or "/" in name


@pytest.mark.parametrize("lock", [None, "fresh", "old"])
@pytest.mark.parametrize("ended", ["", "diverged"])
def test_a_page_says_how_a_run_ended(tmp_path, lock, ended):
    run = leave_run(tmp_path / "a", {"steps": 9}, losses(3.0, 2.0), goodput={"steps": 2.0})
    kept = json.loads((run / "goodput.json").read_text())
    kept["starts"][-1] |= {"ended": ended, "reason": "64 updates <b>" if ended else ""}
    (run / "goodput.json").write_text(json.dumps(kept))
    if lock:
        (run / "lock").write_text("")
        os.utime(run / "lock", None if lock == "fresh" else (1e9, 1e9))
    state = ended or ("running" if lock == "fresh" else "not running")
    text = page(seen([run]))
    assert f"{state}, step 2 of 9" in text
    told = Parsed(text).texts.get("pre", [])
    assert told == (["64 updates <b>"] if ended else told)
    assert (state == "running") == (not told)
    assert f"{state}, step 2 of 9" in view(seen([run]), 80)
    leave_run(tmp_path / "b", {"steps": 2}, losses(3.0, 2.0), FINISHED)
    assert f"1 of 2 finished, 1 {state}<" in page(seen([tmp_path]))
    points = [Point(tmp_path / name, {}) for name in "abc"]
    lines = [line.split() for line in results_text(points, {}).splitlines()]
    assert any(" ".join(words).startswith(f"a {state}, step 2 of 9") for words in lines)
    assert ["c", "not", "begun"] in lines
    assert runs(tmp_path).set_index("run")["state"].to_list() == [state, "finished"]


def fails(step):
    if step == 3:
        raise RuntimeError("a <b> of the user's")
    return False


@pytest.mark.landing
@pytest.mark.parametrize(
    ("overrides", "stop", "error", "told"),
    [
        (["optimizer.peak_lr=1e30", "guard.stop_after=3"], None, TrainingStopped, "diverged, step"),
        ([], lambda step: step == 3, StoppedEarly, "interrupted, step 3 of 12"),
        ([], fails, RuntimeError, "failed, step 2 of 12"),
    ],
)
def test_a_run_that_ends_early(tmp_path, overrides, stop, error, told):
    with pytest.raises(error) as caught:
        fit(small("steps=12", *overrides), tmp_path, Options(**({"stop": stop} if stop else {})))
    text = (tmp_path / "report.html").read_text()
    reason = str(caught.value).splitlines()[0]
    assert told in text and reason in html.unescape(text)
    if error is StoppedEarly:
        fit(small("steps=12"), tmp_path)
        assert ">finished<" in (tmp_path / "report.html").read_text()
        assert seen([tmp_path])[0].run.state == ("finished", "")


def test_axes_are_not_rounded(tmp_path):
    lines = [
        {"step": step, "tokens": step * 4_194_304 + 1, "step_seconds": 0.1234567, "loss": step}
        for step in range(12_345_601, 12_345_661)
    ]
    (chart, *_) = data_of(page(seen([leave_run(tmp_path / "a", {"steps": 2}, lines)])))["charts"]
    (series,) = chart["series"]
    assert series["step"] == [line["step"] for line in lines]
    assert series["tokens"] == [line["tokens"] for line in lines]
    seconds = [0.1234567 * (i + 1) for i in range(60)]
    assert series["seconds"] == pytest.approx(seconds, rel=1e-11)


def test_few_values_that_are_far_from_the_rest_are_outside():
    for values, expected in [
        ([3.0, 2.5, 2.0, 1e30], (math.nan, 3.0)),
        ([3.0, -1e30, 2.5, 2.0, 2.2, math.nan], (2.0, math.nan)),
        ([11.0, 3.0, 2.6, 2.5, 2.4, 2.3], (math.nan, math.nan)),  # as a loss falls
        ([0.0] * 9 + [5.0], (math.nan, math.nan)),  # nothing would be left to see
        ([1.0] * 3 + [1.1, 1e6, 1e6, 1e6], (math.nan, math.nan)),  # too many for exceptions
        ([3.0, 1e30], (math.nan, math.nan)),
        ([math.inf, math.nan], (math.nan, math.nan)),
    ]:
        assert limits(np.array(values)) == pytest.approx(expected, nan_ok=True), values
    assert limits(np.array([4.0, 2.0, *[0.3, 0.31] * 4]), compiled=True) == pytest.approx(
        (math.nan, 0.31), nan_ok=True
    )


def test_layers_are_in_the_order_of_the_model(tmp_path):
    parts = ["norm", "layer 10", "layer 2", "embedding"]
    lines = [{"step": step, **{f"grad_norm/{part}": step for part in parts}} for step in (10, 20)]
    (found,) = data_of(page(seen([leave_run(tmp_path / "a", {"steps": 2}, lines)])))["layers"]
    order = dict.fromkeys(row["part"] for row in sorted(found["rows"], key=lambda r: r["order"]))
    assert list(order) == ["embedding", "layer 2", "layer 10", "norm"]
    assert [row["value"] for row in found["rows"] if row["part"] == "norm"] == [10, 20]


@pytest.mark.landing
def test_the_charting_library_is_made_where_no_cache_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = _library.__wrapped__()
    assert "vegaEmbed" in made and "</script" not in made
    (file,) = tmp_path.rglob("*.js")
    assert file.read_text("utf-8") == made == _library.__wrapped__()


@pytest.mark.landing
def test_pictures_for_papers(tmp_path):
    for seed in (0, 1):
        lines = losses(3.0 + seed, math.nan if seed else 2.5, 2.0)
        lines = json.loads(json.dumps(lines).replace("NaN", '"NaN"'))
        leave_run(tmp_path / f"runs/{seed}", {"seed": seed, "steps": 3}, lines)
    runs = seen([tmp_path / "runs"])
    files = write_pictures(runs, tmp_path / "out", ["loss"], log_x=True, log_y=True, smoothing=0.1)
    assert [file.name for file in files] == ["loss.svg", "loss.png"]
    drawn = files[0].read_text("utf-8")
    assert "mark-line" in drawn and "nats per token" in drawn
    assert files[1].read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no curve of 'lss'; there are loss"):
        write_pictures(runs, tmp_path / "out", ["lss"])
    # Names that are alike as files.
    lines = [{"step": step, "a b": step, "a_b": -step, "A b": 2 * step} for step in (1, 2)]
    runs = seen([leave_run(tmp_path / "run", {"steps": 2}, lines)])
    files = [file.name for file in write_pictures(runs, tmp_path, ["a b", "a_b", "A b"])]
    assert files[2] == "a_b.svg" and len({file.lower() for file in files}) == 6
    for name, file in zip(["a b", "a_b", "A b"], files[::2], strict=True):
        assert f">{name}<" in (tmp_path / file).read_text()


def labels(svg, axis):
    """The ticks of an axis, X or Y."""
    part = svg.partition(f'aria-label="{axis}-axis')[2].partition("role-axis-title")[0]
    return re.findall(r"<text[^>]*>([^<]*)</text>", part.partition("role-axis-label")[2])


@pytest.mark.landing
@pytest.mark.parametrize(
    ("first", "last", "shown_among"),
    [(1_000_001, 1_000_060, "1,000,030"), (10**9, 6 * 10**9, "2B"), (1e12, 7e12, "2T"),
     (1e20, 7e20, "2e+20"), (1e-7, 7e-7, "2e-7"), (0.30001, 0.30007, "0.30002"), (0, 60, "20")],
)  # fmt: skip
def test_ticks_differ_from_each_other(first, last, shown_among):
    rows = [
        {"curve": "a", "stretch": i, "step": i, "x": x, "value": x, "least": x, "greatest": x,
         "not_finite": 0}
        for i, x in enumerate((first, last))
    ]  # fmt: skip
    svg = vl_convert.vegalite_to_svg(for_paper("loss", "", rows, ["a"], "step"), VERSION)
    for axis in "XY":
        found = labels(svg, axis)
        assert len(set(found)) == len(found) > 2 and shown_among in found


# Linear sRGB as colour-blind eyes see it: Machado, Oliveira and Fernandes (2009), severity 1.
COLOUR_BLIND = {
    "none": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
# Oklab, https://bottosson.github.io/posts/oklab/
TO_CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
TO_OKLAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]


def linear(colour):
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize(("theme", "panel"), [("light", "#f7f7f5"), ("dark", "#1f2227")])
def test_curves_stand_out_from_the_panel_and_from_each_other_for_the_colour_blind(theme, panel):
    assert f"--panel: {panel}" in (TEMPLATE / "page.css").read_text()
    colours = np.array([linear(each) for each in COLOURS[theme]])
    luminances = np.array([*colours, linear(panel)]) @ [0.2126, 0.7152, 0.0722] + 0.05
    contrasts = luminances[:-1] / luminances[-1]
    assert np.maximum(contrasts, 1 / contrasts).min() >= 3
    for kind, matrix in COLOUR_BLIND.items():
        seen_by = np.clip(colours @ np.transpose(matrix), 0, 1)
        oklab = np.cbrt(seen_by @ np.transpose(TO_CONES)) @ np.transpose(TO_OKLAB)
        apart = np.linalg.norm(oklab[:, None] - oklab, axis=-1) + np.eye(len(oklab))
        assert apart.min() > 0.1, kind

    scale = np.array([linear(each) for each in SEQUENTIAL[theme]])
    brightness = scale @ [0.2126, 0.7152, 0.0722] + 0.05
    assert np.all(np.diff(brightness) > 0)  # for readers without any colours
    contrasts = brightness / luminances[-1]
    assert np.maximum(contrasts, 1 / contrasts).min() >= 3


def swept(folder, *texts):
    """The settings that differ between runs with these values of `optimizer.NAME`, and seeds."""
    for i, values in enumerate(zip(*texts, strict=True)):
        named = dict(zip(("optimizer.peak_lr", "model.mlp"), values, strict=False))
        made_up_runs.leave_run(folder / f"{i:02}", 3.0 - i % 3 / 10, named | {"seed": i}, steps=2)
    return data_of(page(seen([folder])))


@pytest.mark.parametrize(
    ("texts", "scale", "at"),
    [
        (("1", "2", "3"), "log", [0, math.log(2, 3), 1]),  # a rate
        (("0.0", "1.0", "10.0"), "symlog", [0, math.log(2, 11), 1]),
        (("-1", "0", "3"), "linear", [0, 0.25, 1]),
        (("16", "None", "2"), "point", [0.5, 1, 0]),
        (("nan", "1", "2"), "point", [1, 0, 0.5]),
        (("1", "1.0", "1"), "point", [0, 1, 0]),
    ],
)
def test_the_scale_of_a_setting(tmp_path, texts, scale, at):
    found = swept(tmp_path, texts, [f"lmlib.parts.{text}" for text in texts])
    (setting,) = found["swept"]
    assert setting["name"] == "peak_lr" and setting["also"] == ["mlp"]
    assert setting["scale"]["type"] == scale
    np.testing.assert_allclose(setting["at"], at)


def test_scales_of_other_settings_are_logarithmic_if_values_grow_by_factors(tmp_path):
    rates = [f"{1e-5 * 1.5 ** (i % 20)}" for i in range(40)]
    found = swept(tmp_path, rates, [64 if i < 10 else 128 if i < 20 else 256 for i in range(40)])
    rate, width = found["swept"]
    assert rate["ticks"] == [1e-5, 1e-4, 1e-3, 1e-2] and width["ticks"] == [64, 128, 256]
    assert width["scale"]["type"] == "log" and not found["answer"]["parallel"]
    linear = swept(tmp_path / "linear", ["1", "1", "1", "1"], [64, 128, 192, 256])["swept"]
    assert [each["scale"]["type"] for each in linear] == ["linear"]


def test_the_answer_compares_only_what_can_be_compared(tmp_path):
    for i, (tokenizer, loss) in enumerate((("a", 3.0), ("a", 3.1), ("b", 2.9))):
        made_up_runs.leave_run(
            tmp_path / f"{i}", loss, {"data.path": tokenizer, "seed": i}, steps=2, digest=tokenizer
        )
    answer = data_of(page(seen([tmp_path])))["answer"]
    assert answer["title"] == "Validation bits per byte"
    np.testing.assert_allclose(answer["values"], np.array([3.0, 3.1, 2.9]) / np.log(2) / 4)
    assert answer["text"].startswith("Best: path=b, ") and answer["best"]["run"] == 2
    for file in tmp_path.glob("[12]/result.json"):
        file.unlink()
    assert data_of(page(seen([tmp_path])))["answer"] is None  # one group has finished


def series(*values):
    return Series(np.arange(1, len(values) + 1), np.array(values, np.float64))


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=300), st.integers(2, 50))
def test_bars_go_from_the_least_to_the_greatest_and_fit(values, most):
    assert 1 <= len(bars(series(*values), most)) <= max(most, 2)
    assert bars(series(0, 1, 2, 3, 4, 5, 6, 7), 8) == "▁▂▃▄▅▆▇█"
    assert bars(series(5, math.nan, 1), 8) == "█×▁"
    assert bars(series(2, 2), 8) == "▁▁"
    assert bars(series(math.inf), 8) == "×"


def test_a_view_keeps_up_with_a_run(tmp_path):
    run = leave_run(tmp_path / "a\x1b[2J", {"steps": 9}, losses(3.0, 2.0))
    watched = Watched([run])
    assert "step 2 of 9" in view(watched.now(), 80)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.5}\n')
    lines = view(watched.now(), 80).splitlines()
    assert lines[0] == "a\\x1b[2J  not running, step 3 of 9"
    assert lines[2].split() == ["loss", "1.5", "1.5", "3", "█▃▁"]
