"""The summary of a finished run: metrics, samples, and commands to try next."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlib.data.compressors import saw_training_text
from lmlib.losses.objective import Objective
from lmlib.metrics.log import mfu, read_metrics
from lmlib.optim.average import evaluated_model
from lmlib.parallel.matrix import number_of_weights
from lmlib.runs.goodput import Goodput
from lmlib.runs.result import FILE_NAME, LOSS_STEPS, read_result
from lmlib.state import State
from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.local_folder import shown
from lmlib.terminal.quantities import count_text, mean_text
from lmlib.terminal.table import columns, wrapped
from runner.errors import ConfigError
from runner.monitoring.goodput import GoodputLog
from runner.processes.agreement import from_first
from runner.training.run import Run

_SUMMED = {"loss", "step_seconds", "tokens"}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured value with its unit."""

    value: float
    unit: str

    def __str__(self) -> str:
        return f"{mean_text(self.value, self.unit)} {self.unit}".strip()


@dataclasses.dataclass(frozen=True)
class Summary:
    """The final metrics of a run; `None` where there is nothing to measure.

    Attributes:
      steps: training steps.
      parameters: weights of the model.
      tokens: target tokens trained on.
      mean_tokens_per_second, mean_mfu: throughput and model FLOPs utilization over all steps.
      training_loss: the mean over the last 50 steps, weighted by tokens or pairs.
      loss_name, loss_unit: the objective's name and unit for the loss.
      samples: continuations of the experiment's prompts.
      validation: validation metrics by name ("validation_…"), without the evaluation suite.
      validated_on: describes the validation batches: all batches of each finite set.
      compressed_bits_per_byte: bits per byte of general compressors on the validation text, by
        their names in `lmlib.data.compressors`.
      goodput: the wall time by phase.
      flops_per_token: analytic FLOPs per position of a training step, averaged over the steps,
        without the causal saving.
      start: the random id of the start that wrote this summary.
      training: the objective's other metrics by name ("training_…"), over the steps of the loss.
    """

    steps: int
    parameters: int
    tokens: int
    mean_tokens_per_second: float
    mean_mfu: float | None
    training_loss: float
    loss_name: str
    loss_unit: str
    samples: tuple[str, ...] = ()
    validation: Mapping[str, Measured] = dataclasses.field(default_factory=dict)
    validated_on: str | None = None
    compressed_bits_per_byte: Mapping[str, float] = dataclasses.field(default_factory=dict)
    goodput: Goodput | None = None
    flops_per_token: float | None = None
    start: str = ""
    training: Mapping[str, Measured] = dataclasses.field(default_factory=dict)

    @property
    def validation_loss(self) -> float | None:
        """The validation loss in `loss_unit`; the mean if there are several sets."""
        measured = self.validation.get("validation_loss")
        return None if measured is None else measured.value

    def text(self, workdir: Path, next_commands: Sequence[str]) -> str:
        """Returns the final table of a run, with commands to try next."""
        page, last = workdir / "report.html", min(LOSS_STEPS, self.steps)
        loss = f"{self.training_loss:.4f} {self.loss_unit}, last {last} steps"
        rows = [
            ("parameters", count_text(self.parameters)),
            ("tokens seen", count_text(self.tokens)),
            ("mean tokens per second", count_text(self.mean_tokens_per_second)),
            (f"training {self.loss_name}", loss),
            *([("mean MFU", f"{self.mean_mfu:.1%}")] if self.mean_mfu else []),
            *([] if self.validation else self._training_rows(last)),
            *self._validation_rows(),
            ("the run's files", shown(workdir)),
            *([("its page", str(page))] if page.exists() else []),
        ]
        width = max(len(name) for name, _ in rows)
        # Unlike a table's cells, commands are never wrapped, so they can be copied.
        commands = (
            f"{'' if i else 'try next':{width}}  {each}" for i, each in enumerate(next_commands)
        )
        samples = [wrapped(f"sampled: {text!r}") for text in self.samples]
        times = [] if self.goodput is None else [self.goodput.text(), ""]
        return "\n".join([*samples, *times, columns(rows), *commands])

    def _training_rows(self, last: int) -> Iterator[tuple[str, str]]:
        for name, each in self.training.items():
            yield name.replace("_", " "), f"{each}, last {last} steps"

    def _validation_rows(self) -> Iterator[tuple[str, str]]:
        for name, each in self.validation.items():
            metric, _, of = name.removeprefix("validation_").partition("/")
            words = self.loss_name if metric == "loss" else metric.replace("_", " ")
            over = f", over {self.validated_on}" if name == "validation_loss" else ""
            text = f"{each}{over}"
            if words == each.unit:
                text = f"{each.value:.3f}"
            yield f"validation {words}{of and f', {of}'}", text
        for code, bits in self.compressed_bits_per_byte.items():
            seen = "seen" if saw_training_text(code) else "unseen"
            yield code, f"{bits:.3f} bits per byte, training text {seen}"


