"""Progress lines at intervals of a few seconds."""

import time
from collections.abc import Callable


def now_and_then(
    show: Callable[[str], None], seconds: float = 10.0
) -> Callable[[Callable[[], str]], None]:
    """Returns a function that shows the line its argument makes, at most once every `seconds`."""
    last = time.monotonic()

    def tell(line: Callable[[], str]) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= seconds:
            last = now
            show(line())

    return tell
