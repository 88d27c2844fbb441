"""A run's page in a real browser, which has no network: it draws, and its console stays empty.

Needs `chromium` or `google-chrome` on the PATH: apt-get install chromium.
"""

import html
import itertools
import json
import math
import re
import shutil
import subprocess
import threading
from pathlib import Path

import fiddle as fdl
import made_up_runs
import numpy as np
import pytest
from made_up_runs import leave_files as leave_run
from made_up_runs import losses
from small_experiment import small

from lmlib.experiment import PeriodicCallback
from lmlib.losses.dpo import DPO
from lmlib.report import page, seen, write_page
from lmlib.report.seen import Watched
from lmlib.report.server import PageServer
from lmlib.report.specifications import COLOURS, SEQUENTIAL
from runner import Options, fit
from runner.config import configs

LLAMA = Path(__file__).parents[1] / "hf" / "golden" / "llama"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH"),
]
# Added to a page: puts into its title, as JSON, what `expression` gives once all is drawn. `charts`
# has for each chart, by its metric: `marks`, the number of visible ones of each kind; `labels`
# of each axis; `heights`, from the top, of the points of its last line, over the chart's.
LOOK = """<script>
const look = (item, found) => {
  if (item.role === "axis-label")
    found.labels.push(item.items.filter((each) => each.opacity !== 0).map((each) => each.text));
  else if (item.marktype && item.marktype !== "group") {
    const seen = item.items.filter((each) => each.opacity !== 0);
    const kind = item.marktype === "symbol" ? seen[0]?.shape ?? "circle" : item.marktype;
    found.marks[kind] = (found.marks[kind] ?? 0) + seen.length;
    const drawn = seen.filter((each) => each.defined !== false && Number.isFinite(each.y));
    if (kind === "line") found.heights.push(...drawn.map((each) => each.y / 230));
    if (kind === "line") found.colours.push(...seen.slice(0, 1).map((each) => each.stroke));
    if (kind === "line") found.opacities.push(...seen.slice(0, 1).map((each) => each.opacity ?? 1));
    if (kind === "line") found.dashed += seen.filter((each) => each.strokeDash?.[1]).length;
  }
  for (const each of item.items ?? []) look(each, found);
  return found;
};
const place = (view, x, y) => { // from the corner of the canvas
  const [left, top] = view.origin(), padding = view.padding();
  return [left + padding.left + view.scale("x")(x), top + padding.top + view.scale("y")(y)];
};
const point = (view, x_value, y_value, type = "pointermove") => {
  const canvas = view.container().querySelector("canvas");
  const box = canvas.getBoundingClientRect(), [x, y] = place(view, x_value, y_value);
  const event = { clientX: box.left + x + 3, clientY: box.top + y + 3, bubbles: true };
  canvas.dispatchEvent(new PointerEvent(type, event));
  return [...document.querySelectorAll(".vg-tooltip td")].map((each) => each.innerText);
};
const swatches = (selector) => [...document.querySelectorAll(selector)].map((each) => {
  const parts = getComputedStyle(each).backgroundColor.match(/\\d+/g);
  return "#" + parts.map((part) => Number(part).toString(16).padStart(2, "0")).join("");
});
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
setTimeout(async () => {
  const charts = {};
  const empty = { marks: {}, labels: [], heights: [], colours: [], opacities: [], dashed: 0 };
  document.querySelectorAll("figure[data-metric]").forEach((figure) => {
    const view = views.find((each) => figure.contains(each.container()));
    if (!view) return; // not drawn yet
    charts[figure.dataset.metric] = look(view.scenegraph().root, structuredClone(empty));
  });
  document.title = JSON.stringify(EXPRESSION);
}, 15000);
</script>"""


