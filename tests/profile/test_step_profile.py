"""The profile of a step, against traces of programs whose work is counted."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from lmlib.hardware.specifications import ACCELERATORS
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.flops import count_flops
from lmlib.profile.step_profile import StepProfile, step_profile
from lmlib.profile.trace import Execution, TraceError, newest_trace, read_trace

SCOPES = ("embed", "projections", "attention", "mlp", "loss", "optimizer")

pytestmark = pytest.mark.several_devices

STEPS, LAYERS, SIZE, BATCH = 3, 5, 256, 64
H100 = ACCELERATORS["h100"]


def loss(w_LEE, x_BE, unroll=1):
    def layer(x_BE, w_EE):
        with jax.named_scope("mlp"):
            # A sum along the row keeps XLA from fusing the layers' products.
            return jnp.cumsum(jnp.tanh(x_BE @ w_EE), axis=1), None

    with jax.named_scope("layers"):
        x_BE, _ = jax.lax.scan(layer, x_BE, w_LEE, unroll=unroll)
    with jax.named_scope("loss"):
        return (x_BE**2).sum()


@dataclasses.dataclass(frozen=True)
class Traced:
    executions: list[Execution]
    traced: jax.stages.Traced
    text: str


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trace of three steps on eight devices, which sum the gradient, and of another program."""
    folder = tmp_path_factory.mktemp("trace")
    mesh = make_mesh(fsdp=8)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        whole = NamedSharding(mesh, PartitionSpec())
        w_LEE = jax.device_put(jnp.ones((LAYERS, SIZE, SIZE)) / SIZE, whole)
        x_BE = jax.device_put(jnp.ones((BATCH, SIZE)), rows)
        traced = jax.jit(jax.value_and_grad(loss)).trace(w_LEE, x_BE)
        step, other = traced.lower().compile(), jax.jit(jnp.cos)
        jax.block_until_ready((step(w_LEE, x_BE), other(x_BE)))
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                jax.block_until_ready((step(w_LEE, x_BE), other(x_BE)))
    return Traced(read_trace(newest_trace(folder), jax.default_backend()), traced, step.as_text())


def profile_of(run: Traced, **known) -> StepProfile:
    return step_profile(run.executions, run.text, STEPS, SCOPES, **known)


