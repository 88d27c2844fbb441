"""Windows and kinds of layers that alternate."""


def each_nth(period: int, layers: int) -> list[bool]:
    """For each layer: whether it is a `period`-th one.

    Raises:
      ValueError: if `period` is not positive.
    """
    if period < 1:
        raise ValueError(f"the period of layers must be at least 1, got {period}")
    return [(layer + 1) % period == 0 for layer in range(layers)]


def short_and_long(
    layers: int, short: int | None, period: int, long: int | None = None
) -> list[int | None]:
    """A window for each layer, as `llama(window=…)` takes them: `long` in each `period`-th layer
    and in the last one, `short` in the others. `None`: all positions.

    Raises:
      ValueError: if `period` is not positive.
    """
    is_long = [*each_nth(period, layers)[:-1], True][:layers]
    return [long if each else short for each in is_long]
