"""Meanings of the numbers in metrics.jsonl, for pages of runs and for docs/running.md."""

from collections.abc import Iterator
from typing import NamedTuple

EVALUATION, VALIDATION = "evaluation_", "validation_"  # on part of the split; on all of it


class Meaning(NamedTuple):
    """The meaning of a metric.

    Attributes:
      name: its key; the part after "/" stands for any name.
      unit: the unit; empty for counts and ratios.
      text: the explanation.
    """

    name: str
    unit: str
    text: str


MEANINGS = (
    Meaning("step", "", "batches seen"),
    Meaning(
        "loss",
        "nats per target token",
        "training loss without z-loss; other objectives state their own unit and add metrics",
    ),
    Meaning("grad_norm", "", "Euclidean norm of the gradient, before clipping"),
    Meaning("parameter_norm", "", "Euclidean norm of the weights that train, before the update"),
    Meaning("update_norm", "", "Euclidean norm of the update; 0 if it was skipped"),
    Meaning("learning_rate", "", "learning rate of the update"),
    Meaning("valid_tokens", "tokens", "targets of this batch that count in the loss"),
    Meaning("tokens", "tokens", "targets that counted so far"),
    Meaning("tokens_per_second", "1/s", "positions per second, with padding"),
    Meaning("step_seconds", "s", "time of the step, with its wait for the batch"),
    Meaning("data_wait_seconds", "s", "time of the step spent waiting for the batch"),
    Meaning(
        "step_flops",
        "FLOPs",
        "model FLOPs of the step, forward and backward, without recomputation, with full attention",
    ),
    Meaning("mfu", "", "model FLOPs over the dense bf16 peak, on known accelerators"),
    Meaning(
        "peak_memory_bytes", "B", "largest memory in use on a device, if the device reports it"
    ),
    Meaning("goodput", "", "fraction of wall time since the first start spent on new steps"),
    Meaning("skipped_updates", "", "number of skipped updates so far"),
    Meaning("skipped_in_a_row", "", "number of skipped updates since the last applied one"),
    Meaning(
        "empty_batches", "", "number of batches so far without targets, and thus without an update"
    ),
    Meaning(
        "evaluation_loss",
        "nats per target token",
        "loss on the first evaluation.batches batches of the validation split; validation_loss, at "
        "the end of a run, is the loss on the whole split",
    ),
    Meaning(
        "evaluation_loss/NAME", "nats per target token", "loss on one of several validation sets"
    ),
    Meaning(
        "evaluation_bits_per_byte",
        "bits per byte",
        "validation loss per byte; comparable across tokenizers",
    ),
    Meaning("grad_norm/PART", "", "gradient norm of one layer or part, always on the same batch"),
    Meaning("weight_norm/PART", "", "Euclidean norm of the weights of one layer or part"),
    Meaning("output_rms/PART", "", "root mean square of the residual stream after the part"),
)
_BY_NAME = {each.name.partition("/")[0] + "/" * ("/" in each.name): each for each in MEANINGS}


def meaning(name: str) -> Meaning | None:
    """Returns the meaning of the metric `name`; `None` if it is not one of lmlib's own.

    The prefix "evaluation_" before a known metric means that metric on the validation split.
    """
    whole, slash, _ = name.partition("/")
    if (found := _BY_NAME.get(whole + slash)) is not None:
        return found
    base = _BY_NAME.get(whole.removeprefix(EVALUATION))
    if not whole.startswith(EVALUATION) or base is None:
        return None
    return Meaning(name, base.unit, f"{base.name} on the validation split")


def markdown() -> Iterator[str]:
    """Yields the lines of the table in docs/running.md."""
    yield "| key in `metrics.jsonl` | unit | meaning |"
    yield "|---|---|---|"
    for each in MEANINGS:
        yield f"| `{each.name}` | {each.unit} | {each.text} |".replace("|  |", "| |")
