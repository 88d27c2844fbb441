"""Which tokens of a row each device along `context` has.

    order     device i of C has
    plain     the piece i of C
    balanced  the pieces i and 2C - 1 - i of 2C

In a balanced order causal attention is as much work for each device: an early piece sees few keys
and a late one many (Dubey et al. 2024, arXiv:2407.21783, §3.3.2). On one device both are the row as
it is.

Shapes: C devices along `context`, M pieces of each, S sequence.
"""

import numpy as np
from jaxtyping import Int

ORDERS = ("plain", "balanced")


def pieces_of_devices(devices: int, order: str) -> Int[np.ndarray, "c m"]:
    """Which pieces of a row each device has, in the order in which it has them.

    Raises:
      ValueError: if there is no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"the order of a sequence is one of {', '.join(ORDERS)}, got {order!r}")
    first_C = np.arange(devices)
    if order == "plain" or devices == 1:
        return first_C[:, None]
    return np.stack([first_C, 2 * devices - 1 - first_C], axis=1)


def places(length: int, devices: int, order: str) -> Int[np.ndarray, "s"]:
    """Where in its row each token stands, in the order of the devices: `row[places]` is that order.

    Raises:
      ValueError: if there is no such order, or the row does not divide into its pieces.
    """
    pieces_CM = pieces_of_devices(devices, order)
    if length % pieces_CM.size:
        raise ValueError(
            f"a row of {length} tokens does not divide into the {pieces_CM.size} pieces of a "
            f"{order} order over {devices} devices"
        )
    piece = length // pieces_CM.size
    return (pieces_CM.reshape(-1, 1) * piece + np.arange(piece)).reshape(-1)
