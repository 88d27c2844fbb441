"""Skips updates that are not finite, or whose loss is suddenly high.

Shapes: W recent losses.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

MAD_TO_DEVIATION = 1.4826  # standard / median absolute deviation, for normal distributions


class GuardState(eqx.Module):
    """The memory of a guard, part of a run's state, so that a resumed run decides the same."""

    skipped: Int32[Array, ""]  # total number of skipped updates
    skipped_in_a_row: Int32[Array, ""]  # number of skipped updates since the last good one
    empty_batches: Int32[Array, ""]  # total number of batches without a target
    recent_losses_W: Float[Array, "W"] | None  # losses of updates made; NaN before there are enough


@dataclasses.dataclass(frozen=True)
class Guard:
    """Skips an update whose loss, gradient or update is not finite; weights and moments stay.

    A batch without a target makes no update either, which weight decay would; it is counted apart.

    Args:
      spike_deviations: also skip an update if its loss exceeds the median of the last `window`
        losses by more than this number of standard deviations, estimated from their median absolute
        deviation (Huber, "Robust Statistics", 1981, §5.1). `None` never does.
      stop_after: a run stops after this number of skipped updates in a row.
      captures: number of skipped updates that a run saves for `python -m runner.replay`; each keeps
        a checkpoint from being deleted.

    Raises:
      ValueError: for a setting that is not positive.
    """

    spike_deviations: float | None = None
    window: int = 128
    stop_after: int = 10
    captures: int = 3

    def __post_init__(self) -> None:
        if self.spike_deviations is not None and self.spike_deviations <= 0:
            raise ValueError(f"spike_deviations must be positive, got {self.spike_deviations}")
        if self.window < 2:
            raise ValueError(f"the guard's window must be at least 2 losses, got {self.window}")

    def init(self) -> GuardState:
        skipped, in_a_row, empty = (jnp.zeros((), jnp.int32) for _ in range(3))
        spikes = self.spike_deviations is not None
        recent_W = jnp.full(self.window, jnp.nan, jnp.float32) if spikes else None
        return GuardState(skipped, in_a_row, empty, recent_W)

    def judge(
        self, state: GuardState, loss: Array, grad_norm: Array, update_norm: Array, count: Array
    ) -> tuple[Bool[Array, ""], GuardState]:
        """Returns True if the proposed update should be made, and the new state.

        All arguments are scalars; `count` is the number of the objective's units in the batch.
        """
        empty = count == 0
        sound = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
        recent_W = state.recent_losses_W
        if recent_W is not None:
            assert self.spike_deviations is not None
            median = jnp.median(recent_W)
            deviation = MAD_TO_DEVIATION * jnp.median(jnp.abs(recent_W - median))
            # NaN while the window is not full; no loss is larger than NaN.
            sound &= ~(loss > median + self.spike_deviations * deviation)
            newest_W = jnp.roll(recent_W, -1).at[-1].set(loss)
            recent_W = jnp.where(sound & ~empty, newest_W, recent_W)
        in_a_row = jnp.where(sound, 0, state.skipped_in_a_row + 1)
        return sound & ~empty, GuardState(
            skipped=state.skipped + (~sound & ~empty),
            skipped_in_a_row=jnp.where(empty, state.skipped_in_a_row, in_a_row),
            empty_batches=state.empty_batches + empty,
            recent_losses_W=recent_W,
        )


def choose(made: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` if the update is `made`, else `old`, leaf by leaf."""
    return jax.tree.map(lambda n, o: jnp.where(made, n, o), new, old)