def opened(url, folder, seconds=30):
    """The page as the browser has it in the end, and the lines of its console."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
         "--enable-logging=stderr", "--allow-file-access-from-files",
         f"--virtual-time-budget={seconds}000", "--dump-dom", url],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


def with_at_end(text, added):
    before, end, after = text.rpartition("</body>")
    return f"{before}{added}{end}{after}"


def look(file, folder, expression="charts", address=""):
    """The value of `expression` in a copy of the page that looks at its charts."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text("utf-8"))
    copy = file.with_name("looked_at.html")
    copy.write_text(with_at_end(text, LOOK.replace("EXPRESSION", expression)), "utf-8")
    dom, console = opened(f"{copy.as_uri()}#{address}", folder)
    assert not console, console
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom)[1]))


def page_of(tmp_path, lines):
    write_page(seen([leave_run(tmp_path / "a", {"steps": 9}, lines)]), tmp_path / "page.html")
    return tmp_path / "page.html"


def test_the_page_that_a_finished_run_leaves(tmp_path):
    fit(small("steps=12"), tmp_path / "run")
    file = tmp_path / "run/report.html"
    dom, console = opened(file.as_uri(), tmp_path / "profile")
    assert not console, console
    assert 'data-drawn="1"' in dom and "<canvas" in dom
    tiles = "[...document.querySelectorAll('.tiles div')]"
    cut_off = f"{tiles}.filter((each) => each.scrollWidth > each.clientWidth).length"
    expression = f"[charts, {tiles}.length, {cut_off}]"
    charts, numbers, too_narrow = look(file, tmp_path / "profile", expression)
    assert charts["loss"]["marks"]["line"] >= 2 * 12  # the curve's points, raw and smoothed
    assert numbers >= 5 and not too_narrow


def test_seeds_are_one_curve_and_what_is_not_finite_is_marked(tmp_path):
    for seed in (0, 1, 2):
        lines = losses(3.0 + seed, 2.5, "NaN" if seed else 2.4, 2.0 + seed)
        name = "</script><b>" if seed else "a\x1b[1m"
        leave_run(tmp_path / f"runs/{name}{seed}", {"seed": seed, "steps": 4}, lines)
    write_page(seen([tmp_path / "runs"]), tmp_path / "page.html")
    dom, console = opened((tmp_path / "page.html").as_uri(), tmp_path / "profile")
    assert not console and "<b>" not in dom
    marks = look(tmp_path / "page.html", tmp_path / "profile")["loss"]["marks"]
    assert marks["line"] == 2 * 4 and marks["area"] == 4  # of one curve, not of three
    assert marks["cross"] == 1


def test_the_mean_of_seeds_breaks_where_one_ends(tmp_path):
    for seed in (0, 1, 2):
        lines = losses(*[3.0 + seed] * (4 if seed == 2 else 8))
        leave_run(tmp_path / f"runs/{seed}", {"seed": seed, "steps": 8}, lines)
    write_page(seen([tmp_path / "runs"]), tmp_path / "page.html")
    told = """[charts.loss.dashed, point(views[0], 6, 3.5),
        document.querySelector("figcaption").innerText]"""
    dashed, tooltip, caption = look(tmp_path / "page.html", tmp_path / "profile", told)
    assert dashed == 2 * 4 and "dashed: mean of fewer runs" in caption
    assert tooltip[:6] == ["run", "all runs", "step", "6", "value", "3.5"]
    assert tooltip[6:] == ["min", "3", "max", "4", "runs", "2 of 3"]


def test_one_cursor_moves_over_all_charts_and_says_run_step_and_value(tmp_path):
    lines = [{"step": step, "loss": 4.0 - step, "mine": step} for step in (1, 2, 3)]
    lines = [line | {"step_seconds": 3600.0} for line in lines]
    told = """[point(views[0], 2, 2), await Promise.all(views.map((view) => view.runAsync())) &&
         views.map((view) => {
           const found = [];
           const rules = (item) => {
             if (item.marktype === "rule" && !item.role.startsWith("axis"))
               found.push(...item.items.map((each) => each.x - view.scale("x")(2)));
             (item.items ?? []).forEach(rules);
           };
           rules(view.scenegraph().root);
           return found;
         })]"""
    page = page_of(tmp_path, lines)
    tooltip, rules = look(page, tmp_path / "profile", told, "axis=seconds")
    assert tooltip == ["run", "a", "step", "2", "value", "2", "wall time (h)", "2"]
    assert rules == [[0], [0]]


