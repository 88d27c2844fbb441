"""From token ids back to text, with what a data set keeps of its tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

from data_tools.tokenizer import load_tokenizer
from lmlib.data.metadata import TOKENIZER_FILE, TokenizerIdentity

Decode = Callable[[Sequence[int]], str]


def decoder(path: Path, tokenizer: TokenizerIdentity | None) -> Decode | None:
    """What turns ids of the data set `path` into text; None if it keeps no tokenizer.

    Raises ValueError if its tokenizer.json is not valid.
    """
    if tokenizer is not None and tokenizer.name == "bytes" and tokenizer.sha256 is None:
        return load_tokenizer("bytes").decode
    file = path / TOKENIZER_FILE
    return load_tokenizer(str(file)).decode if file.is_file() else None
