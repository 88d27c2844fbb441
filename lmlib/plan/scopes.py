"""Reads scope, phase and loop of an operation from its names.

An equation of a jaxpr has names in `source_info.name_stack`, an instruction of a compiled program
in `op_name`. They list transformations ("transpose(jvp(layers))"), control flow ("while/body"), and
the named scopes of the model and the step.
"""

import dataclasses
import math
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
    "whole_batch": "microbatch",
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
    return "forward" if "jvp(" in names or "whole_batch" in names else "update"


@dataclasses.dataclass(frozen=True)
class Routing:
    """The rows that the experts of a device get, as multiples of those in even routing.

    `imbalance` is for the busiest device, which the others wait for, and `room` the rows of a round
    (`Compute.expert_room`). A product computes a round's rows in groups of equal size.
    """

    imbalance: float = 1.0
    room: float = 1.0

    @property
    def further_rounds(self) -> int:
        return math.ceil(self.imbalance / self.room) - 1

    def filled(self, names: str) -> float:
        """Returns the fraction of a round's rows that experts get, from the names around it."""
        if FURTHER_ROUNDS in names:
            return (self.imbalance / self.room - 1) / self.further_rounds
        return min(self.imbalance / self.room, 1.0)

    def turns(self, loop_names: str) -> int | None:
        """Returns the iterations of a loop over routed tokens; `None` for other loops."""
        further = re.search(rf"{FURTHER_ROUNDS}\)*(/while)?$", loop_names)
        if FURTHER_ROUNDS in loop_names and (further or not self.further_rounds):
            return self.further_rounds
        found = re.search(rf"{EVEN_TURNS}(\d+)(/while)?$", loop_names)
        return int(found[1]) if found else None


EVEN = Routing()


def turn(loop_names: str) -> str | None:
    """Returns the name of one iteration of a loop ("layer"), from the names of the loop itself
    ("…/jvp(layers)/while"); `None` if unknown."""
    own = loop_names.removesuffix("/while").rpartition("/")[2]
    found = [name for name in re.findall(r"\w+", own) if name in TURNS]
    return TURNS[found[-1]] if found else None
