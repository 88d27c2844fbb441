"""Moves tokens to experts and back on every device, with a custom backward pass.

Each device computes its own experts on the rows that a `Dispatch` brings, C at a time. If uneven
routing brings more rows to a device, they are computed in further rounds, in the same memory. Each
round's weight gradients, and on GPUs its sums of tokens, have the compute dtype. The first round's
activations can be saved by name; other rounds are recomputed.

Shapes: B batch, S sequence, E embed, K choices of a token, n = B · S tokens of a device, C rows of
a round, F mlp.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from lmlib.models.experts.dispatches import DISPATCHES, Dispatch, Gathered
from lmlib.models.experts.grouped import Groups
from lmlib.parallel.collectives import devices_along, psum, psum_scatter, shard_map
from lmlib.parallel.layout import mesh_axes_for, mesh_axes_of, named, partition
from lmlib.parallel.matrix import is_matrix
from lmlib.parallel.mesh_axes import NAMES, TOKENS, names_of
from lmlib.parallel.stages import retraced_in_stage

KEPT = ("expert_input", "expert_gate", "expert_up")
FURTHER_ROUNDS = "further_rounds"  # scope of all rounds after the first


class Settings(NamedTuple):
    """Settings of the dispatch of tokens to experts.

    `room` is the number of rows in a device's buffer, as a multiple of its rows under even routing.
    One of `parts` of the device's rows (B) is sent while another is computed.
    """

    experts: int
    dispatch: str
    room: float
    residual: str
    grouped: str = "auto"
    in_a_stage: bool = False
    parts: int = 1

    def movement(self, choices_BSK: Array) -> Dispatch:
        choices_nK = jnp.reshape(choices_BSK, (-1, choices_BSK.shape[-1]))
        alone = devices_along(mesh_axes_for("experts")) == 1
        make = Gathered if alone else DISPATCHES[self.dispatch]
        movement: Dispatch = make(choices_nK, self.experts, self.room, mesh_axes_for("experts"))
        return movement

    def groups(self, move: Dispatch, round: Array | int) -> Groups:
        return Groups(move.sizes(round), self.grouped)


def best_dispatch(choices: int) -> str:
    """Returns the dispatch that sends less: to all devices along `expert`, or `choices` times."""
    return "exchange" if devices_along(mesh_axes_for("experts")) > choices else "gather"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix_experts(
    settings: Settings,
    experts: Any,
    x_BSE: Float[Array, "b s embed"],
    choices_BSK: Int32[Array, "b s k"],
    shares_BSK: Float[Array, "b s k"],
) -> tuple[Float[Array, "b s embed"], Float[Array, "b s"]]:
    """Returns each token's weighted sum of expert outputs, and the fraction of choices computed.

    `experts` is a pytree of weights whose first axis is split along `expert`, with two methods:
    `products(rows_CE, groups)`, each [C, F], linear in rows and weights, and `outputs(products_CF,
    shares_C, groups)`, a partial sum along `tensor`. The result has the layout
    `settings.residual`.

    Backward: if x was replicated or the weights were gathered along an axis, their gradients stay
    partial sums along it. All others are summed here (a psum). Frozen bases of adapters get none.
    """
    return _forward(settings, experts, x_BSE, choices_BSK, shares_BSK)[0]


def _forward(settings: Settings, *arguments: Any) -> tuple[tuple[Array, Array], Any]:
    function = functools.partial(_computed, settings)
    return retraced_in_stage(settings.in_a_stage, function)(*arguments)


def _backward(settings: Settings, *arguments: Any) -> Any:
    function = functools.partial(_gradients, settings)
    return retraced_in_stage(settings.in_a_stage, function)(*arguments)


mix_experts.defvjp(_forward, _backward)


def _computed(
    settings: Settings, experts: Any, x_BSE: Array, choices_BSK: Array, shares_BSK: Array
) -> tuple[tuple[Array, Array], Any]:
    def on_device(experts: Any, *of_tokens: Array) -> Any:
        parts = [of_part(experts, *each) for each in _split(settings, of_tokens)]
        y, computed, rows_CE, products_CF = zip(*parts, strict=True)
        return jnp.concatenate(y), jnp.concatenate(computed), rows_CE, products_CF

    def of_part(experts: Any, x_BSE: Array, choices_BSK: Array, shares_BSK: Array) -> Any:
        move, (sent, sent_shares) = _moved(settings, choices_BSK, x_BSE, shares_BSK)

        def one(round: Array | int) -> tuple[Array, Array, Array, tuple[Array, ...]]:
            rows_CE, groups = move.rows(sent, round), settings.groups(move, round)
            products_CF = experts.products(rows_CE, groups)
            shares_C = move.rows(sent_shares, round, of_pairs=True)
            made_CE = experts.outputs(products_CF, shares_C, groups)
            computed = jnp.mean(move.computed(round), axis=-1, dtype=jnp.float32)
            return move.back(made_CE, round), computed, rows_CE, products_CF

        y, computed, rows_CE, products_CF = one(0)
        y, computed = _further(move, lambda round: one(round)[:2], (y, computed))
        y_BSE = jnp.reshape(move.combine(y.astype(x_BSE.dtype)), x_BSE.shape)
        computed_BS = jnp.reshape(move.combine(computed), x_BSE.shape[:2])
        if "seq_parallel" in settings.residual.split():
            y_BSE = psum_scatter(y_BSE, mesh_axes_for("mlp"), 1)
        else:
            y_BSE = psum(y_BSE, mesh_axes_for("mlp"))
        return y_BSE, computed_BS, rows_CE, products_CF

    y_BSE, computed_BS, rows_CE, products_CF = shard_map(
        on_device,
        inputs=(_layouts(experts), partition(_TOKENS), *2 * (partition(_PAIRS),)),
        outputs=(partition(settings.residual), partition("batch seq"), *_rows_layouts()),
        tracked=False,
    )(experts, x_BSE, choices_BSK, shares_BSK)
    rows_CE = tuple(checkpoint_name(each, KEPT[0]) for each in rows_CE)
    products_CF = tuple(tuple(map(checkpoint_name, each, KEPT[1:])) for each in products_CF)
    saved = experts, x_BSE, choices_BSK, shares_BSK, rows_CE, products_CF
    return (y_BSE, computed_BS), saved


def _gradients(settings: Settings, saved: Any, given: tuple[Array, Array]) -> Any:
    experts, x_BSE, *_ = saved
    x_shared = _reduced(x_BSE)
    learns = jax.tree.map(
        lambda node: node.gets_gradient() if is_matrix(node) else True, experts, is_leaf=is_matrix
    )
    weights_gathered = jax.tree.map(_reduced, eqx.filter(experts, learns))

    def on_device(experts: Any, *given: Any) -> Any:
        *of_tokens, rows_CE, products_CF, dy_BSE = given
        of_parts = zip(_split(settings, (*of_tokens, dy_BSE)), rows_CE, products_CF, strict=True)
        parts = [of_part(experts, *each) for each in of_parts]
        dw, dx, dshares = zip(*parts, strict=True)
        dw = functools.reduce(functools.partial(jax.tree.map, jnp.add), dw)
        dw = jax.tree.map(_summed, dw, lying, weights_gathered)
        over = {*names_of(mesh_axes_for("mlp"))}
        dx_BSE = psum(jnp.concatenate(dx), tuple(over - x_shared))
        return dw, dx_BSE, psum(jnp.concatenate(dshares), tuple(over))

    def of_part(experts: Any, of_tokens: Any, rows_CE: Array, products_CF: Any) -> Any:
        x_BSE, choices_BSK, shares_BSK, dy_BSE = of_tokens
        move, (sent, sent_shares, sent_dy) = _moved(
            settings, choices_BSK, x_BSE, shares_BSK, dy_BSE
        )
        learning, still = eqx.partition(experts, learns)
        whole = functools.partial(eqx.combine, still)

        def one(round: Array | int, rows_CE: Array, products_CF: tuple[Array, ...]) -> Any:
            groups, dy_CE = settings.groups(move, round), move.rows(sent_dy, round)
            shares_C = move.rows(sent_shares, round, of_pairs=True)
            _, back = jax.vjp(
                lambda learning, *parts: whole(learning).outputs(*parts, groups),
                learning, products_CF, shares_C,
            )  # fmt: skip
            dw_of_outputs, dproducts_CF, dshares_C = back(dy_CE)
            _, back = jax.vjp(
                lambda learning, *parts: whole(learning).products(*parts, groups),
                learning, rows_CE,
            )  # fmt: skip
            dw_of_products, dx_CE = back(dproducts_CF)
            dw = jax.tree.map(jnp.add, dw_of_outputs, dw_of_products)
            return dw, move.back(dx_CE, round), move.back(dshares_C, round, of_pairs=True)

        def again(round: Array) -> Any:
            rows_CE = move.rows(sent, round)
            return one(round, rows_CE, experts.products(rows_CE, settings.groups(move, round)))

        dw, dx, dshares = _further(move, again, one(0, rows_CE, products_CF))
        dx_BSE = jnp.reshape(move.combine(dx.astype(x_BSE.dtype)), x_BSE.shape)
        return dw, dx_BSE, jnp.reshape(move.combine(dshares), shares_BSK.shape)

    layouts, tokens, pairs = _layouts(experts), partition(_TOKENS), partition(_PAIRS)
    lying = jax.tree.map(_split_along, eqx.filter(experts, learns))
    dw, dx_BSE, dshares_BSK = shard_map(
        on_device,
        inputs=(layouts, tokens, pairs, pairs, *_rows_layouts(), tokens),
        outputs=(
            jax.tree.map(_unreduced, eqx.filter(layouts, learns), weights_gathered),
            _unreduced(tokens, x_shared),
            pairs,
        ),
        tracked=False,
    )(*saved, given[0])
    return dw, dx_BSE, None, dshares_BSK


_TOKENS, _PAIRS = "batch seq embed", ("batch", "seq", None)


def _rows_layouts() -> tuple[PartitionSpec, PartitionSpec]:
    """Layouts of rows (C, E) and hidden activations (C, F), concatenated over devices."""
    return PartitionSpec(named(TOKENS), None), PartitionSpec(named(TOKENS), mesh_axes_for("mlp"))


def _split(settings: Settings, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
    """Splits a device's rows (B, …) into `settings.parts` parts, or leaves them together."""
    parts = 1 if len(arrays[0]) % settings.parts else settings.parts
    return [*zip(*(jnp.split(each, parts) for each in arrays), strict=True)]


