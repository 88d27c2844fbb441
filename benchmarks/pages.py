"""Measures the page of many long runs in Chromium: its size, its start and how it scrolls.

    python benchmarks/pages.py [--runs=200] [--steps=10000]

Exits with 1 if the page has 10 MB, its first chart takes 3 s, the browser's main thread works for
100 ms in one piece while the page scrolls, or a chart is missing. Other programs disturb the times.
"""

import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from made_up_runs import leave_files

from lmlib.metrics.log import MetricsLog
from lmlib.report import page, seen

_RUNS = flags.DEFINE_integer("runs", 200, "Runs on the page.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 10_000, "Steps of each run.", lower_bound=100)

MOST_MB, MOST_SECONDS, MOST_MS = 10.0, 3.0, 100.0
OTHERS = {  # metrics of pretraining: their least value, and the size of noise
    **{"learning_rate": (1e-5, 1e-3), "grad_norm": (0.3, 0.1), "update_norm": (0.1, 0.01)},
    **{"parameter_norm": (180.0, 9.0), "skipped_updates": (0, 0), "valid_tokens": (524_288, 0)},
    **{"tokens_per_second": (2e6, 1e5), "data_wait_seconds": (0.0, 1e-4), "mfu": (0.4, 0.01)},
    **{"goodput": (0.9, 0.02), "z_loss": (1e-3, 1e-3), "peak_memory_bytes": (30e9, 1e8)},
}
# Posts the seconds until the first chart and until nothing happens any more, the longest task after
# the charts on the screen in ms, and the charts: all, and those that were not drawn. With "?scroll"
# it scrolls down once those on the screen are drawn, 40 pixels a frame.
PROBE = """<script>
const tasks = [], frame = () => new Promise(requestAnimationFrame);
new PerformanceObserver((found) => tasks.push(...found.getEntries())).observe({ type: "longtask" });
const end = () => Math.max(...tasks.map((each) => each.startTime + each.duration));
(async () => {
  while (!document.querySelector("#charts canvas")) await frame();
  const first = performance.now();
  const charts = [...document.querySelectorAll("details[open] > * > figure")];
  const empty = (near) => charts.filter((each) => !each.querySelector("canvas, .nothing")
    && each.getBoundingClientRect().top < near).length;
  while (empty(innerHeight)) await frame();
  const begun = performance.now(), page = document.documentElement;
  const last = () => page.scrollHeight - innerHeight - 1;
  for (; location.search && scrollY < last(); await frame()) scrollBy(0, 40);
  const waited = performance.now();
  while (performance.now() < Math.max(waited, end()) + (empty(1e9) ? 9000 : 1000)) await frame();
  const moving = tasks.filter((each) => begun < each.startTime && each.startTime < waited);
  const longest = Math.max(0, ...moving.map((each) => each.duration));
  const seen = [first / 1e3, end() / 1e3, longest, charts.length, empty(1e9)];
  fetch("/", { method: "POST", body: JSON.stringify(seen) });
})();
</script>"""


def main(_: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(_RUNS.value):
            leave_run(folder / f"runs/{number:03}", number)
        text = page(seen([folder / "runs"]))
        megabytes = len(text.encode()) / 1e6
        first, idle, _, charts, empty = measured(text, folder)
        *_, longest, _, missed = measured(text, folder, "?scroll")
    print(f"{_RUNS.value} runs of {_STEPS.value:,} steps: {megabytes:.2f} MB")
    print(f"first chart after {first:.2f} s, {charts - empty} of {charts} after {idle:.2f} s")
    print(f"longest task while scrolling: {longest:.0f} ms; {missed} charts not drawn")
    late = first >= MOST_SECONDS or longest >= MOST_MS
    sys.exit(int(late or megabytes >= MOST_MB or empty + missed > 0))


def leave_run(folder: Path, number: int) -> None:
    """Leaves the files of a run of pretraining, whose values are made up."""
    settings = {f"model.blocks.part_{i}.setting": f"as in all runs, {i}" for i in range(130)}
    settings |= {"optimizer.peak_lr": f"{1e-4 * 1.1 ** (number // 5):.4g}", "warmup": number % 5}
    phases = ("start", "compile", "steps", "data", "saves", "evaluation", "samples", "repeated")
    leave_files(folder, settings, [], goodput=dict.fromkeys(phases, 100.0))
    noise = np.random.default_rng(number).standard_normal((_STEPS.value, 3))
    with MetricsLog(folder, resume_step=None) as log:
        for step, (a, b, c) in enumerate(noise.tolist(), 1):
            metrics = {name: least + size * abs(a) for name, (least, size) in OTHERS.items()}
            metrics |= {"loss": 2.5 + 6 / step**0.4 + b / 30, "tokens": 524_288 * step}
            metrics |= {"step_seconds": 0.25 + c * c / 200 + 20 * (step == 1), "step_flops": 2e14}
            if step % 500 == 0:
                metrics["evaluation_loss"] = 2.6 + 6 / step**0.4 + c / 200
            log.write(step, metrics)


def measured(text: str, folder: Path, address: str = "") -> list[float]:
    """Opens a page in Chromium with the probe, which the page's policy would not let in."""
    start, _, rest = text.partition('<meta http-equiv="Content-Security-Policy"')
    content = (start + PROBE + rest.partition(">")[2]).encode("utf-8", "backslashreplace")
    found: queue.Queue[list[float]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *arguments: object) -> None: ...

    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if browser is None:
        sys.exit("no chromium or google-chrome is on the PATH: apt-get install chromium")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # Without a debugging port, a browser without a window ends once the page has loaded.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    options += ["--window-size=1300,900", f"--user-data-dir={folder}/browser"]
    url = f"http://127.0.0.1:{server.server_port}/{address}"
    process = subprocess.Popen([browser, *options, url], stderr=subprocess.DEVNULL)
    try:
        return found.get(timeout=300)
    finally:
        process.terminate()
        process.wait()
        server.shutdown()


if __name__ == "__main__":
    app.run(main)
