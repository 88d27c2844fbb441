"""Reports the progress of reading or writing weights."""

import time
from collections.abc import Callable

from lmlib.terminal.quantities import bytes_text

SECONDS = 10.0  # minimum time between lines


def told(doing: str, show: Callable[[str], None]) -> Callable[[int, int], None]:
    """Returns a progress callback for `lmlib.hf`, which passes a line to `show` periodically.

    Args:
      doing: the beginning of each line, such as "reading".

    Returns:
      A function of the bytes done and the total bytes.
    """
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= SECONDS:
            last = now
            show(f"{doing} {bytes_text(done)} of {bytes_text(total)}")

    return tell
