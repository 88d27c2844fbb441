"""Counts the FLOPs of a training step: the matmuls of the traced step, and the analytic number.

The body of a scan counts once per iteration. Experts count as if all devices had the rows of the
busiest one, in as many rounds as these need (`scopes.Routing`). A multiplication and an addition
count as two. Operations without matrix products are not counted: memory bounds them.

Shapes: M rows, N columns, K contracted.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmlib.models.experts.grouped import EVEN_TURNS
from lmlib.plan.scopes import EVEN, OTHER, PHASES, Routing, phase, scope
from lmlib.terminal.quantities import flops_unit
from lmlib.terminal.table import columns


@dataclasses.dataclass(frozen=True)
class Matmul:
    """Equal matrix products, or equal calls of a kernel, of one step.

    `operation` is the primitive, or "grouped_product" for such a kernel, `dtype` the wider one of
    the operands, `sizes` are batch, M, N and K of one device's product. FLOPs and bytes are sums
    over all of them; bytes count each operand and result once.
    """

    scope: str
    phase: str
    in_layers: bool
    operation: str
    dtype: str
    sizes: tuple[int, int, int, int]
    count: int
    flops: float
    device_flops: float
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """Every matmul of a step. `str()` gives a table by scope and phase, in the model's order."""

    matmuls: tuple[Matmul, ...]
    scopes: tuple[str, ...]
    routing: Routing = EVEN

    @property
    def total(self) -> float:
        return math.fsum(one.flops for one in self.matmuls)

    def of(self, *phases: str) -> float:
        """FLOPs of these phases, on all devices together."""
        return math.fsum(one.flops for one in self.matmuls if one.phase in phases)

    def __str__(self) -> str:
        phases = [name for name in PHASES if self.of(name)]
        unit, size = flops_unit(self.total)
        rows = [("scope", *(f"{name} ({unit})" for name in phases), f"together ({unit})", "share")]
        for name in (*self.scopes, OTHER):
            own = [one for one in self.matmuls if one.scope == name]
            found = [sum((one.flops for one in own if one.phase == phase), 0.0) for phase in phases]
            if own:
                rows.append((name, *_cells(found, size), f"{sum(found) / self.total:.1%}"))
        rows.append(("total", *_cells([self.of(name) for name in phases], size), ""))
        return columns(rows)


