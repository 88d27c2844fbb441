"""A run's page in a real browser, which has no network: it draws, and complains of nothing.

Needs `chromium` or `google-chrome` on the PATH: apt-get install chromium.
"""

import json
import re
import shutil
import subprocess
import threading

import pytest
from left_runs import leave_run, losses
from small_experiment import small

from lmlib.report import page, seen, write_page
from lmlib.report.seen import Watched
from lmlib.report.server import PageServer
from runner import fit

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH"),
]
# Added to a page: says in its title which marks each chart has, when all are drawn.
COUNT = """<script>
const marks = (item, found) => {
  if (item.marktype) found[item.marktype] = (found[item.marktype] ?? 0) + item.items.length;
  for (const each of item.items ?? []) marks(each, found);
  return found;
};
setTimeout(() => {
  document.title = JSON.stringify(views.map((view) => marks(view.scenegraph().root, {})));
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


def marks_of(file, folder):
    """The numbers of marks of each chart, by their kind, of a copy of the page that counts them."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text("utf-8"))
    copy = file.with_name("counted.html")
    copy.write_text(with_at_end(text, COUNT), "utf-8")
    dom, console = opened(copy.as_uri(), folder)
    assert not console
    return json.loads(re.search(r"<title>(.*?)</title>", dom)[1])


def test_the_page_that_a_finished_run_leaves(tmp_path):
    fit(small("steps=12"), tmp_path / "run")
    file = tmp_path / "run/report.html"
    dom, console = opened(file.as_uri(), tmp_path / "profile")
    assert not console
    assert 'data-drawn="1"' in dom and "<canvas" in dom
    loss, *_ = marks_of(file, tmp_path / "profile")
    assert loss["line"] >= 2 * 12  # the curve's points, raw and smoothed


def test_seeds_are_one_curve_and_what_is_not_finite_is_marked(tmp_path):
    for seed in (0, 1, 2):
        lines = losses(3.0 + seed, 2.5, "NaN" if seed else 2.4, 2.0 + seed)
        name = "</script><b>" if seed else "a\x1b[1m"
        leave_run(tmp_path / f"runs/{name}{seed}", {"seed": seed, "steps": 4}, lines)
    write_page(seen([tmp_path / "runs"]), tmp_path / "page.html")
    dom, console = opened((tmp_path / "page.html").as_uri(), tmp_path / "profile")
    assert not console and "<b>" not in dom
    (loss,) = marks_of(tmp_path / "page.html", tmp_path / "profile")
    assert loss["line"] == 2 * 4 and loss["area"] == 4  # of one curve, not of three
    assert loss["symbol"] >= 1 + 4  # a cross, and a point for each to be pointed at


def test_no_script_of_a_run_would_run(tmp_path):
    """Even if one came in: the policy holds."""
    run = leave_run(tmp_path / "a", {"steps": 2}, losses(3.0, 2.0))
    file = tmp_path / "page.html"
    added = '<script>document.title = "run"</script><img src="https://example.org/a.png">'
    file.write_text(with_at_end(page(seen([run])), added), "utf-8")
    dom, console = opened(file.as_uri(), tmp_path / "profile")
    assert "<title>a</title>" in dom
    assert len(console) == 2 and all("Content Security Policy" in line for line in console)


def test_the_live_page_takes_over_new_lines(tmp_path):
    run = leave_run(tmp_path / "a", {"steps": 9999}, losses(3.0, 2.0))
    watched, served = Watched([run]), []

    def live():
        served.append(2 + len(served))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {1 + served[-1]}, "loss": 1.5}}\n')
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
