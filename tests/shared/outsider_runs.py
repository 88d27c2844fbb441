"""Trains experiments that use modules from outside of lmlib: on a mesh and on one device, whole and
resumed. Shapes of batches and models are as small as eight devices allow."""

import numpy as np
import optax
from laid_out import drawn, laid_out

from lmlib import Compute, Experiment, make_mesh
from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.parallel.layout import sharding

SOURCE = Synthetic(vocab_size=64, batch_size=16, sequence_length=16)
FLOAT32 = Compute(dtype="float32")
SIZES = {"vocab": 64, "embed": 32}
STEPS = 6
EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}


def momentum(steps):
    """No Adam, which makes a whole step of rounding where a gradient is zero: choices flip."""
    return Optimizer(optax.sgd(0.1, momentum=0.5), optax.constant_schedule(0.1), as_declared)


def experiment(model, mesh=EIGHT, compute=FLOAT32, optimizer=momentum, **settings):
    settings = {
        "data": SOURCE,
        "steps": STEPS,
        "compute": compute,
        "optimizer": optimizer,
    } | settings
    return Experiment(model=model, mesh=make_mesh(**mesh), **settings)


def compiled(run):
    run.check()
    return run.trace_step().lower().compile()


def trained(run, step, state, first=0, save=lambda step, state: None):
    """The metrics of each compiled `step` from `first` on, and the last state."""
    metrics = []
    rows = sharding("batch seq", run.mesh)
    for i in range(first, STEPS):
        state, of_step = step(state, place(SOURCE, i, rows), run.training.hyperparameters)
        metrics.append({name: float(value) for name, value in of_step.items()})
        save(i + 1, state)
    return metrics, state


def check_outsider(run, alone, workdir, rtol=2e-5):
    """Checks that `run` trains like `alone`, the same run on one device, and resumes bit for bit.
    Returns the metrics of its steps and its last state."""
    step = compiled(run)
    model = drawn(run.recipe.abstract_model)
    begun, begun_alone = (each.initial_state(laid_out(model, each.mesh)) for each in (run, alone))
    with Checkpoints(workdir, keep=1) as checkpoints:

        def save(step, state):
            if step == 3:
                checkpoints.save(step, state.changing, {})

        metrics, state = trained(run, step, begun, save=save)
    expected, _ = trained(alone, compiled(alone), begun_alone)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            np.testing.assert_allclose(value, theirs[name], rtol=rtol, atol=1e-6, err_msg=name)
    with Checkpoints(workdir, read_only=True) as checkpoints:
        again = checkpoints.restore_newest(run.abstract_state().changing).state
    assert trained(run, step, again, 3)[0] == metrics[3:]
    return metrics, state
