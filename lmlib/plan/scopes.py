"""Where an operation comes from, read off the names that JAX keeps of it.

The names are those of an equation of a jaxpr (`source_info.name_stack`) or of an instruction of a
compiled program (`op_name`): transformations with what they transform ("transpose(jvp(layers))"),
control flow ("while/body"), and the named scopes that the model and the step put around their code.
"""

import re
from collections.abc import Sequence

from lmlib.models.experts.grouped import EVEN_TURNS
from lmlib.models.experts.rounds import FURTHER_ROUNDS
from lmlib.models.model import Model

OF_THE_STEP = ("loss", "optimizer")  # scopes around what is not the model's
OTHER = "other"  # norms, residual sums and all else outside those scopes
PHASES = ("forward", "recomputation", "backward", "update")
# Named scopes around loops, and one turn of such a loop.
TURNS = {
    "layers": "layer",
    "slots": "slot",
    "microbatches": "microbatch",
    "loss": "chunk of the loss",
    FURTHER_ROUNDS: "further round of experts",
}


def scopes_of(model: Model) -> tuple[str, ...]:
    """All scopes of a step that trains `model`, in the order of computing."""
    return (*model.names.scopes, *OF_THE_STEP)


def scope(names: str, scopes: Sequence[str]) -> str:
    """The innermost of `scopes` in `names`, or `OTHER`."""
    found = [name for name in re.findall(r"\w+", names) if name in scopes]
    return found[-1] if found else OTHER


def phase(names: str) -> str:
    """Which of `PHASES` an operation belongs to, from the transformations in `names`."""
    # JAX 0.12 gives what goes into a rematerialised function the name of the whole, "remat2".
    if "rematted_computation" in names or names.endswith("/remat2"):
        return "recomputation"
    if "transpose(" in names:
        return "backward"
    return "forward" if "jvp(" in names else "update"


def turns_in_even_routing(loop_names: str) -> int | None:
    """How often a loop turns if routing is even, where routing decides: never in further rounds."""
    if FURTHER_ROUNDS in loop_names:
        return 0
    found = re.search(rf"{EVEN_TURNS}(\d+)(/while)?$", loop_names)
    return int(found[1]) if found else None


def turn(loop_names: str) -> str | None:
    """What one turn of a loop is, from the names of the loop itself ("…/jvp(layers)/while")."""
    own = loop_names.removesuffix("/while").rpartition("/")[2]
    found = [name for name in re.findall(r"\w+", own) if name in TURNS]
    return TURNS[found[-1]] if found else None