@dataclasses.dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of a training step.

    `analytic` and `analytic_causal` are the model's FLOPs per token, with full attention and with
    its causal half; they define MFU. `counted` has the matmuls of the traced step, without blocks
    that kernels skip. `tokens` is the number of tokens in a step.
    """

    analytic: float
    analytic_causal: float
    counted: StepFlops
    tokens: int

    @property
    def needed(self) -> float:
        """Counted FLOPs of one token, without recomputation."""
        return (self.counted.total - self.counted.of("recomputation")) / self.tokens

    @property
    def recomputed(self) -> float:
        """Counted FLOPs of one token that recompute activations."""
        return self.counted.of("recomputation") / self.tokens

    def __str__(self) -> str:
        analytic, causal, needed, recomputed = (
            f"{flops / 1e9:,.3f} GFLOP"
            for flops in (self.analytic, self.analytic_causal, self.needed, self.recomputed)
        )
        return (
            f"analytic, per token: {analytic} with full attention, {causal} with causal attention\n"
            f"counted in the traced step, per token: {needed} ({self.needed / self.analytic:.1%} "
            f"of the analytic number with full attention), and {recomputed} of recomputation\n\n"
            f"{self.counted}"
        )


def _cells(flops: list[float], size: float) -> list[str]:
    return [f"{each / size:,.3f}" for each in (*flops, sum(flops))]


def count_flops(step: Any, scopes: Sequence[str] = (), routing: Routing = EVEN) -> StepFlops:
    """Counts the matmuls of a traced step, by `scopes` (`lmlib.plan.scopes.scopes_of`).

    `step` is a jaxpr that was traced under the mesh: `jax.make_jaxpr(step)(state, batch)` or
    `jax.jit(step).trace(state, batch).jaxpr`.
    """
    together: dict[tuple[Any, ...], Matmul] = {}
    for one in _matmuls(getattr(step, "jaxpr", step), tuple(scopes), routing):
        kind = (one.scope, one.phase, one.in_layers, one.operation, one.dtype, one.sizes)
        before = together.get(kind)
        sums = {} if before is None else {f: getattr(before, f) + getattr(one, f) for f in _SUMMED}
        together[kind] = dataclasses.replace(one, **sums)
    return StepFlops(tuple(together.values()), tuple(scopes), routing)


_BY_GROUP = {"grouped_product", "ragged_dot_general"}  # kernels that skip rows behind all groups
_SUMMED = ("count", "flops", "device_flops", "device_bytes")


def _matmuls(
    jaxpr: Any,
    scopes: Sequence[str] = (),
    routing: Routing = EVEN,
    around: str = "",
    times: int = 1,
    devices: int = 1,
    results: Sequence[Any] | None = None,
) -> Iterator[Matmul]:
    """Yields the matmuls of a jaxpr.

    Args:
      around: the names around it.
      times: the number of its executions.
      devices: the number of devices that run it on local shards; 1 where types have global shapes.
      results: its results that are used; `None` for all.
    """
    for equation, used in _needed(jaxpr, jaxpr.outvars if results is None else results):
        names, primitive = f"{around}/{equation.source_info.name_stack}", equation.primitive.name
        if (routed := routing.turns(names)) == 0:
            continue
        if primitive in _RULES:
            work = _RULES[primitive](equation)
            if work is not None:
                operation = work.operation or primitive
                by_group = operation in _BY_GROUP or EVEN_TURNS in names
                flops = work.device_flops * times * (routing.filled(names) if by_group else 1)
                yield Matmul(
                    scope=scope(names, scopes),
                    phase=phase(names),
                    in_layers="layers" in names,
                    operation=operation,
                    dtype=work.dtype,
                    sizes=work.sizes,
                    count=times,
                    flops=flops * work.pieces * devices,
                    device_flops=flops,
                    device_bytes=work.device_bytes * times,
                )
        elif primitive == "cond":
            branches = [
                list(_matmuls(one.jaxpr, scopes, routing, names, times, devices))
                for one in equation.params["branches"]
            ]
            yield from max(branches, key=lambda found: sum(one.flops for one in found))
        else:
            turns = equation.params["length"] if primitive == "scan" else 1
            inside = times * (turns if routed is None else routed)
            manual = devices
            if primitive == "shard_map":
                sizes = equation.params["mesh"].shape
                manual *= math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"])
            for parameter in equation.params.values():
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    is_call = primitive not in _LOOPS and len(inner.outvars) == len(used)
                    asked = list(itertools.compress(inner.outvars, used)) if is_call else None
                    yield from _matmuls(inner, scopes, routing, names, inside, manual, asked)


_LOOPS = ("scan", "while")  # results of one turn are arguments of the next


def _needed(jaxpr: Any, results: Sequence[Any]) -> list[tuple[Any, list[bool]]]:
    """Returns the equations that `results` need, and for each of their results if it is used.

    XLA removes the others, for example products that were traced only for their derivatives.
    """
    asked = {id(variable) for variable in results}
    found = []
    for equation in reversed(jaxpr.eqns):
        used = [id(variable) in asked for variable in equation.outvars]
        # Collectives name their mesh axes by effects, and are removed like other equations.
        acts = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
        if acts or any(used):
            asked.update(map(id, equation.invars))
            found.append((equation, used))
    return found[::-1]


class _Work(NamedTuple):
    """One execution on one device. `pieces` executions make up the whole product."""

    dtype: str
    sizes: tuple[int, int, int, int]
    pieces: int
    device_flops: float
    device_bytes: int
    operation: str | None = None


def _local(aval: Any) -> tuple[list[int], set[str]]:
    """Returns the shape of one device's shard and the mesh axes that split it, from the type."""
    sizes: list[int] = list(aval.shape)
    axes: set[str] = set()
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return sizes, axes
    for index, names in enumerate(sharding.spec.partitions):
        for name in (names,) if isinstance(names, str) else names or ():
            if isinstance(name, str):
                sizes[index] //= sharding.mesh.shape[name]
                axes.add(name)
    return sizes, axes


def _pieces(aval: Any, axes: set[str]) -> int:
    sharding = getattr(aval, "sharding", None)
    return 1 if not axes or sharding is None else math.prod(sharding.mesh.shape[a] for a in axes)


def _bytes(*avals: Any) -> int:
    return sum(math.prod(_local(aval)[0]) * aval.dtype.itemsize for aval in avals)


def _dot_general(equation: Any) -> _Work:
    left, right = (operand.aval for operand in equation.invars[:2])
    contracted, batched = equation.params["dimension_numbers"]
    (left_contracted, right_contracted), (left_batch, right_batch) = contracted, batched
    (left_sizes, left_axes), (right_sizes, right_axes) = _local(left), _local(right)
    batch = math.prod(left_sizes[axis] for axis in left_batch)
    K = math.prod(left_sizes[axis] for axis in left_contracted)
    M = math.prod(left_sizes) // (batch * K)
    others = (axis for axis in range(right.ndim) if axis not in {*right_contracted, *right_batch})
    N = math.prod(right_sizes[axis] for axis in others)
    result = batch * M * N * equation.outvars[0].aval.dtype.itemsize
    return _Work(
        dtype=_wider(left.dtype, right.dtype),
        sizes=(batch, M, N, K),
        pieces=_pieces(left, left_axes | right_axes),
        device_flops=2.0 * batch * M * N * K,
        device_bytes=_bytes(left, right) + result,
    )


def _ragged_dot(equation: Any) -> _Work:
    """Each row times the matrix of its group, or each group's rows times each other. With a kernel
    of XLA's it takes as many FLOPs as a product with one matrix."""
    left, right = (operand.aval for operand in equation.invars[:2])
    result = equation.outvars[0].aval
    N = max(left.shape[0], result.shape[0])
    of_gradient = result.ndim == 3
    K, M = (left.shape[1], right.shape[1]) if of_gradient else (left.shape[1], result.shape[1])
    sizes = (1, K, M, N) if of_gradient else (1, N, M, K)
    dtype = _wider(left.dtype, right.dtype)
    return _Work(dtype, sizes, 1, 2.0 * N * K * M, _bytes(left, right, result))


