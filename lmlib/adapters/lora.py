"""Low-rank adapters on any model's matrices (LoRA: Hu et al. 2021, arXiv:2106.09685)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, PRNGKeyArray

from lmlib.models.matrices.dora import with_magnitude
from lmlib.models.matrices.lora import (
    CHOICE,
    EXPERTS,
    adapted,
    can_be_adapted,
    has_adapters,
    map_adapted,
)
from lmlib.models.weights import fold_in_name
from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.mesh import on_mesh_of
from lmlib.parallel.selection import SelectionError, named_weights, selected


def lora(
    of: Callable[..., Any],
    rank: int = 8,
    alpha: float = 16.0,
    paths: Sequence[str] = ("stack.*",),
    axes: Sequence[str] = (),
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    magnitude: bool = False,
    *,
    key: PRNGKeyArray,
) -> Any:
    """Makes a model with `of(key=…)` and adds adapters, for `Experiment.model`.

        model=fdl.Partial(lora, of=fdl.Partial(llama, …), rank=8, alpha=16)

    The other arguments are as in `with_adapters`.
    """
    settings = rank, alpha, paths, axes, rank_stabilized, dropout, magnitude
    return with_adapters(of(key=key), *settings, key=fold_in_name(key, "adapters"))


def with_adapters(
    model: M,
    rank: int = 8,
    alpha: float = 16.0,
    paths: Sequence[str] = ("stack.*",),
    axes: Sequence[str] = (),
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    magnitude: bool = False,
    *,
    key: PRNGKeyArray,
) -> M:
    """Adds low-rank adapters to the selected matrices of `model`, which still computes the same.

    Args:
      rank: rank of the adapters. The size of the mesh's `tensor` axis must divide it.
      alpha: adapter outputs are multiplied by alpha / rank, or by alpha / √rank if
        `rank_stabilized` (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732).
      paths, axes: select weights, as in `lmlib.parallel.selection.selected`. Norms, biases,
        learned positions and routers are not adapted. Experts' matrices, each with its own
        adapter, are adapted only if a selector matches nothing but experts: "*.experts.*", or the
        axis "expert". An adapted vocabulary table (`axes=("vocab",)`) is merged in every step, so
        its gradient is as large.
      dropout: rate at which elements of the adapters' inputs are dropped; must be 0 for experts.
      magnitude: True trains the norm of each output's weights too (DoRA: Liu et al. 2024,
        arXiv:2402.09353); must be False for experts, as in PEFT.

    Raises ValueError if a number is out of range, or the selection has no matrix or is only a
    router.
    """
    if rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"rank and alpha must be positive, got {rank} and {alpha}")
    if not 0 <= dropout < 1:
        raise ValueError(f"an adapter's dropout must be at least 0 and below 1, got {dropout}")
    if has_adapters(model):
        raise ValueError("the model has adapters already: merge them first (`merged`)")
    matrices = _matrices(named_weights(model), paths, axes)
    if any(EXPERTS in weight.axes for weight in matrices.values()):
        if dropout:
            raise ValueError(f"adapters of experts have no dropout, got {dropout}: leave it out")
        if magnitude:
            raise ValueError("adapters of experts have no magnitude: leave it out")

    def adapt(weight: Weight, array: Array) -> Any:
        if weight.path not in matrices:
            return array
        one = adapted(weight, array, rank, alpha, rank_stabilized, dropout, key)
        return with_magnitude(one) if magnitude else one

    return map_weights(adapt, model)


def _matrices(
    weights: Mapping[str, Weight], paths: Sequence[str], axes: Sequence[str]
) -> dict[str, Weight]:
    """Returns the selected weights that can be adapted."""
    chosen = selected(weights, paths, axes)
    found = {path: one for path, one in chosen.items() if can_be_adapted(one)}
    asked = dict[str, Weight]()
    for selector in (*(((path,), ()) for path in paths), *(((), (axis,)) for axis in axes)):
        meant = selected(weights, *selector)
        if all(CHOICE in weight.axes for weight in meant.values()):
            raise SelectionError(
                f"{next(iter(meant))} is a router's, and routers have no adapters: let it train "
                "whole, as adapters(besides=(…,)) of lmlib.optim.trainable does"
            )
        if all(EXPERTS in weight.axes for weight in meant.values()):
            asked |= meant
    found = {path: one for path, one in found.items() if EXPERTS not in one.axes or path in asked}
    if not found:
        alone = " (experts are adapted where a pattern means them alone: '*.experts.*')"
        of_experts = any(EXPERTS in weight.axes for weight in chosen.values())
        raise SelectionError(
            f"paths={paths!r} and axes={axes!r} select no matrix, but "
            f"{', '.join(list(chosen)[:3])}{alone if of_experts else ''}"
        )
    return found


def merged(model: M) -> M:
    """Merges each adapter into its base, at least in float32; the result computes the same."""
    with on_mesh_of(model), jax.default_matmul_precision("highest"):  # avoids TF32 on GPUs
        return map_adapted(lambda _, one: one.dense(), model)
