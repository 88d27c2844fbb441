"""A decoder that uses the residual stream between its layers again later.

Shapes: B batch, S sequence, E embed.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.forward_context import ForwardContext
from lmlib.models.model import TrunkOutput, WeightGroup
from lmlib.models.part import NO_AUX, Part
from lmlib.models.speedrun.smear import Smear
from lmlib.models.stack import MakeLayer, repeats_of, segments
from lmlib.models.weights import Constant, fill, fold_in_name, weight
from lmlib.parallel.axes import map_weights
from lmlib.parallel.gathering import gather


class DecoderInPieces(Decoder):
    """A decoder whose layers run in pieces. A subclass calls `Pieces.run` in its `trunk`.

    Args:
      pieces: functions that make the layers of each piece, the same for equal layers.
      smear: what to smear embedded tokens with; optional.
      decoder: further arguments of `Decoder`.
    """

    layers_of_pieces: tuple[int, ...] = eqx.field(static=True)
    smear: Smear | None

    def __init__(
        self,
        vocab: int,
        embed: int,
        pieces: Sequence[Sequence[MakeLayer]],
        smear: Smear | None = None,
        *,
        key: PRNGKeyArray,
        **decoder: Any,
    ):
        of_pieces = [*itertools.chain(*map(segments, pieces))]
        super().__init__(vocab, embed, of_pieces, key=key, **decoder)
        self.layers_of_pieces = tuple(map(len, pieces))
        self.smear = smear

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """The stack's cache, and the smear's, whose row is the second axis too."""
        of_stack = super().empty_cache(rows, length, dtype)
        of_smear = self.smear and self.smear.empty_cache(rows, length, dtype)[None]
        return of_stack and (of_stack, of_smear)

    def smeared(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any
    ) -> tuple[Float[Array, "b s embed"], Any]:
        """The smeared tokens, and their new cache."""
        if self.smear is None:
            return x_BSE, None
        window = None if cache is None else cache[1][0]
        y_BSE, window = gather(self.smear, context.compute.dtype)(x_BSE, context, window)
        return y_BSE, None if window is None else window[None]

    def weight_groups(self) -> tuple[WeightGroup, ...]:
        smear = () if self.smear is None else (WeightGroup("smear", self.smear),)
        first, *others = super().weight_groups()
        return (first, *smear, *others)


class Pieces:
    """Runs the pieces of a `DecoderInPieces` one after the other, in one call.

    The layers of such models report no losses or statistics.
    """

    def __init__(self, decoder: DecoderInPieces, context: ForwardContext, cache: Any):
        self.decoder, self.context = decoder, context
        self._cache = None if cache is None else cache[0]
        self._outputs: list[TrunkOutput] = []

    def run(
        self, x_BSE: Float[Array, "b s embed"], shared: Mapping[Hashable, Any] | None = None
    ) -> Float[Array, "b s embed"]:
        """Runs the next piece, with further values in `Context.shared`."""
        number, stack = len(self._outputs), self.decoder.stack
        ends = itertools.accumulate(repeats_of(each) * len(each) for each in stack.patterns)
        first = sum(self.decoder.layers_of_pieces[:number])
        last = first + self.decoder.layers_of_pieces[number]
        inside = [i for i, end in enumerate(ends) if first < end <= last]
        taken = slice(inside[0], inside[-1] + 1)
        piece = eqx.tree_at(lambda stack: stack.patterns, stack, stack.patterns[taken])
        key = self.context.key
        key = None if key is None else fold_in_name(key, f"piece {number}")
        context = dataclasses.replace(self.context, key=key).sharing(shared or {})
        cache = None if self._cache is None else self._cache[taken]
        self._outputs.append(piece(x_BSE, context, cache))
        return self._outputs[-1].x_BSE

    def output(self, x_BSE: Float[Array, "b s embed"], smear_cache: Any) -> TrunkOutput:
        """Returns the results of all pieces, with the last residual stream."""
        tallies = sum((each.aux.tallies for each in self._outputs), ())
        cache = seen = None
        if self._cache is not None:
            cache = sum((each.cache for each in self._outputs), ()), smear_cache
        if self.context.observe is not None:
            observed = [each.observed for each in self._outputs]
            seen = jax.tree.map(lambda *each: jnp.concatenate(each), *observed)
        return TrunkOutput(x_BSE, NO_AUX._replace(tallies=tallies), cache, seen)


def with_factors(model: Decoder, factors: Mapping[str, float]) -> Any:
    """The model with weights multiplied by the factor of the end of their path, if there is one."""

    def scaled(weight: Any, array: Array) -> Array:
        found = [factor for end, factor in factors.items() if weight.path.endswith(end)]
        return array * found[0] if found else array

    return map_weights(scaled, model)


class Backout(Part):
    """x - share · earlier, before the last norm: removes what only early layers need.

    Source: modded-nanogpt, record 40, and nanochat, where `share` starts at 0.2.
    """

    rows_may_be_split = True

    share: Float[Array, ""] = weight(lambda self: Constant(self.initial), dtype="float32")
    initial: float = eqx.field(static=True)

    def __init__(self, initial: float = 0.2, *, key: PRNGKeyArray):
        self.initial = initial
        fill(self, key)

    def __call__(self, x_BSE: Array, earlier_BSE: Array) -> Float[Array, "b s embed"]:
        return x_BSE - self.share.astype(x_BSE.dtype) * earlier_BSE
