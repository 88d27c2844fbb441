"""Windows and kinds of layers that alternate."""


def each_nth(period: int, layers: int) -> list[bool]:
    """Returns for each layer True if its number, counted from 1, is a multiple of `period`."""
    if period < 1:
        raise ValueError(f"the period of layers must be at least 1, got {period}")
    return [(layer + 1) % period == 0 for layer in range(layers)]


def short_and_long(
    layers: int, short: int | None, period: int, long: int | None = None
) -> list[int | None]:
    """Returns a window for each layer, for `llama(window=…)`; `None`: all positions.

    It is `long` in every `period`-th layer and in the last one, and `short` in the others.
    """
    is_long = [*each_nth(period, layers)[:-1], True][:layers]
    return [long if each else short for each in is_long]