def test_every_matmul_of_every_layer_device_and_step_is_counted_once(run):
    profile = profile_of(run)
    assert profile.devices == 8
    products = [one for one in profile.kernels if one.work.flops]
    # Forward one product for each layer, backward two, of a device's rows.
    assert sum(one.times for one in products) == 3 * LAYERS
    flops = sum(one.work.flops * one.times for one in products)
    assert flops == 3 * LAYERS * 2 * (BATCH // 8) * SIZE**2
    assert flops == count_flops(run.traced.jaxpr, SCOPES).total / 8
    assert {(one.work.scope, one.work.in_layers) for one in products} == {("mlp", True)}
    assert {one.work.phase for one in products} == {"forward", "backward"}
    assert {one.work.operation for one in products} == {"dot_general"}


def test_the_loop_and_what_is_in_it_do_not_both_count(run):
    names = {one.work.name for one in profile_of(run).kernels}
    loops = {one.instruction for one in run.executions if one.instruction.startswith("while")}
    assert loops and not loops & names
    without = [one for one in run.executions if one.instruction in loops]
    profile = step_profile(without, run.text, STEPS, SCOPES)
    # If a trace has only the loop, as a graph that the host launched at once, the loop counts.
    assert {one.work.name for one in profile.kernels} == loops
    assert profile.busy_seconds > 0


def test_the_seconds_are_those_of_the_trace(run):
    profile = profile_of(run)
    for kernel in profile.kernels:
        own = [
            one.seconds
            for one in run.executions
            if one.instruction == kernel.work.name and one.program.startswith("jit_loss")
        ]
        assert kernel.seconds == pytest.approx(sum(own) / (STEPS * 8))
    seconds = [one.seconds for one in profile.kernels]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < profile.busy_seconds <= profile.step_seconds


def test_collectives_have_a_line_of_their_own(run):
    profile = profile_of(run)
    assert any(one.work.sends for one in profile.kernels)
    scopes = str(profile).split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in scopes].count("collectives") == 1
    shares = [float(line.split()[-1].rstrip("%")) for line in scopes[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


def test_on_known_devices_the_roofline_and_the_plan_stand_beside_what_was_measured(run):
    matmuls = count_flops(run.traced.jaxpr, SCOPES).matmuls
    profile = profile_of(run, accelerator=H100, matmuls=matmuls)
    product = next(one for one in profile.kernels if one.work.flops)
    bytes_at_least = (2 * (BATCH // 8) * SIZE + SIZE**2) * 4
    assert product.work.bytes >= bytes_at_least
    assert product.work.seconds_at_best(H100) == pytest.approx(
        max(
            2 * (BATCH // 8) * SIZE**2 / (989e12 / 2),  # float32
            product.work.bytes / H100.memory_bandwidth,
        )
    )
    text = str(profile)
    assert "plan's ms" in text and "÷ best" in text
    expected = math.fsum(one.seconds for one in profile.expected if one.scope == "mlp")
    assert expected > 0
    alone = profile_of(run)
    assert alone.expected is None and "plan's" not in str(alone) and "best" not in str(alone)


def test_kernels_of_unrolled_layers_stand_together(tmp_path):
    w_LEE, x_BE = jnp.ones((LAYERS, SIZE, SIZE)) / SIZE, jnp.ones((BATCH, SIZE))
    unrolled = jax.jit(functools.partial(loss, unroll=LAYERS)).lower(w_LEE, x_BE).compile()
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(unrolled(w_LEE, x_BE))
    executions = read_trace(newest_trace(tmp_path), jax.default_backend())
    profile = step_profile(executions, unrolled.as_text(), 1, SCOPES)
    products = [one for one in profile.kernels if one.work.flops]
    assert len(products) == LAYERS
    ((count, together),) = [each for each in profile.alike if each[1].work.flops]
    assert (count, together.times) == (LAYERS, LAYERS)
    assert together.seconds == pytest.approx(sum(one.seconds for one in products))
    assert f"and {LAYERS - 1} alike" in str(profile)
    assert "alike" not in profile.text(every_kernel=True)


def test_an_instruction_of_several_kernels_is_executed_once_by_all_of_them(run):
    """A GPU's trace has such pairs: a library's product clears its workspace first."""
    at, first = 0.0, run.executions[0].device
    kernels = []
    for one in run.executions:
        if one.device != first or not one.program.startswith("jit_loss"):
            continue
        names = ("Memset 0", "nvjet", "Memset 0") if "dot" in one.instruction else ("loop",)
        for kernel in names:
            kernels.append(dataclasses.replace(one, start=at, seconds=1e-6, kernel=kernel))
            at += 1e-6
    alone = [one for one in run.executions if one.device == first]
    expected = step_profile(alone, run.text, STEPS, SCOPES)
    found = step_profile(kernels, run.text, STEPS, SCOPES)
    times = [{one.work.name: one.times for one in each.kernels} for each in (found, expected)]
    assert times[0] == times[1]
    product = next(one for one in found.kernels if one.work.flops)
    assert product.seconds == pytest.approx(3 * product.times * 1e-6)


def test_kernels_launched_as_graphs_are_no_table_but_the_flag_that_makes_one(run):
    first = next(one for one in run.executions if one.program.startswith("jit_loss"))
    graph = dataclasses.replace(first, instruction="command_buffer_1", kernel="nvjet")
    with pytest.raises(TraceError, match="XLA_FLAGS=--xla_gpu_enable_command_buffer="):
        step_profile([*run.executions, graph], run.text, STEPS, SCOPES)


def test_a_trace_of_another_program_is_refused(run):
    others = [one for one in run.executions if not one.program.startswith("jit_loss")]
    assert others
    with pytest.raises(TraceError, match="no execution of the step's instructions"):
        step_profile(others, run.text, STEPS, SCOPES)


def test_folders_without_a_trace_and_damaged_traces_are_refused(tmp_path):
    with pytest.raises(TraceError, match="has no trace"):
        newest_trace(tmp_path)
    damaged = tmp_path / "host.xplane.pb"
    damaged.write_bytes(b"\xff" * 100)
    with pytest.raises(TraceError, match=r"host\.xplane\.pb cannot be read as a trace"):
        read_trace(newest_trace(tmp_path), "cpu")
    with pytest.raises(TraceError, match="traces of 'metal' cannot be read, only of cpu, gpu, tpu"):
        read_trace(newest_trace(tmp_path), "metal")


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=12)


@given(INTERVALS)
def test_the_idle_time_is_when_nothing_ran(intervals):
    executions = [
        Execution("device", "", "cosine.1", float(start), float(length))
        for start, length in intervals
    ]
    profile = step_profile(executions, one_kernel(), 1, SCOPES)
    busy = {second for start, length in intervals for second in range(start, start + length)}
    assert profile.busy_seconds == len(busy)
    assert profile.step_seconds == max(busy) + 1 - min(busy)


@functools.cache
def one_kernel() -> str:
    return """HloModule jit_cos, is_scheduled=true

ENTRY %main (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  ROOT %cosine.1 = f32[8]{0} cosine(%x.1)
}
"""