def finished_summary(workdir: Path, steps: int) -> Summary | None:
    """Returns the saved summary of a run with `steps` steps; `None` if there is none.

    Raises ValueError if the file is damaged; the message names it.
    """
    if (found := read_result(workdir)) is None:
        return None
    try:
        summary = from_json(found)
    except (KeyError, TypeError) as error:  # the types of values have been checked
        raise ValueError(f"{workdir / FILE_NAME} is damaged ({error!r:.200})") from error
    return summary if summary.steps == steps else None


def from_json(saved: Mapping[str, Any]) -> Summary:
    """Rebuilds a summary from the JSON form of its `dataclasses.asdict`."""
    return Summary(
        **{
            **saved,
            "samples": tuple(saved["samples"]),
            **{
                part: {name: Measured(**each) for name, each in saved.get(part, {}).items()}
                for part in ("training", "validation")
            },
            "goodput": saved["goodput"] and Goodput(**saved["goodput"]),
        }
    )


def earlier_summary(run: Run) -> Summary | None:
    """Returns the saved summary of a finished run; `None` if there is none.

    Process 0 reads it for all processes.
    """
    try:
        found = finished_summary(run.workdir, run.experiment.steps)
    except ValueError as error:
        run.tell(f"WARNING: {error}: it is made again")
        found = None
    saved = from_first(None if found is None else dataclasses.asdict(found))
    return saved and from_json(saved)


def finish(run: Run, state: State, goodput: GoodputLog) -> Summary:
    """Evaluates the final state, samples from it, and writes the summary.

    Raises ConfigError if metrics.jsonl is missing.
    """
    experiment, validation, workdir = run.experiment, run.validation, run.workdir
    objective, stages = experiment.objective, experiment.stages
    lines = read_metrics(workdir) if run.primary else []
    totals = from_first(totals_of(lines, objective, stages) if run.primary else None)
    if totals is None:
        raise ConfigError(f"{workdir} has a finished checkpoint but no metrics.jsonl")
    tokens_of = [n * e.step_tokens for e, n in zip(stages.values(), totals["steps"], strict=True)]
    positions = sum(tokens_of)
    flops = sum(
        tokens / positions * stage.flops_per_token(causal=False)
        for stage, tokens in zip(stages.values(), tokens_of, strict=True)
    )
    validated: dict[str, Any] = {}
    if validation is not None:
        metrics, by_batch = validation.whole(state)
        if run.primary:
            by_batch.save(workdir, run.lock.check)
        validated = {
            "validation": {n: Measured(value, validation.units[n]) for n, value in metrics.items()},
            "validated_on": validation.seen(whole=True),
            "compressed_bits_per_byte": validation.compressed_bits_per_byte,
        }
    texts = run.sample(experiment.steps, evaluated_model(state))
    tokens_per_second = positions / totals["seconds"]
    summary = Summary(
        steps=experiment.steps,
        parameters=number_of_weights(state.whole_model),
        tokens=totals["tokens"],
        mean_tokens_per_second=tokens_per_second,
        mean_mfu=mfu(flops, tokens_per_second, list(experiment.mesh.devices.flat)),
        training_loss=totals["training"].pop("loss"),
        loss_name=objective.loss_name,
        loss_unit=objective.metrics["loss"].unit,
        training={
            f"training_{name}": Measured(value, objective.metrics[name].unit)
            for name, value in totals["training"].items()
        },
        samples=texts,
        goodput=goodput.total(),
        flops_per_token=flops,
        start=run.lock.start,
        **validated,
    )
    if run.primary:  # written last: result.json marks a run as finished
        content = json.dumps(dataclasses.asdict(summary), indent=2) + "\n"
        write_atomically(workdir / FILE_NAME, content, run.lock.check)
    return summary


def leave_report(run: Run, replace: bool = True) -> None:
    """Writes report.html, unless it exists and `replace` is false."""
    from lmlib.report.page import FILE_NAME, try_write_page  # which only the end of a run needs

    if replace or not (run.workdir / FILE_NAME).exists():
        try_write_page(run.workdir, run.tell, run.lock.check)


def totals_of(
    metrics: Sequence[Mapping[str, Any]], objective: Objective, stages: Iterable[range]
) -> dict[str, Any] | None:
    """Returns the totals of metrics.jsonl for a summary; `None` if no line has them.

    The objective's units weight each line in the means of its metrics. Lines are counted in each of
    the `stages`, ranges of steps from 0.
    """
    weight = "valid_tokens" if objective.units == "tokens" else objective.units
    metrics = [line for line in metrics if line.keys() >= {*_SUMMED, weight}]
    if not metrics:
        return None
    recent = metrics[-LOSS_STEPS:]
    counts = [line[weight] for line in recent]
    names = [name for name in objective.metrics if all(name in line for line in recent)]
    return {
        "steps": [sum(line["step"] - 1 in steps for line in metrics) for steps in stages],
        "seconds": sum(line["step_seconds"] for line in metrics),
        "tokens": metrics[-1]["tokens"],
        "training": {
            name: sum(line[name] * n for line, n in zip(recent, counts, strict=True))
            / max(sum(counts), 1)
            for name in names
        },
    }
