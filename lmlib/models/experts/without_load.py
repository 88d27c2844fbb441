"""Models without how full their experts were, which training alone reads."""

from typing import TypeVar

import equinox as eqx
import jax

from lmlib.models.experts.router import Router

M = TypeVar("M")


def without_load(model: M) -> M:
    """`model`, of arrays or shapes, whose routers have forgotten how full experts were in the last
    step: what a router makes of a token does not depend on it."""

    def forgetful(part: object) -> object:
        if not isinstance(part, Router) or part.load is None:
            return part
        return eqx.tree_at(lambda router: router.load, part, None)

    return jax.tree.map(forgetful, model, is_leaf=lambda part: isinstance(part, Router))
