"""Whole training steps compile for every kind of hardware that the documentation names."""

import functools

import jax
import pytest
from aot import COUNTED_ON_GPUS, absent

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives
from lmlib.plan.planner import compilable, dense_expansions
from lmlib.plan.program import read_program

SIZES = {"vocab": 4_096, "embed": 512, "layers": 2, "heads": 8, "head_dim": 64, "mlp": 1_024}
B, S = 16, 512


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["a100:1x4", "h100:1x4", "h200:1x4", "b200:1x4", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"],
)
@pytest.mark.parametrize(("model", "axis"), [(llama, "tensor"), (mixtral, "expert")])
def test_a_whole_step_compiles(name, model, axis):
    """Products of experts stay grouped: an expanded one multiplies each row by all matrices."""
    target, devices = absent(name)
    experiment = Experiment(
        model=functools.partial(model, **SIZES),
        compute=Compute(),
        data=Synthetic(SIZES["vocab"], B, S),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(fsdp=2, **{axis: 2}, devices=devices),
        steps=10,
    )
    experiment, _ = compilable(experiment, target)  # the kernels of the packages installed here
    experiment.check()
    options = COUNTED_ON_GPUS if target.accelerator.platform == "cuda" else {}
    with jax.set_mesh(experiment.mesh):
        compiled = experiment.trace_step().lower().compile(options)
    program = read_program(compiled.as_text())
    sent = collectives(program, experiment.mesh)
    assert {axis for one in sent for axis in one.mesh_axes} == {"fsdp", axis}
    assert not dense_expansions(program)
