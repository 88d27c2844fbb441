import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lmlib.data.prefetch import Prefetch, ReadAhead
from lmlib.data.synthetic import Synthetic

SHARDING = NamedSharding(
    jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1]),
    PartitionSpec("data"),
)


class Asked(Synthetic):
    """Synthetic data that calls `before` with each step that is asked for, and counts them."""

    def __init__(self, before=lambda step: None):
        super().__init__(50, 2, 4)
        self.before, self.asked = before, []

    def batch(self, step, rows=slice(None)):
        self.asked.append(step)
        self.before(step)
        return super().batch(step, rows)


class Counting(Asked):
    """One whose state is the number of batches that it has given."""

    def state(self, step):
        return {"step": step, "given": len(self.asked)}

    def restore(self, step, states): ...


def fail_from_step_3(step):
    if step >= 3:
        raise OSError("the disk is gone")


def prefetch_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_yields_every_step_in_order(depth):
    source = Synthetic(50, 2, 4)
    with Prefetch(source, SHARDING, start=5, stop=11, depth=depth) as batches:
        steps = []
        for step, batch in batches:
            steps.append(step)
            jax.tree.map(np.testing.assert_array_equal, batch, source.batch(step))
    assert steps == [5, 6, 7, 8, 9, 10]
    assert prefetch_threads() == []


def test_errors_surface_at_the_step_that_failed():
    batches = Prefetch(Asked(fail_from_step_3), SHARDING, start=1, stop=10)
    assert [next(batches)[0], next(batches)[0]] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone") as raised:
        next(batches)
    assert raised.value.__notes__ == ["while prefetching the batch of step 3"]
    assert list(batches) == []
    assert prefetch_threads() == []


def test_closing_early_ends_the_thread():
    source = Asked(fail_from_step_3)
    with Prefetch(source, SHARDING, start=0, stop=10**9) as batches:
        assert next(batches)[0] == 0
    assert prefetch_threads() == []
    assert max(source.asked) <= 2
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


def test_waiting_for_a_batch_is_measured():
    # At depth 1 a batch is begun only when the one before is taken, and asked for at once.
    with Prefetch(Synthetic(50, 2, 4), SHARDING, start=0, stop=20, depth=1) as batches:
        assert any(batches.wait_seconds > 0 for _ in batches)


def test_a_batch_that_is_ready_is_not_waited_for():
    with Prefetch(Synthetic(50, 2, 4), SHARDING, start=0, stop=3, depth=4) as batches:
        for thread in threading.enumerate():
            if thread.name == "prefetch":  # it ends once all three are placed
                thread.join(60)
                assert not thread.is_alive()
        assert [batches.wait_seconds for _ in batches] == [0.0, 0.0, 0.0]


def test_the_state_belongs_to_the_yielded_batch():
    source = Counting()
    with Prefetch(source, SHARDING, start=5, stop=9, depth=4) as batches:
        assert batches.state is None
        states = [batches.state for _ in batches]
    assert states == [{"step": 6 + n, "given": 1 + n} for n in range(4)]
    with Prefetch(Synthetic(50, 2, 4), SHARDING, start=0, stop=1) as batches:
        assert [batches.state for _ in batches] == [None]


def test_a_source_that_hangs_can_be_left():
    asked, gate = threading.Event(), threading.Event()
    source = Asked(lambda step: (asked.set(), gate.wait()))
    with Prefetch(source, SHARDING, start=0, stop=4, close_seconds=0.01) as batches:
        asked.wait()
    with pytest.raises(StopIteration):
        next(batches)
    threads = [thread for thread in threading.enumerate() if thread.name == "prefetch"]
    assert [thread.daemon for thread in threads] == [True]
    gate.set()
    threads[0].join(60)
    assert prefetch_threads() == []
    assert source.asked == [0]  # nothing more was asked for


def test_reading_ahead_stops_at_its_depth_and_repeats_its_error():
    made = []

    def numbers():
        for number in range(5):
            made.append(number)
            yield number
        raise OSError("no more")

    with pytest.raises(ValueError, match="depth of at least 1"):
        ReadAhead(numbers(), depth=0, name="none")
    numbers_ahead = ReadAhead(numbers(), depth=2, name="numbers")
    for number in range(5):
        assert next(numbers_ahead) == number
        assert len(made) <= number + 3
    for _ in range(2):
        with pytest.raises(OSError, match="no more"):
            next(numbers_ahead)
    assert numbers_ahead.ready()
    numbers_ahead.close()
    with pytest.raises(StopIteration):
        next(numbers_ahead)


def test_reading_ahead_gives_up_waiting_after_a_time():
    hang = threading.Event()

    def hanging():
        hang.wait()
        yield 1

    hanging_ahead = ReadAhead(hanging(), depth=1, name="hanging")
    assert not hanging_ahead.ready()
    with pytest.raises(TimeoutError, match=r"no batch arrived for 0\.01 s"):
        hanging_ahead.next(timeout=0.01)
    hang.set()
    assert hanging_ahead.next(timeout=60.0) == 1
