"""What a contender does: prompts in, then tokens one after another."""

import dataclasses
from pathlib import Path
from typing import Protocol

PROMPT, NEW = 512, 64  # tokens


@dataclasses.dataclass(frozen=True)
class Work:
    """Prompts of 512 tokens for the model in a folder of Hugging Face's, greedily continued."""

    size: str
    folder: Path
    prompts: tuple[tuple[int, ...], ...]


class Contender(Protocol):
    """Between the two calls the device has done what the first asks."""

    def prefill(self) -> None:
        """Computes the prompts and the token that follows each."""

    def decode(self) -> list[list[int]]:
        """After `prefill`: `NEW` more tokens of each; all that it has made."""
