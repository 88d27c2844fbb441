"""A linear layer whose axes each instance names.

Shapes: leading axes, then the axes `inputs` of x, which the weight sums over.
"""

import equinox as eqx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.product import product
from lmlib.models.weights import fan_in, first_values, zeros
from lmlib.models.weights import weight as declared


class Linear(eqx.Module):
    """x · weight + bias; `Linear("embed", "heads head_dim", …)` makes heads of the embedding.

    Args:
      inputs, outputs: names of the axes that are summed over, and of those of the result.
      bias: whether there is one.
      sizes: of the axes, by name.
    """

    inputs: str = eqx.field(static=True)
    outputs: str = eqx.field(static=True)
    weight: Float[Array, "..."] = declared(lambda self: fan_in(*self.inputs.split()))
    bias: Float[Array, "..."] | None = declared(zeros)

    def __init__(
        self, inputs: str, outputs: str, bias: bool = False, *, key: PRNGKeyArray, **sizes: int
    ):
        self.inputs, self.outputs = inputs, outputs
        self.weight = first_values(self, "weight", key, **sizes)
        self.bias = first_values(self, "bias", key, **sizes) if bias else None

    def __call__(
        self,
        x: Float[Array, "..."],
        precision: str | None = None,
        out_sharding: PartitionSpec | None = None,
    ) -> Float[Array, "..."]:
        """`precision` and `out_sharding` as in `lmlib.models.product.product`."""
        summed = len(self.inputs.split())
        letters = "abcdefghijklmnopqrstuvwxyz"
        x_axes = letters[: x.ndim]
        y_axes = letters[x.ndim : x.ndim + self.weight.ndim - summed]
        lead, inner = x_axes[:-summed], x_axes[-summed:]
        equation = f"{x_axes},{inner}{y_axes}->{lead}{y_axes}"
        y = product(equation, x, self.weight, precision, out_sharding)
        return y if self.bias is None else y + self.bias

    @property
    def axis_names(self) -> dict[str, str]:
        return {"weight": f"{self.inputs} {self.outputs}", "bias": self.outputs}
