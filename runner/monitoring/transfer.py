"""How far the reading or writing of weights is."""

import time
from collections.abc import Callable

from lmlib.terminal.quantities import bytes_text

SECONDS = 10.0  # between lines


def told(doing: str, show: Callable[[str], None]) -> Callable[[int, int], None]:
    """What `lmlib.hf` calls with the bytes done and all bytes: `show` gets a line now and then."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= SECONDS:
            last = now
            show(f"{doing} {bytes_text(done)} of {bytes_text(total)}")

    return tell
