"""Trains and evaluates one seed of an arm. All code here is the library's.

Shapes: B batch, S sequence, V vocabulary.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from lmlib.data.batch import Batch, Source
from runner.errors import ConfigError
from runner.lab.programs import Arm

_CAUSAL_TOLERANCE = 1e-4  # of logits, whose sums XLA may order differently


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trained and evaluated seed.

    Attributes:
      losses: validation losses in nats per token, by step.
      cpu_seconds, seconds: only of the training steps, without compiling and evaluating.
      weights: digest of the evaluated weights' bits.
      batches: digest of the training batches.
    """

    seed: int
    steps: int
    tokens: int
    losses: dict[int, float]
    cpu_seconds: float
    seconds: float
    weights: str
    batches: str

    @property
    def loss(self) -> float:
        """The loss after the last step."""
        return self.losses[self.steps]

    def steps_to(self, loss: float) -> float | None:
        """Returns the step at which the curve first reaches `loss`; `None` if it never does.

        The curve is linear between evaluations.
        """
        before: tuple[int, float] | None = None
        for step, value in sorted(self.losses.items()):
            if value <= loss:
                if before is None:
                    return float(step)
                part = (before[1] - loss) / (before[1] - value)
                return before[0] + part * (step - before[0])
            before = step, value
        return None


def train(
    arm: Arm,
    seed: int,
    data: Source,
    validation: Sequence[Batch],
    evaluate_at: Iterable[int],
    show: Callable[[int], None] = lambda step: None,
) -> Trial:
    """Trains `arm` from `seed` on the batches of `data`, and evaluates it after some steps.

    The last step is always evaluated.
    """
    start, moments = arm.programs["fresh"], arm.programs["begin"]
    step, weights = arm.programs["step"].compiled, arm.programs["weights"].compiled
    number = np.uint32(seed)
    state = moments.compiled(start.compiled(number), number)
    at = {*evaluate_at, arm.steps}
    losses, cpu_seconds, seconds, tokens = {}, 0.0, 0.0, 0
    seen = hashlib.sha256()
    for index in range(arm.steps):
        batch = data.batch(index)
        seen.update(np.ascontiguousarray(batch.tokens).tobytes())
        tokens += int(np.sum(batch.loss_mask))
        began, began_on_cpu = time.perf_counter(), time.process_time()
        state = jax.block_until_ready(step(state, arrays_of(batch)))
        cpu_seconds += time.process_time() - began_on_cpu
        seconds += time.perf_counter() - began
        show(index + 1)
        if index + 1 in at:
            losses[index + 1] = evaluate(arm, weights(state), validation)
    return Trial(
        seed, arm.steps, tokens, losses, cpu_seconds, seconds,
        digest_of_arrays(weights(state)), seen.hexdigest(),
    )  # fmt: skip


def cpu_seconds_per_step(arms: Sequence[Arm], data: Source) -> list[float]:
    """Returns the CPU-seconds of a step of each arm, measured in turn."""
    states = [
        arm.programs["begin"].compiled(arm.programs["fresh"].compiled(np.uint32(0)), np.uint32(0))
        for arm in arms
    ]
    spent, rounds, steps = [0.0] * len(arms), 3, 4
    for index in range(rounds + 1):
        for number, arm in enumerate(arms):
            began = time.process_time()
            for _ in range(steps):
                states[number] = arm.programs["step"].compiled(
                    states[number], arrays_of(data.batch(0))
                )
            jax.block_until_ready(states[number])
            if index:  # the first round fills caches
                spent[number] += time.process_time() - began
    return [each / (rounds * steps) for each in spent]


def arrays_of(batch: Batch) -> list[Any]:
    """Returns the batch as a step's program takes it."""
    return jax.tree.leaves(batch)


def evaluate(arm: Arm, weights: list[Array], validation: Sequence[Batch]) -> float:
    """Returns the loss in nats per token over all targets of `validation`, each counted once."""
    total, count = 0.0, 0
    for batch in validation:
        logits_BSV = arm.programs["logits"].compiled(
            weights, *(np.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids))
        )
        logits_BSV = np.asarray(logits_BSV)  # without the mesh in its type
        total += float(summed_loss(logits_BSV, batch.targets, batch.loss_mask))
        count += int(np.sum(batch.loss_mask))
    return total / count


@jax.jit
def summed_loss(
    logits_BSV: Float[Array, "b s v"], targets_BS: Int32[Array, "b s"], mask_BS: Bool[Array, "b s"]
) -> Float[Array, ""]:
    """The cross-entropy of the targets in nats, summed over the mask."""
    logits_BSV = logits_BSV.astype(jnp.float32)
    chosen_BS = jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)[..., 0]
    nats_BS = jax.nn.logsumexp(logits_BSV, axis=-1) - chosen_BS
    return jnp.sum(jnp.where(mask_BS, nats_BS, 0))


def check_causal(arm: Arm, batch: Batch) -> None:
    """Raises ConfigError if logits depend on later tokens, or on other rows."""
    program = arm.programs["logits"].compiled
    weights = arm.programs["fresh"].compiled(np.uint32(0))
    # Initial weights may be zeros, which would hide a dependence.
    weights = [w + 0.02 * jax.random.normal(jax.random.key(i), w.shape, w.dtype)
               for i, w in enumerate(weights)]  # fmt: skip
    B, S = batch.tokens.shape
    tokens_BS, rest = np.asarray(batch.tokens), (batch.positions, batch.segment_ids)
    changed_BS = np.random.default_rng(0).permutation(tokens_BS.ravel()).reshape(B, S)
    before_BSV = np.asarray(program(weights, tokens_BS, *rest))
    for split in (1, S // 2, S - 1):
        mixed_BS = np.where(np.arange(S) < split, tokens_BS, changed_BS)
        mixed_BS[1:] = np.where(np.arange(B)[1:, None] % 2, changed_BS[1:], mixed_BS[1:])
        after_BSV = np.asarray(program(weights, mixed_BS, *rest))
        apart = np.abs(after_BSV - before_BSV)[::2, :split].max()
        if not apart <= _CAUSAL_TOLERANCE * max(1.0, float(np.abs(before_BSV).max())):
            raise ConfigError(
                "the candidate's logits depend on later tokens or on other rows: each position may "
                "use only the tokens before it in its row, and its own"
            )


def digest_of_arrays(arrays: Iterable[Any]) -> str:
    """Returns the SHA-256 of the arrays' bits."""
    total = hashlib.sha256()
    for each in arrays:
        total.update(np.ascontiguousarray(each).tobytes())
    return total.hexdigest()


def digest_of_batches(batches: Iterable[Batch]) -> str:
    """Returns the SHA-256 of everything in the batches."""
    return digest_of_arrays(leaf for batch in batches for leaf in jax.tree.leaves(batch))
