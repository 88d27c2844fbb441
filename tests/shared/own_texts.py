"""A small data set of texts with both splits, as a user makes it."""

from pathlib import Path

from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.source import Texts
from data_tools.tokenizer import load_tokenizer

HELD_OUT = ["A fox came to the gate at night.", "  It had\tno name.\nNobody asked.", "ünï" * 20]


def write_own_texts(path: Path, documents: int = 100) -> None:
    """Writes `documents` documents of 44 tokens for training, and HELD_OUT in its order."""
    texts = {"train": [f"{i:03d} The dog lies in the sun, and so it is." for i in range(documents)]}
    for split, documents_of in (texts | {"validation": HELD_OUT}).items():
        pretokenize(Texts(documents_of), load_tokenizer("bytes"), path, split, workers=0)