def _scaled_matmul(equation: Any) -> _Work:
    """`jax.nn.scaled_matmul`, (B, M, K) times (B, N, K), both with scales of blocks along K."""
    left, right = (operand.aval for operand in equation.invars[:2])
    (batch, M, K), N = left.shape, right.shape[1]
    arrays = (*equation.invars, *equation.outvars)
    size, flops = _bytes(*(each.aval for each in arrays)), 2.0 * batch * M * N * K
    return _Work(_wider(left.dtype, right.dtype), (batch, M, N, K), 1, flops, size, "dot_general")


def _wider(*dtypes: np.dtype) -> str:
    return max(dtypes, key=lambda dtype: dtype.itemsize).name


def _attention_kernel(products: int) -> Any:
    """cuDNN's attention: `products` matrix products of S × T × D for each head.

    The forward pass has two (scores and values), the backward pass five, because it recomputes the
    scores (Dao et al. 2022, arXiv:2205.14135, §3.1). A causal kernel skips the blocks above the
    diagonal, which are half of them in long sequences.
    """

    def work(equation: Any) -> _Work:
        query, key = (operand.aval for operand in equation.invars[:2])
        sizes, axes = _local(query)
        B, S, H, D = sizes
        T = _local(key)[0][1]
        causal = "CAUSAL" in str(equation.params.get("mask_type", "")).upper()
        products_done = products * (0.5 if causal else 1.0)
        arrays = (*equation.invars, *equation.outvars)  # a mask of S × T among them
        return _Work(
            dtype=_wider(query.dtype, key.dtype),
            sizes=(B * H, S, T, D),
            pieces=_pieces(query, axes),
            device_flops=2.0 * products_done * B * H * S * T * D,
            device_bytes=_bytes(*(each.aval for each in arrays)),
        )

    return work


def _pallas_kernel(equation: Any) -> _Work:
    """A Pallas kernel: its own cost estimate, or else the products of a block times the blocks of
    its grid. Splash attention skips blocks above the diagonal."""
    arrays = [each.aval for each in (*equation.invars, *equation.outvars)]
    products = list(_matmuls(equation.params["jaxpr"]))
    if not products:
        return _Work(arrays[-1].dtype.name, (1, 1, 1, 1), 1, 0.0, _bytes(*arrays))
    grid = equation.params["grid_mapping"].grid
    blocks = float(math.prod(size for size in grid if isinstance(size, int)))
    if (name := str(equation.params.get("name", ""))).startswith("splash"):
        keys = grid[-3] if "dkv" in name else grid[-1]
        blocks *= (keys + 1) / (2 * keys)
    sizes = products[0].sizes
    if name.startswith("attention_"):  # lmlib.models.attend.fused.triton_kernels
        by_head = [each.aval for each in equation.invars if each.aval.ndim == 4]
        query, key, *_ = (x.shape for x in by_head if x.dtype.kind != "i")
        B, S, H, D = query
        sizes = B * H, S, key[1], D
    if name.startswith("recurrence_"):  # lmlib.models.recurrent.triton_chunks
        query, key, value, *_ = (x.aval.shape for x in equation.invars if x.aval.ndim == 4)
        # Each token reads a state of K keys. In the estimate they take the time of attention to K
        # keys, which is what the Triton kernels of flash-linear-attention need on an H200
        # (github.com/QwenLM/FlashQLA, benchmark_results_H200.txt).
        sizes = value[0] * value[2], value[1], query[3], value[3]
    said = equation.params.get("cost_estimate")
    operation = None
    if name.startswith("grouped_"):  # lmlib.models.experts.triton_grouped
        operation, made = "grouped_product", equation.outvars[0].aval.shape
        groups, (rows, columns) = (made[0], made[1:]) if len(made) == 3 else (1, made)
        sizes = groups, rows, columns, round(said.flops / (2 * math.prod(made)))
    if name.startswith("four_bit_"):  # lmlib.models.matrices.triton_four_bit
        rows = equation.outvars[0].aval.shape[0]
        columns = sum(each.aval.shape[1] for each in equation.outvars)
        sizes = 1, rows, columns, round(said.flops / (2 * rows * columns))
    counted = blocks * math.fsum(one.device_flops for one in products)
    return _Work(
        dtype=products[0].dtype,
        sizes=sizes,
        pieces=1,
        device_flops=counted if said is None else float(said.flops),
        device_bytes=_bytes(*arrays),
        operation=operation,
    )


_RULES = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "scaled_matmul_wrapper": _scaled_matmul,
    "pallas_call": _pallas_kernel,
    "dot_product_attention_fwd": _attention_kernel(2),
    "dot_product_attention_fwd_wrapper": _attention_kernel(2),
    "dot_product_attention_bwd": _attention_kernel(5),
    "dot_product_attention_bwd_wrapper": _attention_kernel(5),
}
