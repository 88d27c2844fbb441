"""Whether a model can be computed where devices share the rows of a batch."""

from typing import Any

from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.models.attend.kernel import kernel_of
from lmlib.models.split_rows import check_rows_may_be_split
from lmlib.parallel.layout import COMPUTE, pieces


def check_split_rows(
    model: Any, reference_model: Any, objective: Any, compute: Compute, mesh: Mesh
) -> None:
    """Checks that everything that sees a row's tokens may be computed on `mesh`; see
    `lmlib.models.split_rows`.

    Raises:
      ValueError: if a part of a model, or the objective, does not declare that rows may be split,
        or a kernel of attention is asked for that cannot compute split rows.
    """
    axis, devices = COMPUTE["seq"], pieces(COMPUTE["seq"], mesh)
    if devices == 1:
        return
    if compute.attention not in ("auto", "blockwise"):
        from lmlib.models.attend.context_parallel import problem  # which only split rows need

        reason = problem(kernel_of(compute.attention), compute.context)
        if reason is not None:
            raise ValueError(
                f"attention={compute.attention!r} cannot compute rows that {axis}={devices} "
                f"splits: {reason}; use attention='auto', or {axis}=1"
            )
    for part in (model, reference_model, objective):
        check_rows_may_be_split(part, f"{axis}={devices}")


def check_pieces(model: Any, sequence_length: int, compute: Compute, mesh: Mesh) -> None:
    """Checks that the kernel asked for can compute what devices have of a row: pieces of it, which
    are shorter.

    Raises:
      ValueError: if it cannot.
    """
    axis, devices = COMPUTE["seq"], pieces(COMPUTE["seq"], mesh)
    if devices == 1:
        return
    from lmlib.models.attend.context_parallel import length_of_piece  # which only split rows need

    piece = length_of_piece(sequence_length, devices, "balanced")
    try:
        model.check(piece, compute)
    except ValueError as error:
        raise ValueError(
            f"{axis}={devices} cuts rows of {sequence_length} tokens into pieces of {piece}: "
            f"{error}"
        ) from error