def test_a_drag_zooms_all_charts_and_a_double_click_shows_all_again(tmp_path):
    lines = [
        {"step": step, "loss": 10 / step, "mine": step**2 if step != 25 else 1e9, "odd": step % 2}
        for step in range(1, 41)
    ]
    told = """[charts.odd, ...await (async () => {
        const axes = async () => {
          await Promise.all(views.map((view) => view.runAsync()));
          const ends = views.slice(0, 2).map((view) =>
            ["x", "y"].map((each) => view.scale(each).domain()));
          const address = new URLSearchParams(location.hash.slice(1));
          return [ends, control("unzoom").hidden, address.get("zoom")];
        };
        point(views[0], 20, 1, "pointerdown");
        point(views[0], 25, 1);
        point(views[0], 30, 1, "pointerup");
        const zoomed = await axes();
        control("theme").click(); // all is drawn anew
        await wait(5000);
        const again = await axes();
        point(views[0], 25, 0.4, "dblclick");
        return [zoomed, again, await axes()];
    })()]"""
    page, address = page_of(tmp_path, lines), "smoothing=30"
    odd, zoomed, again, whole = look(page, tmp_path / "profile", told, address)
    assert odd["opacities"] == [0.3, 1]  # the raw curve is faint, and the only one as high
    heights = [max(each) - min(each) for each in (odd["heights"][:40], odd["heights"][40:])]
    assert heights[0] > 0.9 and heights[1] < 0.2
    ((x, loss_y), (other_x, mine_y)), unzoom_hidden, zoom = zoomed
    assert x == other_x == pytest.approx([20, 30], abs=0.8) and not unzoom_hidden
    assert [float(each) for each in zoom.split(",")] == pytest.approx(x)
    assert 0.3 <= loss_y[0] <= 10 / 30 and 10 / 21 <= loss_y[1] <= 0.5
    assert 400 <= mine_y[0] <= 441 and 900 <= mine_y[1] <= 950  # not the outlier, 1e9
    assert again[0][0][0] == pytest.approx(x) and again[1:] == [False, zoom]
    assert whole[0][0][0] == [1, 40] and whole[1:] == [True, ""]


ODD = [
    {
        "step": 1_000_000 + i,
        "tokens": i * 10**9,
        "loss": 1e30 if i == 30 else 3.0 + i / 100,
        "zero": 0 if i == 30 else 3.0 + i / 100,
        "lonely": "NaN" if i % 2 else 3.0 + i / 100,
        **({"once": 3.0} if i == 9 else {}),
    }
    for i in range(1, 61)
]


def test_odd_values_hide_no_others(tmp_path):
    charts = look(page_of(tmp_path, ODD), tmp_path / "profile")
    assert charts.pop("once")["marks"]["circle"] == 1
    for chart in charts.values():
        assert all(len(set(labels)) == len(labels) > 1 for labels in chart["labels"])
        assert max(chart["heights"]) - min(filter(lambda y: y >= 0, chart["heights"])) > 0.8
    assert charts["loss"]["marks"]["triangle"] == 1 and charts["loss"]["marks"]["line"] == 2 * 60
    assert "1,000,030" in charts["loss"]["labels"][0]
    assert charts["lonely"]["marks"]["cross"] == 30 and charts["lonely"]["marks"]["circle"] == 30


