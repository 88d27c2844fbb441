"""Tokens and FLOPs of a run, independent of the hardware."""

import fiddle as fdl
import jax

from lmlib.experiment import Experiment
from lmlib.experiment.stages import batches_of, spans_of
from lmlib.optim.trainable import flops_per_token
from lmlib.plan.cost import Cost, StageCost
from runner.aot.abstract_inputs import without_data
from runner.config.configs import later_stages


def cost_of(cfg: fdl.Config[Experiment]) -> Cost:
    """Returns the cost of the run of `cfg`. Only the sizes of its data are needed."""
    cfg = without_data(cfg)
    batches = batches_of(
        fdl.build(cfg.data), [fdl.build(stage) for stage in later_stages(cfg)], cfg.steps
    )
    make_model = fdl.build(cfg.model)
    model = jax.eval_shape(lambda: make_model(key=jax.random.key(0)))
    groups = None if cfg.trainable is None else fdl.build(cfg.trainable)
    objective = fdl.build(cfg.objective)

    def flops(length: int, causal: bool) -> float:
        of_training = flops_per_token(model, groups, length, causal)
        return of_training + objective.flops_per_token(model, length, causal)

    return Cost(
        tuple(
            StageCost(
                len(steps),
                data.batch_size * data.sequence_length,
                flops(data.sequence_length, causal=False),
                flops(data.sequence_length, causal=True),
            )
            for steps, data in spans_of(batches, cfg.steps).items()
        )
    )
