"""Reads scope, phase and loop of an operation from its names.

An equation of a jaxpr has names in `source_info.name_stack`, an instruction of a compiled program
in `op_name`. They list transformations ("transpose(jvp(layers))"), control flow ("while/body"), and
the named scopes of the model and the step.
"""

import re
from collections.abc import Sequence

from lmlib.models.experts.grouped import EVEN_TURNS
from lmlib.models.experts.rounds import FURTHER_ROUNDS
from lmlib.models.model import Model

OF_THE_STEP = ("loss", "optimizer")  # scopes outside the model
OTHER = "other"  # norms, residual sums and all else outside those scopes
PHASES = ("forward", "recomputation", "backward", "update")
# Named scopes around loops, and the name of one iteration.
TURNS = {
    "layers": "layer",
    "slots": "slot",
    "microbatches": "microbatch",
    "loss": "chunk of the loss",
    FURTHER_ROUNDS: "further round of experts",
}


def scopes_of(model: Model) -> tuple[str, ...]:
    """Returns all scopes of a step that trains `model`, in the order of execution."""
    return (*model.names.scopes, *OF_THE_STEP)


def scope(names: str, scopes: Sequence[str]) -> str:
    """Returns the innermost of `scopes` in `names`, or `OTHER`."""
    found = [name for name in re.findall(r"\w+", names) if name in scopes]
    return found[-1] if found else OTHER


def phase(names: str) -> str:
    """Returns the phase of an operation, one of `PHASES`, from the transformations in `names`."""
    # In JAX 0.12 the inputs of a rematerialised function have the function's name, "remat2".
    if "rematted_computation" in names or names.endswith("/remat2"):
        return "recomputation"
    if "transpose(" in names:
        return "backward"
    return "forward" if "jvp(" in names else "update"


def turns_in_even_routing(loop_names: str) -> int | None:
    """Returns the iterations of a loop over routed tokens if routing is even; `None` for other
    loops. Further rounds of experts then have none."""
    if FURTHER_ROUNDS in loop_names:
        return 0
    found = re.search(rf"{EVEN_TURNS}(\d+)(/while)?$", loop_names)
    return int(found[1]) if found else None


def turn(loop_names: str) -> str | None:
    """Returns the name of one iteration of a loop ("layer"), from the names of the loop itself
    ("…/jvp(layers)/while"); `None` if unknown."""
    own = loop_names.removesuffix("/while").rpartition("/")[2]
    found = [name for name in re.findall(r"\w+", own) if name in TURNS]
    return TURNS[found[-1]] if found else None
