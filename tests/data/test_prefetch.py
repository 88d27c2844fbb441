import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lmlib.data import Batch, Prefetch, Synthetic

SHARDING = NamedSharding(
    jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1]),
    PartitionSpec("data"),
)


class Failing(Synthetic):
    """Synthetic data that cannot be read from step 3 on, and counts what was asked for."""

    def __init__(self) -> None:
        super().__init__(50, 2, 4)
        self.asked: list[int] = []

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        self.asked.append(step)
        if step >= 3:
            raise OSError("the disk is gone")
        return super().batch(step, rows)


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_yields_every_step_in_order(depth: int) -> None:
    source = Synthetic(50, 2, 4)
    with Prefetch(source, SHARDING, start=5, stop=11, depth=depth) as batches:
        steps = []
        for step, batch in batches:
            steps.append(step)
            jax.tree.map(np.testing.assert_array_equal, batch, source.batch(step))
    assert steps == [5, 6, 7, 8, 9, 10]
    assert prefetch_threads() == []


def test_errors_surface_at_the_step_that_failed() -> None:
    batches = Prefetch(Failing(), SHARDING, start=1, stop=10)
    assert [next(batches)[0], next(batches)[0]] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone") as raised:
        next(batches)
    assert raised.value.__notes__ == ["while prefetching the batch of step 3"]
    assert list(batches) == []
    assert prefetch_threads() == []


def test_closing_early_ends_the_thread() -> None:
    source = Failing()
    with Prefetch(source, SHARDING, start=0, stop=10**9) as batches:
        assert next(batches)[0] == 0
    assert prefetch_threads() == []
    assert max(source.asked) <= 2
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


def test_nothing_to_do() -> None:
    with Prefetch(Synthetic(50, 2, 4), SHARDING, start=3, stop=3) as batches:
        assert list(batches) == []


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth of at least 1"):
        Prefetch(Synthetic(50, 2, 4), SHARDING, start=0, stop=1, depth=0)
