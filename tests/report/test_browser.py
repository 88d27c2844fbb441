"""A run's page in a real browser, which has no network: it draws, and complains of nothing.

Needs `chromium` or `google-chrome` on the PATH: apt-get install chromium.
"""

import html
import json
import math
import re
import shutil
import subprocess
import threading

import made_up_runs
import pytest
from made_up_runs import leave_files as leave_run
from made_up_runs import losses
from small_experiment import small

from lmlib.report import page, seen, write_page
from lmlib.report.seen import Watched
from lmlib.report.server import PageServer
from lmlib.report.specifications import COLOURS
from runner import fit

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH"),
]
# Added to a page: puts into its title, as JSON, what `expression` gives once all is drawn. `charts`
# has for each chart, by its metric: `marks`, how many there are to be seen of each kind; `labels`
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
    if (kind === "line") found.dashed += seen.filter((each) => each.strokeDash?.[1]).length;
  }
  for (const each of item.items ?? []) look(each, found);
  return found;
};
const place = (view, x, y) => { // from the corner of the canvas
  const [left, top] = view.origin(), padding = view.padding();
  return [left + padding.left + view.scale("x")(x), top + padding.top + view.scale("y")(y)];
};
const point = (view, ...at) => {
  const canvas = view.container().querySelector("canvas");
  const box = canvas.getBoundingClientRect(), [x, y] = place(view, ...at);
  const event = { clientX: box.left + x + 3, clientY: box.top + y + 3, bubbles: true };
  canvas.dispatchEvent(new PointerEvent("pointermove", event));
  return [...document.querySelectorAll(".vg-tooltip td")].map((each) => each.innerText);
};
setTimeout(async () => {
  const charts = {};
  document.querySelectorAll("figure[data-metric]").forEach((figure) => {
    const view = views.find((each) => figure.contains(each.container()));
    if (!view) return; // not drawn yet
    const { metric } = figure.dataset;
    const empty = { marks: {}, labels: [], heights: [], colours: [], dashed: 0 };
    charts[metric] = look(view.scenegraph().root, empty);
  });
  document.title = JSON.stringify(EXPRESSION);
}, 15000);
</script>"""


def opened(url, folder, seconds=30):
    """The page as the browser has it in the end, and what it wrote to its console."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
         "--enable-logging=stderr", f"--virtual-time-budget={seconds}000", "--dump-dom", url],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


def with_at_end(text, added):
    before, end, after = text.rpartition("</body>")
    return f"{before}{added}{end}{after}"


def look(file, folder, expression="charts", address=""):
    """What `expression` gives, of a copy of the page that looks at its charts."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text("utf-8"))
    copy = file.with_name("looked_at.html")
    copy.write_text(with_at_end(text, LOOK.replace("EXPRESSION", expression)), "utf-8")
    dom, console = opened(f"{copy.as_uri()}#{address}", folder)
    assert not console
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom)[1]))


def page_of(tmp_path, lines):
    write_page(seen([leave_run(tmp_path / "a", {"steps": 9}, lines)]), tmp_path / "page.html")
    return tmp_path / "page.html"


def test_the_page_that_a_finished_run_leaves(tmp_path):
    fit(small("steps=12"), tmp_path / "run")
    file = tmp_path / "run/report.html"
    dom, console = opened(file.as_uri(), tmp_path / "profile")
    assert not console
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
    tooltip, rules = look(page_of(tmp_path, lines), tmp_path / "profile", told)
    assert tooltip == ["run", "a", "step", "2", "value", "2"]
    assert rules == [[0], [0]]


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
      const groups = [...document.querySelectorAll("#charts > details")];
      const closed = groups.filter((each) => !each.open).map((each) => each.innerText);
      const caption = document.querySelector("[data-metric=learning_rate]").innerText;
      groups.at(-1).querySelector("summary").click();
      await new Promise((resolve) => setTimeout(resolve, 9000));
      const drawn = document.querySelectorAll("#charts > details:last-child canvas").length;
      return [groups.map((each) => each.querySelector("h2").textContent), closed, caption, drawn];
    })()]"""
    charts, (groups, closed, caption, drawn) = look(
        page_of(tmp_path, lines), tmp_path / "profile", told
    )
    assert groups == ["Loss", "Optimization", "Speed and memory", "Nearly constant"]
    assert len(closed) == 1 and "valid_tokens 511 to 512" in closed[0] and drawn == 2
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
    told = """[charts.loss.colours, [...document.querySelectorAll("#legend i")].map((each) => {
        const parts = getComputedStyle(each).backgroundColor.match(/\\d+/g);
        return "#" + parts.map((part) => Number(part).toString(16).padStart(2, "0")).join("");
    })]"""
    drawn = {}
    for theme in ("light", "dark"):
        address = f"theme={theme}"
        lines, legend = look(tmp_path / "page.html", tmp_path / "profile", told, address)
        assert len(set(legend)) == count and set(legend) <= set(lines)
        assert legend == COLOURS[theme][:2] or count > 2
        drawn[theme] = legend
    assert not set(drawn["light"]) & set(drawn["dark"])


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
        document.querySelectorAll("#runs tbody tr").length, document.querySelector("#runs").open]"""
    height, top, rows, opened_ = look(tmp_path / "page.html", tmp_path / "profile", told)
    assert top < 900 and rows == 80 and not opened_, (height, top)


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
        const empty = { marks: {}, labels: [], heights: [], colours: [] };
        const kinds = look(view.scenegraph().root, empty);
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
