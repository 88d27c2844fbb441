"""Measures the page of many long runs in Chromium: its size, its start and how it scrolls.

    python benchmarks/pages.py [--runs=200] [--steps=10000] [--folder=KEPT]

Prints MB, the seconds from navigation until the first chart is drawn and until the browser is idle,
and the longest task of the browser's main thread while the page scrolls. Exits with 1 if the page
has `--most_mb` or more, the first chart takes `--most_seconds`, a task takes `--most_ms`, or a
chart on the way was not drawn. Takes minutes; other programs on the machine disturb the times.
"""

import http.server
import itertools
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from made_up_runs import leave_files

from lmlib.metrics.log import MetricsLog
from lmlib.report import page, seen

_RUNS = flags.DEFINE_integer("runs", 200, "Runs on the page.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 10_000, "Steps of each run.", lower_bound=100)
_FOLDER = flags.DEFINE_string("folder", None, "Keeps the runs here, and uses those of before.")
_MB = flags.DEFINE_float("most_mb", 10.0, "Bound of the page's size.")
_SECONDS = flags.DEFINE_float("most_seconds", 3.0, "Bound of the time until the first chart.")
_MS = flags.DEFINE_float("most_ms", 100.0, "Bound of a task while the page scrolls.")
# Posts the seconds until the first chart and until nothing happens any more, the longest task since
# the first chart in ms, the number of charts and of those that were not drawn. With "?scroll" it
# scrolls down from the first chart on, 40 pixels a frame, and posts also how long that took.
PROBE = """<script>
const tasks = [], frame = () => new Promise(requestAnimationFrame);
const end = (from) => Math.max(from, ...tasks.map((each) => each.startTime + each.duration));
new PerformanceObserver((found) => tasks.push(...found.getEntries())).observe({ type: "longtask" });
(async () => {
  while (!document.querySelector("#charts canvas")) await frame();
  await frame();
  const begun = performance.now(), seen = [begun / 1e3];
  if (location.search) {
    while (scrollY + innerHeight + 1 < document.documentElement.scrollHeight) {
      scrollBy(0, 40);
      await frame();
    }
    seen.push((performance.now() - begun) / 1e3);
  }
  const charts = [...document.querySelectorAll("details[open] figure[data-metric]")];
  const empty = () => charts.filter((each) => !each.querySelector("canvas, .nothing")).length;
  while (performance.now() < end(begun) + (empty() ? 9000 : 1000)) await frame();
  const durations = tasks.filter((each) => each.startTime >= begun).map((each) => each.duration);
  seen.push(end(begun) / 1e3, Math.max(0, ...durations), charts.length, empty());
  fetch("/", { method: "POST", body: JSON.stringify(seen) });
})();
</script>"""


def main(_: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(_FOLDER.value or temporary) / f"{_RUNS.value}x{_STEPS.value}"
        for number, settings in enumerate(itertools.islice(_settings(), _RUNS.value)):
            _leave_run(folder / f"{number:03}", settings)
        begun = time.monotonic()
        text = page(seen([folder]))
        size, made = len(text.encode()) / 1e6, time.monotonic() - begun
        first, idle, _, charts, empty = measured(text, Path(temporary))
        _, took, _, longest, _, missed = measured(text, Path(temporary), "?scroll")
    print(
        f"{_RUNS.value} runs of {_STEPS.value:,} steps: {size:.2f} MB, made in {made:.0f} s\n"
        f"first chart after {first:.2f} s, all {charts} drawn and idle after {idle:.2f} s\n"
        f"longest task while scrolling for {took:.1f} s: {longest:.0f} ms"
    )
    late = first >= _SECONDS.value or longest >= _MS.value or empty or missed
    if size >= _MB.value or late:
        sys.exit(1)


def _settings():
    for rate, warmup, width in itertools.product(range(1000), range(5), (256, 384, 512, 768)):
        own = {"optimizer.peak_lr": f"{1e-4 * 1.2**rate:.4g}", "warmup": warmup, "width": width}
        yield own | {f"model.block.part_{i}.setting": f"of all runs, {i}" for i in range(130)}


def _leave_run(folder: Path, settings: dict[str, object]) -> None:
    """Writes the metrics of pretraining, of made-up values, unless they are there."""
    if folder.exists():
        return
    steps = _STEPS.value
    noise = np.random.default_rng(int(folder.name)).standard_normal((steps, 4))
    phases = ("start", "compile", "steps", "data", "saves", "evaluation", "samples", "repeated")
    spent = {phase: 100.0 * (1 + i) for i, phase in enumerate(phases)}
    leave_files(folder, {"steps": steps, **settings}, [], goodput=spent)
    with MetricsLog(folder, resume_step=None) as log:
        for step in range(1, steps + 1):
            a, b, c, d = noise[step - 1].tolist()
            seconds = 0.25 * (1 + c * c / 50) + 20 * (step == 1)
            metrics = {
                **{"loss": 2.5 + 6 / step**0.4 + a / 30, "grad_norm": 0.3 * (1 + b * b / 9)},
                **{"learning_rate": 1e-3 * min(1, step / 200) * (1 - step / (steps + 1))},
                **{"update_norm": 0.1 + abs(d) / 99, "parameter_norm": 180 + step**0.5 + a / 50},
                **{"empty_batches": 0, "skipped_in_a_row": 0, "skipped_updates": 0},
                **{"valid_tokens": 524_288 - (step % 3), "tokens": 524_288 * step},
                **{"tokens_per_second": 524_288 / seconds, "step_seconds": seconds},
                **{"data_wait_seconds": 1e-4 * abs(a), "step_flops": 2.5e14},
                **{
                    "mfu": 0.1 / seconds,
                    "goodput": 0.97 - 0.3 / step,
                    "z_loss": 1e-3 + b * b / 1e3,
                },
                **{"peak_memory_bytes": 30e9 + 1e8 * (step % 5)},
            }
            if step % 500 == 0:
                metrics |= {"evaluation_loss": 2.6 + 6 / step**0.4 + c / 200}
            log.write(step, metrics)


def measured(text: str, folder: Path, address: str = "") -> list[float]:
    """Opens a page in Chromium with the probe, which the page's policy would not let in."""
    start, policy, rest = text.partition('<meta http-equiv="Content-Security-Policy"')
    content = (start + PROBE + rest.partition(">")[2]).encode("utf-8", "backslashreplace")
    found: queue.Queue[list[float]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(content if self.path.partition("?")[0] == "/" else b"")

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *arguments: object) -> None: ...

    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if browser is None:
        sys.exit("no chromium or google-chrome is on the PATH: apt-get install chromium")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900"]
    url = f"http://127.0.0.1:{server.server_port}/{address}"
    command = [
        browser,
        *arguments,
        f"--user-data-dir={folder}/browser",
        "--remote-debugging-port=0",
    ]
    process = subprocess.Popen([*command, url], stderr=subprocess.DEVNULL)
    try:
        return found.get(timeout=300)
    finally:
        process.terminate()
        process.wait()
        server.shutdown()


if __name__ == "__main__":
    app.run(main)
