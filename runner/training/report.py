"""The summary of a finished run: its numbers, a few sampled lines, what to try next."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lmlib.experiment import Experiment
from lmlib.metrics.log import mfu
from lmlib.state import State
from lmlib.storage.stored_json import read_json
from lmlib.storage.whole_file import write_whole
from lmlib.terminal.quantities import count_text
from lmlib.terminal.table import columns
from runner.training.validation import Validation
from runner.watch.goodput import Goodput

FILE_NAME = "result.json"
LOSS_STEPS = 50
_SUMMED = {"loss", "valid_tokens", "step_seconds", "tokens"}


@dataclasses.dataclass(frozen=True)
class Summary:
    """The numbers of a finished run; `None` where there is nothing to measure.

    `training_loss` is the mean over the last 50 steps, each token counting once, of what the
    objective calls `loss_name` and gives in `loss_unit`. `validation_loss`, in nats per token, is
    over `validated_on`: the whole of a finite validation set; of several named ones it is their
    mean, and `validation_sets` has each.
    `gzip_bits_per_byte` is what `gzip -9` needs for the validation texts, each alone. `goodput`
    tells where the wall time went.
    """

    steps: int
    parameters: int
    tokens: int
    tokens_per_second: float
    mfu: float | None
    training_loss: float
    validation_loss: float | None
    validation_bits_per_byte: float | None
    gzip_bits_per_byte: float | None
    samples: tuple[str, ...]
    loss_name: str = "loss"
    loss_unit: str = "nats per token"
    validated_on: str | None = None
    goodput: Goodput | None = None
    validation_sets: Mapping[str, Mapping[str, float | None]] = dataclasses.field(
        default_factory=dict
    )

    def save(self, workdir: Path) -> None:
        """Writes result.json, whole or not at all."""
        write_whole(workdir / FILE_NAME, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def text(self, workdir: Path, next_commands: Sequence[str]) -> str:
        """The table that a run ends with, and commands to try next."""
        optional = {
            "MFU": self.mfu and f"{self.mfu:.1%}",
            "validation loss": self.validation_loss
            and f"{self.validation_loss:.4f} nats per token, over {self.validated_on}",
            "validation bits per byte": self.validation_bits_per_byte
            and f"{self.validation_bits_per_byte:.3f}",
            "gzip -9 on the same texts": self.gzip_bits_per_byte
            and f"{self.gzip_bits_per_byte:.3f} bits per byte",
        }
        rows = [
            ("parameters", count_text(self.parameters)),
            ("tokens seen", count_text(self.tokens)),
            ("tokens per second", count_text(self.tokens_per_second)),
            (
                f"training {self.loss_name}",
                f"{self.training_loss:.4f} {self.loss_unit}, last {LOSS_STEPS} steps",
            ),
            *((name, value) for name, value in optional.items() if value),
            *(
                (f"validation loss, {name}", _loss_text(each["loss"], each["bits_per_byte"]))
                for name, each in self.validation_sets.items()
            ),
            ("the run's files", str(workdir)),
            *(("" if i else "try next", command) for i, command in enumerate(next_commands)),
        ]
        samples = [f"sampled: {text!r}" for text in self.samples]
        times = [] if self.goodput is None else [self.goodput.text(), ""]
        return "\n".join([*samples, *times, columns(rows)])


def _loss_text(loss: float | None, bits_per_byte: float | None) -> str:
    bits = "" if bits_per_byte is None else f", {bits_per_byte:.3f} bits per byte"
    return f"{loss:.4f} nats per token{bits}"


def finished_summary(workdir: Path, steps: int) -> Summary | None:
    """The summary that this run left when it made its last step, if it did.

    Raises ValueError, naming the file, if it is damaged.
    """
    file = workdir / FILE_NAME
    if not file.exists():
        return None
    try:
        summary = from_json(read_json(file))
        summary.text(workdir, ())  # which every field has to do with
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{file} is damaged ({error!r:.200})") from error
    return summary if summary.steps == steps else None


def from_json(saved: Mapping[str, Any]) -> Summary:
    """The summary whose `dataclasses.asdict` was written as JSON and read back."""
    goodput = saved["goodput"] and Goodput(**saved["goodput"])
    return Summary(**{**saved, "samples": tuple(saved["samples"]), "goodput": goodput})


def totals_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What a summary needs of the lines of metrics.jsonl; `None` if no line has it."""
    metrics = [line for line in metrics if line.keys() >= _SUMMED]
    if not metrics:
        return None
    recent = metrics[-LOSS_STEPS:]
    loss = sum(line["loss"] * line["valid_tokens"] for line in recent)
    return {
        "steps": len(metrics),
        "seconds": sum(line["step_seconds"] for line in metrics),
        "tokens": metrics[-1]["tokens"],
        "training_loss": loss / max(sum(line["valid_tokens"] for line in recent), 1),
    }


def summarise(
    experiment: Experiment,
    state: State,
    totals: Mapping[str, Any],
    validation: Validation | None,
) -> Summary:
    """Evaluates the final state, and puts that and `totals_of` together; without samples."""
    data = experiment.data
    positions = totals["steps"] * data.batch_size * data.sequence_length
    tokens_per_second = positions / totals["seconds"]
    flops = experiment.flops_per_token(causal=False)
    summary = Summary(
        steps=experiment.steps,
        parameters=sum(weight.size for weight in jax.tree.leaves(state.whole_model)),
        tokens=totals["tokens"],
        tokens_per_second=tokens_per_second,
        mfu=mfu(flops, tokens_per_second, list(experiment.mesh.devices.flat)),
        training_loss=totals["training_loss"],
        validation_loss=None,
        validation_bits_per_byte=None,
        gzip_bits_per_byte=None,
        samples=(),
        loss_name=experiment.objective.loss_name,
        loss_unit=experiment.objective.loss_unit,
    )
    if validation is None:
        return summary
    total, by_name = validation.whole(state.whole_model)
    return dataclasses.replace(
        summary,
        validation_loss=total.loss,
        validation_bits_per_byte=total.bits_per_byte,
        validated_on=validation.seen(whole=True),
        gzip_bits_per_byte=validation.gzip_bits_per_byte,
        validation_sets={name: dataclasses.asdict(each) for name, each in by_name.items()},
    )
