"""A process that owns checkpoints in a bucket: `python -m buckets.owner URL ACT`.

It saves step 2, prints `ready`, waits for a line, acts, and then tries to save step 9.
"""

import sys

import jax
import numpy as np

from lmlib.checkpoint import Checkpoints, DamagedCheckpointError


def state(value: float) -> dict[str, jax.Array]:
    """Two arrays filled with `value`, on one device."""
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = {"matrix": np.full((4, 6), value, np.float32), "scalar": np.float32(value)}
    return {name: jax.device_put(array, everywhere) for name, array in arrays.items()}


def act(checkpoints: Checkpoints, how: str) -> None:
    """Saves step 4, ranks step 2, or sets it aside."""
    match how:
        case "save":
            checkpoints.save(4, state(4.0), {"by": "the first"})
            checkpoints.wait()
        case "rank":
            checkpoints.rank(2, 0.5)
        case "set aside":
            folder = checkpoints._directory / "2"
            checkpoints.set_aside([DamagedCheckpointError(folder, "a file", "is damaged")])


def main(url: str, how: str) -> None:
    checkpoints = Checkpoints(url, keep=1)
    checkpoints.save(2, state(2.0), {"by": "the first"})
    checkpoints.wait()
    print("ready", flush=True)
    sys.stdin.readline()
    for attempt in (lambda: act(checkpoints, how), lambda: save(checkpoints)):
        try:
            attempt()
        except OSError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        else:
            print("done", flush=True)


def save(checkpoints: Checkpoints) -> None:
    checkpoints.save(9, state(9.0), {"by": "the first"})
    checkpoints.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
