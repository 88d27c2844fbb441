"""The learning rate at every step of a run, beside optax's own schedules in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmlib import optim

fractions = st.one_of(st.just(0.0), st.floats(0.01, 0.5))


def by_optax(name, peak, steps, warmup, decay, end):
    """The rates of all steps, and of two more, in float64."""
    rising = round(warmup * steps)
    left = steps - rising
    falling = {"stable": min(round(decay * steps), left), "constant": 0}.get(name, left)
    if falling == 0:
        fall = optax.constant_schedule(peak)
    elif name == "cosine":
        fall = optax.cosine_decay_schedule(peak, falling, end)
    else:
        fall = optax.linear_schedule(peak, end * peak, falling, steps - rising - falling)
    rise = optax.linear_schedule(peak / (rising + 1), peak, rising)
    whole = optax.join_schedules([rise, fall], [rising]) if rising else fall
    with jax.enable_x64(True):
        return np.asarray(whole(jnp.arange(steps + 2, dtype=jnp.float64))) + np.zeros(steps + 2)


@settings(max_examples=60, deadline=None)
@example("stable", 3, 1.0, 0.5, 0.5, 0.0)
@given(
    st.sampled_from(["cosine", "linear", "stable", "constant"]),
    st.integers(1, 5_000),
    st.floats(1e-6, 10.0),
    fractions,
    fractions,
    st.sampled_from([0.0, 0.1, 0.7]),
)
def test_every_step_learns_as_by_optax(name, steps, peak, warmup, decay, end):
    made = {
        "cosine": lambda: optim.warmup_cosine(peak, steps, warmup, end),
        "linear": lambda: optim.warmup_linear(peak, steps, warmup, end),
        "stable": lambda: optim.warmup_stable_decay(peak, steps, warmup, decay, end),
        "constant": lambda: optim.warmup_constant(peak, steps, warmup),
    }[name]()
    found = _traced(made, jnp.arange(steps + 2))
    expected = by_optax(name, peak, steps, warmup, decay, end)
    # What is left of a cosine's last steps is a difference that float64 rounds to 1e-16.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-15 * peak)
    assert found.dtype == np.float32


@jax.jit
def _traced(schedule, steps_N):
    """As in a compiled step, which is given the numbers."""
    return schedule(steps_N)


def test_fractions_are_of_whole_steps_however_long_the_run():
    steps = 2**31 - 1
    schedule = optim.warmup_stable_decay(1.0, steps, warmup=0.25, decay=0.25)
    at = np.array([0, round(steps / 8), round(steps / 2), steps - round(steps / 8), steps - 1])
    expected = [4 / steps, 0.5, 1.0, 0.5, 4 / steps]
    np.testing.assert_allclose(_traced(schedule, jnp.asarray(at, jnp.int32)), expected, rtol=1e-6)


def test_a_schedule_that_rises_and_falls_for_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="together exceed 1"):
        optim.warmup_stable_decay(1.0, 10, 0.6, 0.5)
