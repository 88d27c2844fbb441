"""Sizes of attention and its windows, as families take and check them."""

_MOST = {"layers": 10_000}  # each of which is made by itself; of the others, so that int32 has them


def head_sizes(
    embed: int, heads: int, kv_heads: int | None, head_dim: int | None, **others: int
) -> tuple[int, int]:
    """`kv_heads`, by default `heads`, and `head_dim`, by default embed / heads.

    Args:
      others: sizes that are only checked, by name.

    Raises:
      ValueError: if a size is not positive or beyond all use, or `heads` does not divide `embed`
        where it has to.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    for name, size in {"embed": embed, "heads": heads, "kv_heads": kv_heads, **others}.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
        if size > (most := _MOST.get(name, 2**31 - 1)):
            raise ValueError(f"{name} must be at most {most:,}, got {size:,}")
    if head_dim is None and embed % heads:
        raise ValueError(f"embed = {embed} must be a multiple of heads = {heads}, or give head_dim")
    return kv_heads, embed // heads if head_dim is None else head_dim


def rotated_coordinates(head_dim: int, fraction: float) -> int:
    """How many coordinates of a head have rotary positions, the share `fraction` of them.

    Raises:
      ValueError: if that is a part of a head that no pairs fill.
    """
    rotated = int(head_dim * fraction)
    if fraction != 1 and (rotated < 2 or rotated % 2):
        raise ValueError(
            f"rotary_fraction = {fraction} of head_dim = {head_dim} is {rotated} coordinates to "
            "rotate: it takes an even number, at least 2"
        )
    return rotated


def short_and_long(
    layers: int, short: int | None, period: int, long: int | None = None
) -> list[int | None]:
    """A window for each layer: `long` in each `period`-th one and in the last, `short` in the
    others, as `llama(window=…)` takes them. `None`: all positions.

    Raises:
      ValueError: if `period` is not positive.
    """
    if period < 1:
        raise ValueError(f"the period of short and long windows must be at least 1, got {period}")
    return [
        long if (layer + 1) % period == 0 or layer == layers - 1 else short
        for layer in range(layers)
    ]