def test_charts_are_grouped_and_a_dull_one_is_drawn_when_its_group_opens(tmp_path):
    lines = [
        {
            "step": step,
            "loss": 4.0 - step / 40,
            "learning_rate": 1e-5 * step,
            "skipped_updates": int(step > 20) + int(step > 30),
            "valid_tokens": 512 - step % 2,
            "step_seconds": {1: 2.0, 2: 1.0}.get(step, 0.3 + step % 3 / 100),
            "data_wait_seconds": 1e-6 * step,
        }
        for step in range(1, 41)
    ]
    told = """[charts, await (async () => {
      const groups_ = () => [...document.querySelectorAll("#charts > details")];
      const groups = groups_();
      const closed = groups.filter((each) => !each.open).map((each) => each.innerText);
      const caption = document.querySelector("[data-metric=learning_rate]").innerText;
      groups.at(-1).querySelector("summary").click();
      await wait(3000);
      const drawn = document.querySelectorAll("#charts > details:last-child canvas").length;
      const found = [];
      for (const text of ["", "lid_to", "WAIT FOR", "absent"]) {
        if (!text) groups_().at(-1).querySelector("summary").click(); // fold it again
        control("search").value = text;
        control("search").dispatchEvent(new Event("input"));
        await wait(2000);
        const drawn = [...document.querySelectorAll("#charts figure:has(canvas)")];
        found.push(drawn.map((each) => each.dataset.metric));
      }
      return [groups.map((each) => each.querySelector("h2").textContent), closed, caption, drawn,
              found, control("charts").innerText];
    })()]"""
    charts, (groups, closed, caption, drawn, found, nothing) = look(
        page_of(tmp_path, lines), tmp_path / "profile", told
    )
    assert groups == ["Loss", "Optimization", "Speed", "Nearly constant"]
    assert len(closed) == 1 and "valid_tokens 511 to 512" in closed[0] and drawn == 2
    assert found[0] == [*charts] and found[1:] == [["valid_tokens"], ["data_wait_seconds"], []]
    assert nothing == "No metric contains “absent”."
    assert "data_wait_seconds 1.0e-6 to 4.0e-5" in closed[0] and "valid_tokens" not in charts
    assert caption.startswith("Learning rate learning_rate")
    assert "2e-4" in charts["learning_rate"]["labels"][1]
    assert [label for label in charts["skipped_updates"]["labels"][1] if label] == ["0", "1", "2"]
    assert charts["step_seconds"]["marks"]["triangle"] == 2
    heights = [y for y in charts["step_seconds"]["heights"] if y >= 0]
    assert max(heights) - min(heights) > 0.6  # the steps without compilation


@pytest.mark.parametrize("count", [2, 12])
def test_curves_have_the_colours_of_the_theme(tmp_path, count):
    for i in range(count):
        leave_run(tmp_path / f"runs/{i:02}", {"lr": i, "steps": 2}, losses(3.0, 2.0 + i))
    write_page(seen([tmp_path / "runs"]), tmp_path / "page.html")
    told = "[charts.loss.colours, swatches('#legend i')]"
    drawn = {}
    for theme in ("light", "dark"):
        address = f"theme={theme}"
        lines, legend = look(tmp_path / "page.html", tmp_path / "profile", told, address)
        assert len(set(legend)) == count and set(legend) <= set(lines)
        assert legend == COLOURS[theme][:2] or count > 2
        drawn[theme] = legend
    assert not set(drawn["light"]) & set(drawn["dark"])


ANSWER = """[(() => {
  const found = {};
  for (const figure of document.querySelectorAll("#answer figure")) {
    const view = views.find((each) => figure.contains(each.container()));
    const [x, y] = ["x", "y"].map((axis) => view.scale(axis)), marks = {};
    const collect = (item) => {
      if (item.role === "mark" && item.marktype !== "group")
        for (const each of item.items)
          (marks[each.shape ?? item.marktype] ??= []).push(
            [x.invert?.(each.x), y.invert(each.y), each.text ?? each.size]);
      (item.items ?? []).forEach(collect);
    };
    collect(view.scenegraph().root);
    found[figure.dataset.setting ?? "all"] = { type: x.type, domain: x.domain(), marks };
  }
  return found;
})(),
document.querySelector("figure").closest("section").id,
document.querySelector("figure").getBoundingClientRect().top,
document.querySelector("#answer_text").innerText,
document.querySelector("#legend .key").innerText,
charts.evaluation_loss.colours,
await (async () => {
  control("colour").value = "model.cautious";
  control("colour").dispatchEvent(new Event("change"));
  await wait(200);
  return [...document.querySelectorAll("#legend label i")].map((each) => each.style.background);
})()]"""


