"""Norms of each layer during training: an action for `cfg.actions`."""

import dataclasses

from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.data.batch import Source, place
from lmlib.data.resumable import Resumable
from lmlib.experiment import StepEvent
from lmlib.inspect.layer_statistics import layer_statistics
from lmlib.losses.next_token import NextToken
from lmlib.losses.objective import Objective
from lmlib.parallel.layout import sharding


@dataclasses.dataclass(frozen=True)
class LayerNorms:
    """Adds `grad_norm/PART`, `weight_norm/PART` and `output_rms/PART` to the metrics.

    PART is each layer, and each part outside the layers. The values come from `layer_statistics`,
    on the first batch of `data` (the experiment's validation, or its data). It takes the time and
    the memory of one more forward and backward pass. Raises ValueError for a stream, since reading
    its first batch would rewind it.
    """

    data: Source
    mesh: Mesh
    compute: Compute
    objective: Objective = NextToken()

    def __post_init__(self) -> None:
        if isinstance(self.data, Resumable):
            raise ValueError(
                f"LayerNorms cannot read {type(self.data).__name__}, a stream: give it data that "
                "has any batch at any time, such as flat tokens"
            )

    def __call__(self, now: StepEvent) -> dict[str, float]:
        rows = sharding("batch seq", self.mesh)
        found = layer_statistics(
            now.state.whole_model,
            place(self.data, 0, rows),
            self.mesh,
            self.compute,
            self.objective,
            now.state.reference_model,
        )
        norms = {}
        for part in found.parts:
            norms[f"grad_norm/{part.name}"] = part.gradients
            norms[f"weight_norm/{part.name}"] = part.weights
            if part.output is not None:
                norms[f"output_rms/{part.name}"] = part.output
        return norms
