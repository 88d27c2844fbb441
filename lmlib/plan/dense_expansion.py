"""Products by group that XLA has no kernel for, and makes of all rows with all matrices."""

from lmlib.plan.program import Program

_DENSE = ("dot", "convolution")


def dense_expansions(program: Program) -> tuple[str, ...]:
    """A warning if there are some; empty if not. Kernels for TPUs are custom calls. Compilers for
    CPUs get the expanded product without its origin, so of their programs nothing is known."""
    paths = sorted({
        one.op_name
        for one, _ in program.instructions()
        if one.opcode in _DENSE and "ragged_dot" in one.op_name.rpartition("/")[2]
    })  # fmt: skip
    if not paths:
        return ()
    return (
        "warning: XLA expands jax.lax.ragged_dot into products of all rows with all matrices, as "
        f"many times more work as there are groups, in {', '.join(paths)}; use "
        "lmlib.models.experts.grouped.grouped_product, whose blocks do not",
    )
