"""The learning rate at every step of a run, beside optax's own schedules in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmlib.optim.adamw import adamw
from lmlib.optim.power import warmup_power_decay
from lmlib.optim.schedules import warmup_constant, warmup_cosine, warmup_linear, warmup_stable_decay

LONGEST = 5_000
STEPS_N = np.arange(LONGEST + 2)  # all examples are of one shape, and compiled once
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
        rates_N = np.asarray(whole(jnp.asarray(STEPS_N, jnp.float64))) + np.zeros(LONGEST + 2)
    return rates_N[: steps + 2]


@settings(max_examples=12)
@example("stable", 3, 1.0, 0.5, 0.5, 0.0)
@example("cosine", 100, 2.0, 0.1, 0.0, 0.1)
@example("linear", 101, 2.0, 0.1, 0.0, 0.5)
@example("constant", 90, 0.3, 0.3, 0.0, 0.0)
@given(
    st.sampled_from(["cosine", "linear", "stable", "constant"]),
    st.integers(1, LONGEST),
    st.floats(1e-6, 10.0),
    fractions,
    fractions,
    st.sampled_from([0.0, 0.1, 0.7]),
)
def test_every_step_learns_as_by_optax(name, steps, peak, warmup, decay, end):
    made = {
        "cosine": lambda: warmup_cosine(peak, steps, warmup, end),
        "linear": lambda: warmup_linear(peak, steps, warmup, end),
        "stable": lambda: warmup_stable_decay(peak, steps, warmup, decay, end),
        "constant": lambda: warmup_constant(peak, steps, warmup),
    }[name]()
    found = _traced(made, STEPS_N)
    expected = by_optax(name, peak, steps, warmup, decay, end)
    # A cosine's last steps are a small difference, which float64 rounds to 1e-16.
    np.testing.assert_allclose(found[: steps + 2], expected, rtol=1e-6, atol=1e-15 * peak)
    assert np.all(found[steps:] == found[steps])  # after the end nothing moves
    assert found.dtype == np.float32


@jax.jit
def _traced(schedule, steps_N):
    """Runs like a compiled step, which gets the numbers as arguments."""
    return schedule(steps_N)


def test_fractions_are_of_whole_steps_however_long_the_run():
    steps = 2**31 - 1
    schedule = warmup_stable_decay(1.0, steps, warmup=0.25, decay=0.25)
    at = np.array([0, round(steps / 8), round(steps / 2), steps - round(steps / 8), steps - 1])
    expected = [4 / steps, 0.5, 1.0, 0.5, 4 / steps]
    np.testing.assert_allclose(_traced(schedule, jnp.asarray(at, jnp.int32)), expected, rtol=1e-6)


def test_a_number_of_steps_is_the_same_in_runs_of_all_lengths():
    short, long = (
        warmup_stable_decay(0.3, steps, warmup=7, decay=20, end=0.1) for steps in (50, 1_000)
    )
    stable = warmup_constant(0.3, 60, warmup=7)
    steps_N = jnp.arange(30)
    np.testing.assert_array_equal(_traced(short, steps_N), _traced(long, steps_N))
    np.testing.assert_array_equal(_traced(short, steps_N), _traced(stable, steps_N))
    assert float(short(31)) < float(short(30)) == np.float32(0.3)
    assert warmup_cosine(1.0, 50, warmup=1).rising == 1
    assert warmup_cosine(1.0, 50, warmup=1.0).rising == 50


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adamw(0, 1e-3), "must be positive, got 0 and 0.001"),
        (lambda: adamw(10, -1.0), "must be positive, got 10 and -1.0"),
        (lambda: warmup_cosine(1.0, 10, warmup=20.0), "warmup is a fraction.* got 20"),
        (lambda: warmup_constant(0.3, 50, warmup=51), "a fraction.*here at most 50; got 51"),
        (lambda: warmup_stable_decay(1.0, 10, 0.6, 0.5), "0.6 and decay = 0.5 together exceed 1"),
        (lambda: warmup_stable_decay(0.3, 50, 31, 20), "together exceed 50 steps"),
        (lambda: warmup_power_decay(1.0, 9, exponent=0.0), "exponent must be positive"),
    ],
)
def test_senseless_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(st.sampled_from([0.0, 0.1, 0.3, 0.6999999, 1e-9]), st.floats(1e-6, 10.0))
def test_a_stable_rate_is_the_peak_to_the_bit(end, peak):
    schedule = warmup_stable_decay(peak, 100, warmup=10, decay=20, end=end)
    assert set(_traced(schedule, jnp.arange(10, 81)).tolist()) == {float(np.float32(peak))}


@settings(max_examples=10)
@given(st.integers(1, 3_000), fractions, fractions, st.floats(0.01, 1.5))
def test_a_power_of_the_tokens(steps, warmup, decay, exponent):
    """Shen et al.'s three pieces, one step at a time, in float64."""
    peak, end = 0.02, 0.1
    rising = round(warmup * steps)
    falling = min(round(decay * steps), steps - rising)
    amplitude = peak * (rising + 1) ** exponent  # in steps: tokens of a step are always as many

    def expected(step):
        if step < rising:
            return peak * (step + 1) / (rising + 1)
        begins = steps - falling
        if step < begins or not falling:
            return amplitude * (min(step, begins) + 1) ** -exponent
        left = max(steps - step, 0) / falling
        return amplitude * (begins + 1) ** -exponent * (end + (1 - end) * left)

    found = _traced(warmup_power_decay(peak, steps, warmup, decay, end, exponent), STEPS_N)
    at_N = np.arange(0, steps + 3, max(1, steps // 200))
    np.testing.assert_allclose(found[at_N], [expected(int(step)) for step in at_N], rtol=1e-5)
    assert found.dtype == np.float32