def test_a_sweep_begins_with_its_answer(tmp_path):
    losses, means = {}, {}
    for rate, decay, cautious in itertools.product((1e-3, 1e-2, 1e-1), (0.0, 0.1), (False, True)):
        for seed in (0, 1):
            loss = 2 + 0.3 * math.log10(rate / 1e-2) ** 2 + decay + 0.05 * cautious + 0.02 * seed
            run = tmp_path / f"runs/{rate},{decay},{cautious},{seed}"
            settings = {"optimizer.peak_lr": rate, "optimizer.decay": decay, "seed": seed}
            settings |= {"model.cautious": cautious}
            made_up_runs.leave_run(
                run, loss, settings, steps=2, curve={1: 4.0, 2: loss}, finished=loss < 2.46
            )
            losses[rate, decay, cautious, seed] = loss
        means[rate, decay, cautious] = loss - 0.01
    worst = [run for run, loss in losses.items() if loss > 2.46]
    assert worst == [(1e-3, 0.1, True, 1), (1e-1, 0.1, True, 1)]
    start = {"began": 0.0, "until": 1.0, "last_step": 2, "seconds": {"steps": 1.0}}
    start |= {"ended": "diverged", "reason": "the loss is NaN"}
    for rate in (1e-3, 1e-1):
        file = tmp_path / f"runs/{rate},0.1,True,1/goodput.json"
        file.write_text(json.dumps({"starts": [start]}))
        del means[rate, 0.1, True]
    write_page(seen([tmp_path / "runs"]), tmp_path / "page.html")
    found, place, top, text, key, colours, shades = look(
        tmp_path / "page.html", tmp_path / "profile", ANSWER
    )
    assert place == "answer_section" and top < 300
    assert "Best: peak_lr=0.01, decay=0.0, cautious=False, validation loss 2.0100" in text
    assert "the mean of 2 seeds" in text and "tried" not in text
    rates, decays, kinds, whole = found.values()
    assert rates["type"] == "log" and decays["type"] == "linear" and kinds["type"] == "point"
    assert kinds["domain"] == ["False", "True"]
    points = [(rate, loss) for (rate, *_), loss in losses.items() if loss < 2.46]
    small = [(x, y) for x, y, size in rates["marks"]["circle"] if size < 100]
    np.testing.assert_allclose(sorted(small), sorted(points))
    lines = [(x, y) for x, y, _ in rates["marks"]["line"]]
    np.testing.assert_allclose(sorted(lines), sorted((rate, x) for (rate, *_), x in means.items()))
    assert len(rates["marks"]["cross"]) == 2
    for chart, x in ((rates, 1e-2), (decays, 0.0), (kinds, "False")):
        ((at, loss, _),) = [each for each in chart["marks"]["circle"] if each[2] > 100]
        assert at == pytest.approx(x, abs=1e-6)
        assert loss == pytest.approx(2.01)
        assert [each[2] for each in chart["marks"]["text"]] == ["best 2.0100"]
    assert whole["domain"] == ["peak_lr", "decay", "cautious", "Validation loss"]
    assert len(whole["marks"]["line"]) == 4 * len(means)
    # Colours follow the logarithm of the rate.
    assert key.split() == ["peak_lr", "0.001", "0.01", "0.1"]
    scale = [[int(each[i : i + 2], 16) for i in (1, 3, 5)] for each in SEQUENTIAL["light"]]
    middle = [(low + high) / 2 for low, high in zip(scale[2], scale[3], strict=True)]
    drawn = {tuple(int(each[i : i + 2], 16) for i in (1, 3, 5)) for each in colours}
    assert {tuple(scale[0]), tuple(scale[-1])} < drawn and len(drawn) == 3
    assert min(max(abs(a - b) for a, b in zip(middle, each, strict=True)) for each in drawn) <= 1
    assert len(set(shades)) == 2, shades


