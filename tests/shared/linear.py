"""A linear layer whose axes each instance names: a small module for tests of weights."""

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.matmul import matmul
from lmlib.models.weights import fan_in, initial_values, weight, zeros


class Linear(eqx.Module):
    """x · weight + bias; `Linear("embed", "heads head_dim", …)` makes heads of the embedding."""

    inputs: str = eqx.field(static=True)
    outputs: str = eqx.field(static=True)
    matrix: Float[Array, "..."] = weight(lambda self: fan_in(*self.inputs.split()))
    bias: Float[Array, "..."] | None = weight(zeros)

    def __init__(
        self, inputs: str, outputs: str, bias: bool = False, *, key: PRNGKeyArray, **sizes: int
    ):
        self.inputs, self.outputs = inputs, outputs
        self.matrix = initial_values(self, "matrix", key, **sizes)
        self.bias = initial_values(self, "bias", key, **sizes) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        summed = len(self.inputs.split())
        letters = "abcdefghijklmnopqrstuvwxyz"
        x_axes = letters[: x.ndim]
        y_axes = letters[x.ndim : x.ndim + self.matrix.ndim - summed]
        lead, inner = x_axes[:-summed], x_axes[-summed:]
        y = matmul(f"{x_axes},{inner}{y_axes}->{lead}{y_axes}", x, self.matrix)
        return y if self.bias is None else y + self.bias

    @property
    def axis_names(self) -> dict[str, str]:
        return {"matrix": f"{self.inputs} {self.outputs}", "bias": self.outputs}
