"""What each number of metrics.jsonl means: for pages of runs, and for docs/running.md."""

from collections.abc import Iterator
from typing import NamedTuple

EVALUATION, VALIDATION = "evaluation_", "validation_"  # of a part of the split, of all of it


class Meaning(NamedTuple):
    """Of a metric.

    Attributes:
      name: its key; the part after "/" stands for any name.
      unit: nothing where it counts or is a pure number.
      text: what it is.
    """

    name: str
    unit: str
    text: str


MEANINGS = (
    Meaning("step", "", "batches seen"),
    Meaning(
        "loss",
        "nats per target token",
        "what is minimised, without z-loss; other objectives say their own unit, and add metrics",
    ),
    Meaning("grad_norm", "", "Euclidean norm of the gradient, before clipping"),
    Meaning("parameter_norm", "", "Euclidean norm of the weights that train, before the update"),
    Meaning("update_norm", "", "Euclidean norm of the update; 0 if it was not made"),
    Meaning("learning_rate", "", "of the update"),
    Meaning("valid_tokens", "tokens", "targets of this batch that count"),
    Meaning("tokens", "tokens", "targets that counted, so far"),
    Meaning("tokens_per_second", "1/s", "positions, padding included"),
    Meaning("step_seconds", "s", "of the step, its wait for the batch included"),
    Meaning("data_wait_seconds", "s", "the part of the step spent waiting for the batch"),
    Meaning(
        "step_flops",
        "FLOPs",
        "what the model needs for the step's positions, forward and backward, recomputation not "
        "counted, attention without the causal saving",
    ),
    Meaning("mfu", "", "on known accelerators: the model's FLOPs over the dense bf16 peak"),
    Meaning("peak_memory_bytes", "B", "on devices that say: the most that one has had in use"),
    Meaning(
        "goodput",
        "",
        "share of the wall time, since the run first began, spent on steps that were not made "
        "before",
    ),
    Meaning("skipped_updates", "", "updates that were not made, in all"),
    Meaning("skipped_in_a_row", "", "updates that were not made since the last that was"),
    Meaning("empty_batches", "", "batches without a target, and so without an update, in all"),
    Meaning(
        "evaluation_loss",
        "nats per target token",
        "the loss over the first evaluation.batches batches of the validation split; over all of "
        "it, at the end of a run, the loss is validation_loss",
    ),
    Meaning("evaluation_loss/NAME", "nats per target token", "the same over one of several sets"),
    Meaning(
        "evaluation_bits_per_byte",
        "bits per byte",
        "the same for each byte of text, so that tokenizers can be compared",
    ),
    Meaning(
        "grad_norm/PART", "", "of one layer, or part, of the model, on one batch, always the same"
    ),
    Meaning("weight_norm/PART", "", "Euclidean norm of the weights of one layer or part"),
    Meaning("output_rms/PART", "", "root mean square of the residual stream after it"),
)
_BY_NAME = {each.name.partition("/")[0] + "/" * ("/" in each.name): each for each in MEANINGS}


def meaning(name: str) -> Meaning | None:
    """That of the metric `name`; `None` if it is not one of lmlib's own.

    Another metric that has "evaluation_" before a known one is that one on the validation split.
    """
    whole, slash, _ = name.partition("/")
    if (found := _BY_NAME.get(whole + slash)) is not None:
        return found
    base = _BY_NAME.get(whole.removeprefix(EVALUATION))
    if not whole.startswith(EVALUATION) or base is None:
        return None
    return Meaning(name, base.unit, f"{base.name} on the validation split")


def markdown() -> Iterator[str]:
    """The lines of the table in docs/running.md."""
    yield "| key in `metrics.jsonl` | unit | meaning |"
    yield "|---|---|---|"
    for each in MEANINGS:
        yield f"| `{each.name}` | {each.unit} | {each.text} |".replace("|  |", "| |")
