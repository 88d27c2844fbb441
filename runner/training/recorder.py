"""Records step metrics in metrics.jsonl and shows them on the terminal."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lmlib.experiment.stages import at
from lmlib.metrics.log import MetricsLog, mfu
from lmlib.metrics.tensorboard import TensorBoard
from lmlib.train import Metrics
from runner.monitoring.goodput import GoodputLog
from runner.monitoring.phases import Phase
from runner.training.run import Run
from runner.training.starting_point import StartingPoint

Line = dict[str, Any]  # metrics with the value None are not written


@contextlib.contextmanager
def metrics_log(run: Run, beginning: StartingPoint) -> Iterator[MetricsLog]:
    """Opens metrics.jsonl and the metric sinks; enters the trackers phase on exit."""

    def lost(what: str) -> None:
        run.lock.check()  # the file may belong to another run now
        run.tell(f"WARNING: {what} while this run went on: its lines are put back")

    run.lock.check()  # MetricsLog creates a file right away
    with MetricsLog(
        run.workdir,
        None if beginning.is_new_fork else beginning.step or None,
        run.primary,
        lost,
        (TensorBoard, *run.experiment.sinks, *run.options.sinks),
        run.tell,
        beginning.first,
        run.lock.check,
    ) as log:
        try:
            yield log
        finally:
            run.phases.enter(Phase.TRACKERS)


class Recorder:
    """Times steps and writes their metrics; `tokens` counts the target tokens trained on so far.

    `tokens_per_second` and MFU count every position that the devices process, including padding.
    """

    def __init__(self, run: Run, log: MetricsLog, goodput: GoodputLog, tokens: int):
        experiment, self.tokens = run.experiment, tokens
        self._sizes = {
            steps: (stage.step_tokens, stage.flops_per_token(causal=False))
            for steps, stage in experiment.stages.items()
        }
        self._devices = list(experiment.mesh.devices.flat)
        metrics = experiment.objective.metrics
        self._loss_name = experiment.objective.loss_name
        self._shown = [name for name, metric in metrics.items() if metric.shown]
        self._log = log
        self._progress = run.progress
        self._goodput = goodput
        self.restart_clock()

    def restart_clock(self) -> None:
        """Starts timing the next step."""
        self._clock = time.perf_counter()

    def read(self, step: int, metrics: Metrics, data_wait_seconds: float) -> Line:
        """Waits for a step and returns its metrics.

        The step's time begins at the end of the previous step, or at `restart_clock`, and includes
        the `data_wait_seconds` in which the loop waited for its batch.
        """
        if self._devices[0].platform != "cpu":  # NumPy reads CPU arrays without a copy
            metrics = jax.device_get(metrics)
        values = {name: np.asarray(value).item() for name, value in metrics.items()}
        seconds = time.perf_counter() - self._clock
        self.restart_clock()
        valid = int(values.pop("tokens"))
        self.tokens += valid
        positions, flops_per_token = at(self._sizes, step - 1)
        tokens_per_second = positions / seconds
        return {
            "step": step,
            "loss": values.pop("loss"),
            **values,
            "valid_tokens": valid,
            "tokens": self.tokens,
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds,
            "data_wait_seconds": data_wait_seconds,
            "step_flops": positions * flops_per_token,
            "mfu": mfu(flops_per_token, tokens_per_second, self._devices),
            "peak_memory_bytes": _peak_memory(),
        }

    def write(self, line: Line) -> None:
        """Writes a line of metrics, and adds the goodput so far."""
        metrics = {name: value for name, value in line.items() if name != "step"}
        metrics["goodput"] = self._goodput.update(line["step"])
        self._log.write(line["step"], metrics)
        self._progress.update(
            line["step"],
            loss=line["loss"],
            seconds=line["step_seconds"],
            tokens_per_second=line["tokens_per_second"],
            mfu=line["mfu"],
            others={name: line[name] for name in self._shown},
            loss_name=self._loss_name,
        )

    def add(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Adds metrics to the newest line, which belongs to `step`."""
        self._log.add(step, metrics)


def _peak_memory() -> int | None:
    """Returns the highest peak memory of the local devices, in bytes; `None` if unknown."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((each.get("peak_bytes_in_use", 0) for each in statistics), default=0) or None
