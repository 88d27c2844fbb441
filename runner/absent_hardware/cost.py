"""What a run of a config costs, whatever hardware it is for."""

import fiddle as fdl
import jax

from lmlib.experiment import Experiment
from lmlib.optim.trainable import flops_per_token
from lmlib.plan.cost import Cost
from runner.absent_hardware.stand_ins import without_data


def cost_of(cfg: fdl.Config[Experiment]) -> Cost:
    """What the run of `cfg` costs; of its data it needs the sizes alone."""
    cfg = without_data(cfg)
    batch_size, sequence_length = cfg.data.batch_size, cfg.data.sequence_length
    make_model = fdl.build(cfg.model)
    model = jax.eval_shape(lambda: make_model(key=jax.random.key(0)))
    groups = None if cfg.trainable is None else fdl.build(cfg.trainable)
    objective = fdl.build(cfg.objective)

    def flops(causal: bool) -> float:
        of_training = flops_per_token(model, groups, sequence_length, causal)
        return of_training + objective.flops_per_token(model, sequence_length, causal)

    return Cost(cfg.steps, batch_size * sequence_length, flops(causal=False), flops(causal=True))