def _moved(settings: Settings, choices_BSK: Array, *of_tokens: Array) -> tuple[Any, list[Array]]:
    """Returns the device's movement, and the arrays of shape (B, S, …) prepared by `sent`."""
    move = settings.movement(choices_BSK)
    tokens = math.prod(choices_BSK.shape[:2])
    return move, [move.sent(jnp.reshape(each, (tokens, -1))) for each in of_tokens]


def _further(move: Dispatch, one: Callable[[Array], Any], sums: Any) -> Any:
    """Adds the results of all further rounds to `sums`, the first round's results."""
    if isinstance(move.rounds, int):
        return sums
    with jax.named_scope(FURTHER_ROUNDS):
        return jax.lax.fori_loop(
            1, move.rounds, lambda round, sums: jax.tree.map(jnp.add, sums, one(round)), sums
        )


def _spec(x: Array) -> PartitionSpec:
    without_mesh = jax.sharding.get_abstract_mesh().empty
    return PartitionSpec() if without_mesh else jax.typeof(x).sharding.spec


def _layouts(tree: Any) -> Any:
    return jax.tree.map(lambda x: PartitionSpec(*_spec(x).partitions), tree)


def _reduced(x: Array) -> frozenset[str]:
    """Mesh axes along which partial gradients of x are summed elsewhere."""
    return frozenset(_spec(x).reduced)


def _unreduced(layout: PartitionSpec, over: frozenset[str]) -> PartitionSpec:
    return layout.update(unreduced=over) if over else layout


def _split_along(x: Array) -> frozenset[str]:
    return frozenset(mesh_axes_of(_spec(x).partitions))


def _summed(dw: Array, split_along: frozenset[str], later: frozenset[str]) -> Array:
    """Sums a weight's gradient over the devices that have copies of the weight."""
    over = [name for name in names_of(named(NAMES)) if name not in split_along | later]
    return psum(dw, tuple(over))
