"""Where the rows of a batch come from."""

from lmlib.data import FlatTokens, Mixture, Source


def row_origins(source: Source, step: int) -> list[str | None]:
    """For each row of the batch of `step`, the stored sequence it is; None if that is unknown.

    For a `Mixture` the name of the source comes first.
    """
    if isinstance(source, FlatTokens):
        return [
            f"sequence {number:,} of {source.sequences:,}" if number >= 0 else None
            for number in source.sequence_numbers(step).tolist()
        ]
    if isinstance(source, Mixture):
        return [
            _in_mixture(source, name, number)
            for name, number in zip(*source.origins(step), strict=True)
        ]
    return [None] * source.batch_size


def _in_mixture(mixture: Mixture, name: str, number: int) -> str:
    step, row = divmod(number, mixture.batch_size)
    origin = row_origins(mixture.sources[name], step)[row]
    return name if origin is None else f"{name}, {origin}"
