"""A run without a model that a SIGKILL ends: `python tracked_run.py WORKDIR TRACKER MOMENT`."""

import json
import os
import signal
import sys
from pathlib import Path

from lmlib import trackers
from lmlib.metrics.log import MetricsLog, read_metrics
from lmlib.storage.atomic_file import write_atomically

STEPS, EVALUATIONS = 6, (3, 6)
ODD = "validation_loss/web@v2 (new)"


def main(workdir: Path, tracker: str, moment: str, package_settings: dict) -> None:
    """Ends, or is killed at `moment`: "sent 4", "evaluated 3", "first params" …"""

    def reach(what: str) -> None:
        if what == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    class Killed(getattr(trackers, tracker)):
        patience = package_settings.pop("patience", 60)

        def send(self, step, metrics, texts):
            reach(f"sending {step}")
            super().send(step, metrics, texts)
            reach(f"sent {step}")

        def _log(self, kind, entities):  # MLflow's requests
            super()._log(kind, entities[:100])
            reach(f"first {kind}")
            super()._log(kind, entities[100:])

        def finish(self):
            reach("finishing")
            super().finish()
            reach("finished")

    def make(folder, first_step):
        return Killed(folder, first_step, **package_settings)

    norms = {f"norm/{number}": 0.5 for number in range(2)}
    (workdir / "samples").mkdir(parents=True, exist_ok=True)
    checkpoint = workdir / "checkpoint"
    resumed = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with MetricsLog(workdir, resumed or None, sinks=[make]) as log:
        settings = {"sinks[0].project": "a", "long": "x" * 7000, **SETTINGS}
        (workdir / "settings.json").write_text(json.dumps(settings))
        for step in range(resumed, STEPS + 1):
            if step > resumed:
                log.write(step, {"loss": 1 / step, "skew": float("nan"), "time": step, **norms})
            if step % 2 == 0:
                write_atomically(checkpoint, str(step))
                reach(f"saved {step}")
            line = [each for each in read_metrics(workdir) if each["step"] == step]
            if step in EVALUATIONS and ODD not in line[0]:
                log.add(step, {ODD: 2 / step})
                reach(f"evaluated {step}")
                (workdir / f"samples/{step:08}.txt").write_text(f"once <b>{step}\n")
        (workdir / "result.json").write_text(json.dumps({"steps": STEPS, "training_loss": 0.5}))


SETTINGS = {f"model.layers.{number}": str(number) for number in range(150)}

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