def test_with_eighty_runs_the_first_chart_starts_on_the_first_screen(tmp_path):
    for i in range(80):
        run = tmp_path / f"runs/{i:02}"
        settings = {"optimizer.peak_lr": f"{1e-4 * 1.1 ** (i // 2):.6f}", "seed": i % 2}
        made_up_runs.leave_run(run, 2.5 + i % 9 / 10, settings, steps=3, finished=i % 8 < 6)
        start = {"began": 0.0, "until": 1.0, "last_step": 3, "seconds": {"steps": 1.0}}
        start |= {"ended": "diverged", "reason": "the loss is NaN"}
        (run / "goodput.json").write_text(json.dumps({"starts": [start]}))
    runs = seen([tmp_path / "runs"])
    write_page(runs, tmp_path / "page.html", baseline="optimizer.peak_lr=0.000100", margin=0.01)
    text = (tmp_path / "page.html").read_text()
    assert text.count("20 runs have not finished") == 1 and text.count("the loss is NaN") == 1
    told = """[innerHeight, document.querySelector("figure").getBoundingClientRect().top,
        document.querySelectorAll("#runs tbody").length, document.querySelector("#runs").open]"""
    height, top, groups, opened_ = look(tmp_path / "page.html", tmp_path / "profile", told)
    assert top < 900 and groups == 40 and not opened_, (height, top)


def test_the_table_of_runs_sorts_filters_and_opens(tmp_path):
    for rate, loss in (("0.001", 10.5), ("0.003", 2.5), ("0.01", 2.75)):
        for seed in (0, 1):
            settings = {"optimizer.peak_lr": rate, "seed": seed}
            run, value = tmp_path / f"runs/{rate}/{seed}", loss - seed * min(0.4, float(rate) * 40)
            made_up_runs.leave_run(run, value, settings, curve={50: 9.0, 100: value})
    write_page(seen([tmp_path / "runs"]), tmp_path / "page.html")
    told = """await (async () => {
      const rows = () => [...document.querySelectorAll("#runs tbody tr:not([hidden])")];
      const names = () => rows().map((row) => row.cells[0].textContent.trim());
      const sort = () => document.querySelector('[data-key="validation_loss"] button').click();
      const typed = async (text) => {
        control("filter").value = text;
        control("filter").dispatchEvent(new Event("input"));
        await wait(1500);
        const curved = views.filter((view) => control("charts").contains(view.container()));
        const drawn = curved.map((view) => look(view.scenegraph().root, structuredClone(empty)));
        const lines = [...new Set(drawn.flatMap((chart) => chart.colours))];
        return [names(), control("filtered").textContent, lines, swatches("#legend i")];
      };
      const all = swatches("#runs tr:not([hidden]) i"), found = [];
      const open = () => rows()[1].querySelector("button").click();
      for (const act of [() => {}, sort, sort, open]) {
        act();
        found.push(names());
      }
      const filtered = [];
      for (const text of ["absent", "PEAK_lr=1e-2, FINI", "seed=1"])
        filtered.push(await typed(text));
      const frame = document.createElement("iframe");
      Object.assign(frame, { src: "page.html", width: 400, height: 900 });
      document.body.append(frame);
      await wait(2500);
      const inside = frame.contentDocument, table = inside.querySelector("#runs .wide");
      table.scrollLeft = 150;
      const [name, result, setting] = table.querySelector("tbody tr").cells;
      const boxes = [name, result, setting].map((cell) => {
        const { left, right } = cell.getBoundingClientRect();
        return [left, right];
      });
      return [all, found, filtered, table.scrollLeft, boxes];
    })()"""
    swatches, found, filtered, scrolled, boxes = look(
        tmp_path / "page.html", tmp_path / "profile", told
    )
    one, three, ten = (f"peak_lr={rate} 2 runs" for rate in ("0.001", "0.003", "0.01"))
    assert found[:3] == [[one, three, ten], [three, ten, one], [one, ten, three]]
    assert found[3] == [one, ten, "0.01/0", "0.01/1", three]
    nothing, by_rate, by_seed = filtered
    assert nothing == [[], "0 of 6 runs", [], []]
    assert by_rate[:2] == [[ten, "0.01/0", "0.01/1"], "2 of 6 runs"]
    assert len(set(swatches)) == 3 and by_rate[2] == by_rate[3] == [swatches[2]]
    assert by_seed[:2] == [["0.001/1", "0.003/1", "0.01/1"], "3 of 6 runs"]
    (left, name_ends), (result_begins, result_ends), (setting_begins, _) = boxes
    assert scrolled > 50 and left >= 0 and result_begins >= name_ends - 1 and result_ends <= 400
    assert setting_begins < result_ends  # it goes on behind the result


