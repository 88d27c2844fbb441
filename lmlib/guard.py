"""Which updates are not made: those of numbers that are not finite, and of sudden high losses.

Shapes: W recent losses.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

MAD_TO_DEVIATION = 1.4826  # a normal distribution's standard deviation in median deviations


class GuardState(eqx.Module):
    """What a guard remembers; part of a run's state, so that a resumed run judges alike."""

    skipped: Int32[Array, ""]  # updates not made, in all
    skipped_in_a_row: Int32[Array, ""]  # up to now
    recent_losses_W: Float[Array, "W"] | None  # of updates made; NaN where there were fewer


@dataclasses.dataclass(frozen=True)
class Guard:
    """Skips an update whose loss or gradient norm is not finite; weights and moments stay.

    Args:
      spike_deviations: also skip an update whose loss exceeds the median of the recent ones by more
        than so many standard deviations, estimated from their median absolute deviation (Huber,
        "Robust Statistics", 1981, §5.1). `None` never does. Nothing is skipped so before `window`
        updates were made.
      window: how many losses are recent.

    Raises:
      ValueError: for a setting that is not positive.
    """

    spike_deviations: float | None = None
    window: int = 128

    def __post_init__(self) -> None:
        if self.spike_deviations is not None and self.spike_deviations <= 0:
            raise ValueError(f"spike_deviations must be positive, got {self.spike_deviations}")
        if self.window < 2:
            raise ValueError(f"the guard's window must be at least 2 losses, got {self.window}")

    def init(self) -> GuardState:
        nothing = jnp.full(self.window, jnp.nan, jnp.float32)
        return GuardState(
            skipped=jnp.zeros((), jnp.int32),
            skipped_in_a_row=jnp.zeros((), jnp.int32),
            recent_losses_W=None if self.spike_deviations is None else nothing,
        )

    def judge(
        self, state: GuardState, loss: Float[Array, ""], grad_norm: Float[Array, ""]
    ) -> tuple[Bool[Array, ""], GuardState]:
        """Whether to make the update, and the state after that."""
        sound = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        recent_W = state.recent_losses_W
        if recent_W is not None:
            assert self.spike_deviations is not None
            median = jnp.median(recent_W)
            deviation = MAD_TO_DEVIATION * jnp.median(jnp.abs(recent_W - median))
            # While the window is not full these are NaN, and no loss is larger than NaN.
            sound &= ~(loss > median + self.spike_deviations * deviation)
            recent_W = jnp.where(sound, jnp.roll(recent_W, -1).at[-1].set(loss), recent_W)
        unsound = jnp.where(sound, 0, 1).astype(jnp.int32)
        return sound, GuardState(
            skipped=state.skipped + unsound,
            skipped_in_a_row=unsound * (state.skipped_in_a_row + 1),
            recent_losses_W=recent_W,
        )


def choose(sound: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` if `sound`, else `old`, leaf by leaf."""
    return jax.tree.map(lambda n, o: jnp.where(sound, n, o), new, old)
