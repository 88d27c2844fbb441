"""Gates and mixing coefficients that a small network computes from each token's activations.

Shapes: B batch, S sequence, E embed, G gates.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import Part
from lmlib.models.weights import Constant, InitialValues, fan_in, fill, weight
from lmlib.parallel.layout import reshard


class Gate(NamedTuple):
    """Numbers of a token that are used together, by their key in `Context.shared`."""

    key: Hashable
    initial: tuple[float, ...]  # one for each number


@dataclasses.dataclass(frozen=True)
class Listed(InitialValues):
    """The given values."""

    values: tuple[float, ...]

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        return jnp.asarray(self.values, jnp.float32)

    def text(self, sizes: Mapping[str, int]) -> str:
        return "listed"


class TokenGates(Part):
    """scale · (gelu(x · first) · second + bias), split into `gates`; all float32 except x.

    A gate starts at its initial value for every token. The learning rate is a tenth of the
    optimizer's. Sources: modded-nanogpt, records 81 and 85, after MUDDFormer (arXiv:2502.12170).
    """

    rows_may_be_split = True

    gates: tuple[Gate, ...] = eqx.field(static=True)
    initial_scale: float = eqx.field(static=True)
    first: Float[Array, "embed gate_hidden"] = weight(
        fan_in("embed", scale=3**-0.5), rules={"gate_hidden": None}, learning_rate=0.1
    )
    second: Float[Array, "gate_hidden gates"] = weight(
        fan_in("gate_hidden", scale=0.0),
        rules={"gate_hidden": None, "gates": None},
        learning_rate=0.1,
    )
    bias: Float[Array, "gates"] = weight(
        lambda self: Listed(self.initial), rules={"gates": None}, dtype="float32", learning_rate=0.1
    )
    scale: Float[Array, ""] | None = weight(
        lambda self: Constant(self.initial_scale), dtype="float32", learning_rate=0.1
    )

    def __init__(
        self,
        embed: int,
        gates: Sequence[Gate],
        hidden: int = 64,
        scale: float = 0.1,
        learned_scale: bool = True,
        *,
        key: PRNGKeyArray,
    ):
        self.gates, self.initial_scale = tuple(gates), scale
        absent = () if learned_scale else ("scale",)
        fill(self, key, absent, embed=embed, gate_hidden=hidden, gates=len(self.initial))

    @property
    def initial(self) -> tuple[float, ...]:
        """The initial biases."""
        return tuple(x / self.initial_scale for gate in self.gates for x in gate.initial)

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> dict[Hashable, Float[Array, "b s g"]]:
        """Returns the gates by their keys, whole along the sequence of a device."""
        x_BSE, wide = reshard(x_BSE, "batch seq embed"), jnp.float32
        h_BSG = jax.nn.gelu(matmul("bse,eg->bsg", x_BSE, self.first), approximate=False)
        made_BSG = matmul("bsg,gn->bsn", h_BSG, self.second).astype(wide) + self.bias
        made_BSG *= self.initial_scale if self.scale is None else self.scale
        found, start = dict[Hashable, Array](), 0
        for gate in self.gates:
            end = start + len(gate.initial)
            found[gate.key], start = made_BSG[..., start:end].astype(x_BSE.dtype), end
        return found


def of_residual(
    gate_BS: Float[Array, "b s ..."], context: ForwardContext
) -> Float[Array, "b s ..."]:
    """Returns one number for each token in the layout of the residual stream, to multiply it."""
    batch, sequence, _ = context.compute.residual.split()
    return reshard(gate_BS, (batch, sequence, *(None,) * (gate_BS.ndim - 2)))
