"""Compiled steps that the runs of a process share."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from runner.training.compiled_step import identity_of


class Programs:
    """Compiles each step once, and keeps the last few: for `Options.programs`."""

    def __init__(self, most: int = 4):
        self._most = most
        self._kept: dict[tuple[str, ...], jax.stages.Compiled] = {}

    def __call__(
        self, step: jax.stages.Lowered, mesh: Mesh, compile_step: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        key = tuple(identity_of(step, mesh).values())
        kept = self._kept.pop(key, None)
        # It unpacks its arguments as those that it was compiled for were packed.
        if kept is None or (kept.in_tree, kept.out_tree) != (step.in_tree, step.out_tree):
            kept = compile_step()
        self._kept[key] = kept  # the last, now
        while len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return kept
