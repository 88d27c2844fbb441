"""The order of a row's tokens on the devices along `context`.

    order     device i of C has
    plain     the piece i of C
    zigzag    the pieces i and 2C - 1 - i of 2C

The zigzag order gives each device the same amount of causal attention: an early piece sees few
keys and a late one many (Dubey et al. 2024, arXiv:2407.21783, §3.3.2). On one device both orders
leave the row unchanged.

Shapes: C devices along `context`, M pieces of each, S sequence.
"""

import numpy as np
from jaxtyping import Int

ORDERS = ("plain", "zigzag")


def pieces_of_devices(devices: int, order: str) -> Int[np.ndarray, "c m"]:
    """The pieces of a row on each device, in the device's order; ValueError if it is unknown."""
    if order not in ORDERS:
        raise ValueError(f"the order of a sequence is one of {', '.join(ORDERS)}, got {order!r}")
    first_C = np.arange(devices)
    if order == "plain" or devices == 1:
        return first_C[:, None]
    return np.stack([first_C, 2 * devices - 1 - first_C], axis=1)


def places(length: int, devices: int, order: str) -> Int[np.ndarray, "s"]:
    """The position in its row of each token, in the order of the devices: `row[places]`.

    Raises ValueError if the order is unknown, or the row does not divide into its pieces.
    """
    pieces_CM = pieces_of_devices(devices, order)
    if length % pieces_CM.size:
        raise ValueError(
            f"a row of {length} tokens does not divide into the {pieces_CM.size} pieces of a "
            f"{order} order over {devices} devices"
        )
    piece = length // pieces_CM.size
    return (pieces_CM.reshape(-1, 1) * piece + np.arange(piece)).reshape(-1)
