"""Updates of matrices for absent accelerators compile, and send each matrix there and back."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from aot import COUNTED_ON_GPUS, absent
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.models.families.llama import llama
from lmlib.models.weights import fan_in, weight
from lmlib.optim.matrices.dion import dion
from lmlib.optim.matrices.muon import muon
from lmlib.optim.matrices.shampoo import shampoo
from lmlib.optim.matrices.soap import soap
from lmlib.optim.matrices.soap_muon import soap_muon
from lmlib.optim.schedules import warmup_constant
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.collectives import collectives
from lmlib.plan.planner import compilable
from lmlib.plan.program import read_program
from lmlib.state import Training, abstract_state

L, E, F = 8, 64, 128
ELEMENTS, SQUARES = E * F, E * E + F * F
# Bytes of a layer's matrix and its state, all that is sent and returned for an update.
SENT = {
    muon: 2 * 2 * ELEMENTS,  # bfloat16
    soap: 4 * (5 * ELEMENTS + 4 * SQUARES),
    shampoo: 4 * (5 * ELEMENTS + 4 * SQUARES),
    soap_muon: 4 * (5 * ELEMENTS + 4 * SQUARES),
    dion: 4 * (4 * ELEMENTS + 2 * F * E // 4),
}


class Model(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x8", "v5e:2x4"])
@pytest.mark.parametrize("make", SENT, ids=lambda each: each.__name__)
def test_an_update_compiles_and_sends_each_array_there_and_back(make, target):
    _, devices = absent(target)
    mesh = make_mesh(fsdp=8, devices=devices)
    made = make(10, 1e-3, warmup_constant, clip_norm=None)
    state = abstract_state(lambda: jax.vmap(Model)(jnp.zeros((L, E, F))), Training(made, mesh))
    options = COUNTED_ON_GPUS if target.startswith("h100") else {}
    with jax.set_mesh(mesh):
        lowered = jax.jit(made.transformation.update).lower(
            state.model, state.optimizer, state.model
        )
        compiled = lowered.compile(options)
    sent = collectives(read_program(compiled.as_text()), mesh).bytes_sent_per_step
    # Each device has an eighth of everything, and sends seven eighths of that.
    assert sent == pytest.approx(L * SENT[make] * 7 / 64, rel=0.01)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("make", [soap, shampoo, dion], ids=lambda each: each.__name__)
def test_a_whole_step_sends_the_matrices_of_all_layers(make):
    """A layer has four matrices of E by E, of attention, and three of E by F."""
    target, devices = absent("h100:1x8")
    sizes = {"vocab": 512, "embed": E, "layers": L, "heads": 4, "head_dim": E // 4, "mlp": F}
    experiment = Experiment(
        model=functools.partial(llama, **sizes),
        compute=Compute(),
        data=Synthetic(512, 8, 128),
        optimizer=functools.partial(make, peak_lr=1e-3),
        mesh=make_mesh(fsdp=8, devices=devices),
        steps=10,
    )
    experiment, _ = compilable(experiment, target)
    with jax.set_mesh(experiment.mesh):
        compiled = experiment.trace_step().lower().compile(COUNTED_ON_GPUS)
    sent = collectives(read_program(compiled.as_text()), experiment.mesh)
    exchanged = sum(
        one.bytes_sent_per_step for one in sent if (one.kind, one.phase) == ("all-to-all", "update")
    )
    square = 4 * (5 * E * E + 4 * 2 * E * E) if make is not dion else 4 * (4 * E * E + E * E // 2)
    assert exchanged == pytest.approx(L * (4 * square + 3 * SENT[make]) * 7 / 64, rel=0.01)
