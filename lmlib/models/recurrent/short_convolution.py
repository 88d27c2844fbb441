"""The gated short convolution of LFM2, which remembers only the last few tokens.

Shapes: B batch, S sequence, E embed, C channels, W width.
"""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import ActivationNames, Part
from lmlib.models.recurrent.cache import RecurrentState, empty
from lmlib.models.recurrent.convolution import causal_convolution
from lmlib.models.weights import fan_in, fill, normal, product_flops, weight, zeros
from lmlib.parallel.layout import COMPUTE, spec

_SIZES = {"channels": COMPUTE["mlp"], "width": None}


class ShortConvolution(Part):
    """output(output_gate ⊙ convolution(input_gate ⊙ input)), all three projections of a token.

    Gates are used without an activation. Each channel has its own filter (Amini et al. 2025,
    arXiv:2511.23404, §2).

    Args:
      width: number of tokens of the convolution.
      bias: True if projections and filters have biases.
      residual_scale: factor of the output's initial values (`lmlib.models.weights`).
    """

    rows_may_be_split = True

    names = ActivationNames(
        saved=("input_gate", "output_gate", "input", "convolution"),
        scopes=("projections", "convolution"),
    )

    width: int = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    input_gate: Float[Array, "embed channels"] = weight(fan_in("embed"), rules=_SIZES)
    output_gate: Float[Array, "embed channels"] = weight(fan_in("embed"), rules=_SIZES)
    input: Float[Array, "embed channels"] = weight(fan_in("embed"), rules=_SIZES)
    filter: Float[Array, "channels width"] = weight(
        lambda self: normal(self.width**-0.5), rules=_SIZES
    )
    output: Float[Array, "channels embed"] = weight(
        lambda self: fan_in("channels", scale=self.residual_scale), rules=_SIZES
    )
    input_gate_bias: Float[Array, "channels"] | None = weight(zeros, rules=_SIZES)
    output_gate_bias: Float[Array, "channels"] | None = weight(zeros, rules=_SIZES)
    input_bias: Float[Array, "channels"] | None = weight(zeros, rules=_SIZES)
    filter_bias: Float[Array, "channels"] | None = weight(zeros, rules=_SIZES)
    output_bias: Float[Array, "embed"] | None = weight(zeros, writes=True)

    def __init__(
        self,
        embed: int,
        channels: int,
        width: int = 3,
        bias: bool = False,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        self.width, self.residual_scale = width, residual_scale
        biases = [f"{name}_bias" for name in ("input_gate", "output_gate", "input", "filter")]
        absent = [] if bias else [*biases, "output_bias"]
        fill(self, key, absent, embed=embed, channels=channels, width=width)

    def __call__(
        self,
        x_BSE: Float[Array, "b s embed"],
        context: ForwardContext,
        cache: RecurrentState | None = None,
    ) -> tuple[Float[Array, "b s embed"], RecurrentState | None]:
        """A mixer's call. `tensor` splits the channels, and sums the last product."""
        with jax.named_scope("projections"):
            before_BSC = self._projected("input_gate", x_BSE, context)
            after_BSC = self._projected("output_gate", x_BSE, context)
            x_BSC = self._projected("input", x_BSE, context)
        with jax.named_scope("convolution"):
            window = None if cache is None else cache.windows[0]
            y_BSC, window = causal_convolution(before_BSC * x_BSC, self.filter, context, window)
            y_BSC = checkpoint_name(_biased(y_BSC, self.filter_bias), "convolution")
        if window is not None:
            cache = RecurrentState(None, (window,))
        with jax.named_scope("projections"):
            precision = context.compute.precision("projections")
            residual = spec(context.compute.residual)
            y_BSE = matmul("bsc,ce->bse", after_BSC * y_BSC, self.output, precision, residual)
            return _biased(y_BSE, self.output_bias), cache

    def _projected(
        self, name: str, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> Float[Array, "b s channels"]:
        w, bias = getattr(self, name), getattr(self, f"{name}_bias")
        x_BSC = matmul("bse,ec->bsc", x_BSE, w, context.compute.precision("projections"))
        return checkpoint_name(_biased(x_BSC, bias), name)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> RecurrentState:
        """See `Part.empty_cache`. The size does not depend on `length`."""
        shape = rows, self.width - 1, self.output.shape[-2]
        return RecurrentState(None, (empty(("batch", None, "mlp"), shape, dtype),))

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of the projections and of the filters, both six for each weight."""
        return product_flops(self) + 6.0 * self.filter.size


def _biased(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias
