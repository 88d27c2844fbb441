"""The flags of the commands that make a split of flat tokens."""

import os

from absl import flags

from data_tools.held_out import VALIDATION, Part
from data_tools.source_flags import SPLIT
from data_tools.tokenizer import Tokenizer, load_tokenizer

TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    None,
    "A tokenizer.json, a folder holding one, a Hugging Face tokenizer, or 'bytes'.",
    required=True,
)
_BOS_TOKEN = flags.DEFINE_string(
    "bos_token", None, "The token that begins a document; --bos_token= for none."
)
_EOS_TOKEN = flags.DEFINE_string("eos_token", None, "The token that ends a document.")
OUT = flags.DEFINE_string("out", None, "The folder of the data set.", required=True)
_VALIDATION_FRACTION = flags.DEFINE_float(
    "validation_fraction",
    None,
    "Hold out this part of the documents, for instance 0.01, as the split 'validation'.",
)
_WORKERS = flags.DEFINE_integer(
    "workers",
    None,
    "Processes that tokenise; by default one for each core, on Ray one a shard.",
    lower_bound=0,
)


def tokenizer() -> Tokenizer:
    """The tokenizer that is asked for; raises as `load_tokenizer` does."""
    return load_tokenizer(TOKENIZER.value, _BOS_TOKEN.value, _EOS_TOKEN.value)


def parts() -> list[tuple[str, Part | None, float]]:
    """The name of each split to make, which part of the rows it has, and its share of them."""
    split, fraction = SPLIT.value, _VALIDATION_FRACTION.value
    if fraction is None:
        return [(split, None, 1.0)]
    if split == VALIDATION:
        raise ValueError(
            f"--validation_fraction makes the split {VALIDATION!r} besides that of --split: name "
            "another one there"
        )
    return [
        (split, Part(fraction, False), 1 - fraction),
        (VALIDATION, Part(fraction, True), fraction),
    ]


def workers(usual: int | None = None) -> int:
    """Processes that tokenise, `usual` if it is not said, by default one for each core that this
    process may run on."""
    if _WORKERS.value is not None:
        return _WORKERS.value
    if usual is not None:
        return usual
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
