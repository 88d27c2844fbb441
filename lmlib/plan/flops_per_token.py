"""FLOPs for each token: the analytic number, beside what the traced step does."""

import dataclasses

from lmlib.plan.abstract_step import AbstractStep, traced
from lmlib.plan.flops import StepFlops, count_flops


@dataclasses.dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of a training step.

    Args:
      analytic, analytic_causal: of the model for one token, with attention whole and with its
        causal half; what MFU counts.
      counted: the matmuls of the traced step. Kernels that skip what the mask hides count as they
        compute; products of no matrices are left out.
      tokens: of a step.
    """

    analytic: float
    analytic_causal: float
    counted: StepFlops
    tokens: int

    @property
    def needed(self) -> float:
        """For one token, counted, without what is computed again."""
        return (self.counted.total - self.counted.of("recomputation")) / self.tokens

    @property
    def recomputed(self) -> float:
        """For one token, counted."""
        return self.counted.of("recomputation") / self.tokens

    def __str__(self) -> str:
        return (
            f"analytic, for each token: {_giga(self.analytic)} with attention whole, "
            f"{_giga(self.analytic_causal)} with its causal half\n"
            f"counted in the traced step: {_giga(self.needed)} "
            f"({self.needed / self.analytic:.1%} of the analytic number with attention whole), and "
            f"{_giga(self.recomputed)} to compute activations again\n\n{self.counted}"
        )


def flops_per_token(step: AbstractStep) -> FlopsPerToken:
    data, model = step.experiment.data, step.state.model
    return FlopsPerToken(
        analytic=model.training_flops_per_token(data.sequence_length, causal=False),
        analytic_causal=model.training_flops_per_token(data.sequence_length, causal=True),
        counted=count_flops(traced(step).jaxpr),
        tokens=data.batch_size * data.sequence_length,
    )


def _giga(flops: float) -> str:
    return f"{flops / 1e9:,.3f} GFLOP"
