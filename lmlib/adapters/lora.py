"""Low-rank adapters on any model's matrices (LoRA: Hu et al. 2021, arXiv:2106.09685)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, PRNGKeyArray

from lmlib.models.matrices.adapted import adapted, can_be_adapted, has_adapters, map_adapted
from lmlib.models.weights import fold
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
    *,
    key: PRNGKeyArray,
) -> Any:
    """The model that `of(key=…)` makes, with adapters: for `Experiment.model`.

        model=fdl.Partial(lora, of=fdl.Partial(llama, …), rank=8, alpha=16)

    The other arguments are those of `with_adapters`.
    """
    return with_adapters(
        of(key=key), rank, alpha, paths, axes, rank_stabilized, dropout, key=fold(key, "adapters")
    )


def with_adapters(
    model: M,
    rank: int = 8,
    alpha: float = 16.0,
    paths: Sequence[str] = ("stack.*",),
    axes: Sequence[str] = (),
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    *,
    key: PRNGKeyArray,
) -> M:
    """`model` with a new `lmlib.models.matrices.adapted.Adapted` in place of each matrix that is
    selected. It computes what `model` does: the adapters start at zero.

    Args:
      rank: of the adapters. A mesh's `tensor` must divide it.
      alpha: what an adapter makes is multiplied by alpha / rank.
      paths, axes: which weights, as in `lmlib.parallel.selection.selected`; of these, all matrices
        are adapted, but no norms, biases, learned positions, experts and routers. A table of the
        vocabulary (`axes=("vocab",)`) is merged in every step, and so is its gradient as large as
        the table.
      rank_stabilized: multiply by alpha / √rank (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732).
      dropout: rate at which elements of what an adapter multiplies are dropped in training.

    Raises:
      ValueError: for numbers out of range, or a selection of no matrix.
    """
    if rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"rank and alpha must be positive, got {rank} and {alpha}")
    if not 0 <= dropout < 1:
        raise ValueError(f"an adapter's dropout must be at least 0 and below 1, got {dropout}")
    if has_adapters(model):
        raise ValueError("the model has adapters already: merge them first (`merged`)")
    chosen = selected(named_weights(model), paths, axes)
    matrices = {path for path, weight in chosen.items() if can_be_adapted(weight)}
    if not matrices:
        raise SelectionError(
            f"paths={paths!r} and axes={axes!r} select no matrix, but {', '.join(list(chosen)[:3])}"
        )

    def adapt(weight: Weight, array: Array) -> Any:
        if weight.path not in matrices:
            return array
        return adapted(weight, array, rank, alpha, rank_stabilized, dropout, key)

    return map_weights(adapt, model)


def merged(model: M) -> M:
    """`model` with each adapter added to its base, in float32 at least; it computes the same."""
    with on_mesh_of(model):
        return map_adapted(lambda _, one: one.merged(), model)