@pytest.mark.parametrize("address", ["", "log_y=1&smoothing=10"])
def test_a_chart_of_many_points_shows_what_one_of_few_does(tmp_path, address):
    """Its curves are paths. With MANY out of reach the library draws them: the reference."""
    for i in range(6):
        steps = range(1, 1 + 500 * (1 + i % 2))  # one seed of each group ends earlier
        values = ["NaN" if n == 100 + i else 9 / n**0.3 + i / 9 + n % 3 / 50 for n in steps]
        settings = {"lr": i // 2, "seed": i % 2, "steps": 9}
        leave_run(tmp_path / f"runs/{i}", settings, losses(*values))
    file = tmp_path / "page.html"
    write_page(seen([tmp_path / "runs"]), file)
    told = """[...document.querySelectorAll("[data-metric]")].map((figure) => {
        const view = views.find((each) => figure.contains(each.container()));
        const canvas = figure.querySelector("canvas"), { width, height } = canvas;
        const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        const dark = [];
        for (let i = 3; i < pixels.length; i += 4) dark.push(pixels[i]);
        const kinds = look(view.scenegraph().root, structuredClone(empty));
        return [kinds.marks, kinds.labels, dark, point(view, 300, 2)];
    })"""
    many = look(file, tmp_path / "profile", told, address)
    text = file.read_text("utf-8")
    assert "MANY = 2000" in text
    file.write_text(text.replace("MANY = 2000", "MANY = 1e9"), "utf-8")
    few = look(file, tmp_path / "profile", told, address)
    (run, own, step, place, *_), (*expected, other) = many[0][3], few[0][3][:4]
    assert [run, own, step] == expected and abs(float(place) - float(other)) <= 4  # by a pixel
    for (marks, labels, dark, _), (others, expected, own, _) in zip(many, few, strict=True):
        assert "line" not in marks and others["line"]
        assert labels == expected and marks.get("cross") == others.get("cross")
        differing = sum(abs(one - other) > 64 for one, other in zip(dark, own, strict=True))
        assert differing < 0.015 * len(dark), (differing, len(dark))


def test_a_chart_far_from_the_screen_is_drawn_when_it_comes_near(tmp_path):
    metrics = {f"metric {i:02}": i for i in range(40)}
    lines = [
        {"step": n, **{name: math.sin(n + i) for name, i in metrics.items()}} for n in (1, 2, 3)
    ]
    file = page_of(tmp_path, lines)
    text = file.read_text("utf-8")
    assert text.count("pause(300)") == 1  # without the drawing of all others when nobody scrolls
    file.write_text(text.replace("pause(300)", "pause(scrollY ? 300 : 1e7)"), "utf-8")
    told = """[...document.querySelectorAll("figure[data-metric]")].map((each) =>
        each.querySelector("canvas") !== null)"""
    drawn = look(file, tmp_path / "profile", told)
    assert len(drawn) == 40 and 2 <= sum(drawn) < 20 and all(drawn[: sum(drawn)])


def test_a_zero_spoils_no_logarithmic_axis_and_the_full_range_is_there(tmp_path):
    address = "log_y=1&full_range=1&axis=tokens"
    charts = look(page_of(tmp_path, ODD), tmp_path / "profile", address=address)
    heights = charts["zero"]["heights"]
    assert max(heights) - min(heights) > 0.9 and len(charts["zero"]["labels"][1]) > 1
    assert "1e+30" in charts["loss"]["labels"][1]
    assert {"20B", "40B"} < set(charts["loss"]["labels"][0])
    assert "triangle" not in charts["loss"]["marks"]


def test_a_thinned_spike_can_be_seen(tmp_path):
    lines = losses(*(25.0 if step == 11_111 else 3.0 + step % 7 / 10 for step in range(1, 20_000)))
    darkest = """(() => {
        const canvas = views[0].container().querySelector("canvas");
        const ratio = canvas.width / canvas.clientWidth, [x, y] = place(views[0], 11111, 19);
        const box = [x - 4, y, 8, 1].map((each) => Math.round(each * ratio));
        const pixels = canvas.getContext("2d").getImageData(...box).data;
        return Math.max(...pixels.filter((_, i) => i % 4 === 3));
    })()"""
    assert look(page_of(tmp_path, lines), tmp_path / "profile", darkest) > 80  # of 255


def test_no_script_of_a_run_would_run(tmp_path):
    """Even if one came in: the policy holds."""
    run = leave_run(tmp_path / "a", {"steps": 2}, losses(3.0, 2.0))
    file = tmp_path / "page.html"
    added = '<script>document.title = "run"</script><img src="https://example.org/a.png">'
    file.write_text(with_at_end(page(seen([run])), added), "utf-8")
    dom, console = opened(file.as_uri(), tmp_path / "profile")
    assert "<title>a</title>" in dom
    assert len(console) == 2 and all("Content Security Policy" in line for line in console)


def test_a_run_of_pairs_while_it_goes_on_and_when_it_has_finished(tmp_path):
    settings = [f"folder={LLAMA}", "mesh.fsdp=1", "steps=9", "evaluation.every=3"]
    cfg = configs.load("experiments/from_hf", ["tiny"], [*settings, "init_from=None"])
    cfg.init_from, cfg.objective = str(LLAMA), fdl.Config(DPO, reference_from=str(LLAMA))
    live = PeriodicCallback(8, lambda now: write_page(seen([now.workdir]), tmp_path / "live.html"))
    fit(cfg, tmp_path / "run", Options(actions=[live]))
    told = """[Object.keys(charts), control("status").innerText,
        [...document.querySelectorAll("figcaption")].map((each) => each.innerText),
        Object.fromEntries([...document.querySelectorAll(".tiles div")].map((each) =>
          [...each.children].map((part) => part.innerText)))]"""
    files = tmp_path / "live.html", tmp_path / "run/report.html"
    (_, state, captions, now), (names, ended, finished, tiles) = (
        look(file, tmp_path / "profile", told) for file in files
    )
    assert state == "running, step 8 of 9" and ended == "finished"
    assert set(captions) == set(finished)
    assert {"process_memory_bytes", "cpu_cores", "chosen_reward", "rejected_reward"} <= set(names)
    assert any(each.startswith("Training DPO loss nats per pair") for each in captions)
    assert now.keys() >= {"DPO loss", "reward accuracy", "parameters", "elapsed", "left"}
    assert tiles.keys() >= {"training DPO loss", "validation reward accuracy", "wall time"}
    assert tiles["parameters"] == now["parameters"]


def test_the_live_page_takes_over_new_lines_and_forgets_a_deleted_run(tmp_path):
    run, other = (
        leave_run(tmp_path / f"runs/{name}", {"steps": 9999}, losses(3.0, 2.0)) for name in "ab"
    )
    watched, served = Watched([tmp_path / "runs"]), []

    def live():
        served.append(2 + len(served))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {1 + served[-1]}, "loss": 1.5}}\n')
        if len(served) == 2:
            shutil.rmtree(other)
        return page(watched.now(), refresh_seconds=1)

    with PageServer(0, live) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        dom, console = opened(server.url, tmp_path / "profile", seconds=5)
        server.shutdown()
        thread.join()
    assert not console and len(served) > 2
    assert int(re.search(r'data-drawn="(\d+)"', dom)[1]) > 1
    assert "step 3 of 9999" not in dom and re.search(r"step \d+ of 9999", dom)
    assert "2 runs" not in dom and "<title>a</title>" in dom
