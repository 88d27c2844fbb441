"""Plans of a small run on hardware that is not there, against what can be computed by hand."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest
from aot import needs_gpu_compiler, needs_tpu_compiler
from bigram import Bigram
from jax.sharding import NamedSharding, PartitionSpec
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import Experiment
from lmlib.inspect.saved_activations import SavedActivations
from lmlib.models.experts.grouped import Groups, grouped_product
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.collectives import shard_map
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.memory import Counted, Memory, out_of_memory, reading
from lmlib.plan.planner import compilable, dense_expansions, plan
from lmlib.plan.program import read_program
from lmlib.plan.targets import Target, parse, prepare
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import WIDTH
from runner.aot.abstract_inputs import built, without_data
from runner.config import configs
from runner.config.configs import load

pytestmark = pytest.mark.several_devices

VOCAB, EMBED, LAYERS, HEADS, MLP = 512, 64, 2, 4, 128
ROWS, LENGTH = 16, 128
# Two tables, and in each layer four square matrices, three of the mlp and two norms; a last norm.
PARAMETERS = 2 * VOCAB * EMBED + LAYERS * (4 * EMBED**2 + 3 * EMBED * MLP + 2 * EMBED) + EMBED


def experiment(target: Target, compute: Compute = Compute(), **sizes: int) -> Experiment:
    if target.accelerator.platform != "cpu":  # this machine has enough of them
        prepare(target)
    sizes = {"vocab": VOCAB, "embed": EMBED, "layers": LAYERS, "heads": HEADS, "mlp": MLP} | sizes
    return Experiment(
        model=functools.partial(llama, **sizes),
        compute=compute,
        data=Synthetic(VOCAB, ROWS, LENGTH),
        optimizer=functools.partial(adamw, peak_lr=1e-3),
        mesh=make_mesh(fsdp=-1, devices=target.devices()),
        steps=10,
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("v5e:2x2", marks=[needs_tpu_compiler, pytest.mark.slow]),
        pytest.param("h100:2x4", marks=[needs_gpu_compiler, pytest.mark.slow]),
        pytest.param("cpu:8", marks=pytest.mark.landing),
    ],
)
def planned(request):
    target = parse(request.param)
    return target, plan(experiment(target), target)


@needs_tpu_compiler
@pytest.mark.parametrize(
    "topology",
    sentinels(
        ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "7x:2x2x1"],
        ("v5e:2x2", "7x:2x2x1").__contains__,
        landing=lambda topology: True,
    ),
)
def test_the_smallest_step_compiles_for_every_generation_of_tpus(topology):
    """It gathers two matrices and scatters their gradients, which takes as much to go wrong."""
    target = parse(topology)
    smallest = functools.partial(Bigram, VOCAB, EMBED)
    step = dataclasses.replace(experiment(target), model=smallest).trace_step().lower().compile()
    assert "all-gather" in step.as_text() and "reduce-scatter" in step.as_text()


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v4:2x2x1", {"fsdp": 4}),
        ("2xv5e:2x2", {"data": 2, "fsdp": 4}),  # each slice holds all weights
        ("v5p:2x2x1", {"fsdp": 4}),
        ("v6e:2x2", {"fsdp": 4}),
        ("7x:2x2x1", {"fsdp": 8}),
    ],
)
def test_a_step_compiles_for_every_generation_of_tpus(topology, mesh):
    target = parse(topology)
    report = plan(experiment(target, layers=1), target)
    assert {axis: size for axis, size in report.mesh.items() if size > 1} == mesh
    assert report.memory.fits
    gathered = [one for one in report.collectives if one.kind == "all-gather"]
    assert {one.mesh_axes for one in gathered} == {("fsdp",)}
    assert (("data",) in {one.mesh_axes for one in report.collectives}) == (target.slices > 1)
    # Each of the layer's seven matrices, forward; XLA combines some.
    bf16 = sum(one.bytes for one in gathered if one.phase == "forward")
    assert bf16 >= 2 * (4 * EMBED**2 + 3 * EMBED * MLP)


@pytest.mark.slow
def test_state_is_sharded_over_all_devices(planned):
    target, report = planned
    memory, devices = report.memory, target.device_count
    assert report.parameters == PARAMETERS
    assert memory.parameters == memory.gradients == 4 * PARAMETERS // devices
    # Two moments, and a few counters that are not sharded.
    assert 0 <= memory.optimizer_state - 2 * memory.parameters < 100
    # Tokens, targets, segments and positions of four bytes, and a mask of one.
    assert memory.batch == ROWS * LENGTH * 17 // devices
    arguments = memory.parameters + memory.optimizer_state + memory.batch
    assert arguments <= memory.counted.arguments
    if target.accelerator.platform != "tpu":  # which pads arrays as small as these
        assert memory.counted.arguments < arguments + 1000


@pytest.mark.landing
def test_copies_of_layer_inputs_along_tensor_are_named():
    target = parse("cpu:8")
    base = dataclasses.replace(
        experiment(target), mesh=make_mesh(fsdp=4, tensor=2, devices=target.devices())
    )
    split = dataclasses.replace(base, compute=Compute(sequence_parallel=True))
    found = [plan(each, target).memory for each in (base, split)]
    # bfloat16: an input of each layer, of the rows of a device's quarter.
    kept = LAYERS * ROWS // 4 * LENGTH * EMBED * 2
    inputs = [
        sum(one.bytes_per_device for one in each.saved if one.name == "layer_input")
        for each in found
    ]
    assert inputs == [kept, kept // 2]
    told = f"The 2 devices along `tensor` keep the same layer inputs, {bytes_text(kept)} each"
    assert [told in str(each) for each in found] == [True, False]


def test_a_small_step_fits_and_gathers_over_fsdp(planned):
    target, report = planned
    memory = report.memory
    assert memory.counted.arguments < memory.needed < 1e9
    assert memory.fits is (None if target.accelerator.platform == "cpu" else True)
    saved = {kept.name: kept.bytes_per_device for kept in memory.saved}
    rows = ROWS * LENGTH * EMBED * 2 // target.device_count
    assert (saved["layer_input"], saved["head_input"]) == (LAYERS * rows, rows)
    axes = {one.mesh_axes for one in report.collectives if one.kind == "all-gather"}
    assert axes == {("fsdp",)}


def test_the_report_can_be_read(planned):
    target, report = planned
    text = str(report)
    assert text.startswith(f"{PARAMETERS:,} parameters on {target}, mesh fsdp")
    for title in ("Memory", "Communication", "FLOPs", "Time"):
        assert f"\n{title}\n─" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    sent = report.collectives.bytes_sent_per_step
    assert bytes_text(sent) in text and f"{sent:,}" not in text
    assert json.loads(json.dumps(report.as_json()))["memory"]["needed"] == report.memory.needed


@pytest.mark.slow
@needs_tpu_compiler
def test_offloaded_activations_are_in_host_memory():
    target = parse("v5e:2x2")
    inner = ("mlp_gate", "mlp_up")
    kept, offloaded = (
        plan(experiment(target, compute, mlp=1024, layers=4), target).memory
        for compute in (Compute(saved=inner), Compute(offloaded=inner))
    )
    activations = 2 * 4 * ROWS * LENGTH * 1024 * 2 // target.device_count
    assert kept.counted.on_host == 0
    assert offloaded.counted.on_host == activations
    assert offloaded.counted.peak < kept.counted.peak - 0.5 * activations
    assert re.search(rf"\non the host +{bytes_text(activations)}  +offloaded\n", str(offloaded))


@pytest.mark.slow
@needs_gpu_compiler
def test_an_update_writes_each_number_once_and_reads_it_twice():
    """Weight, gradient and two moments are read for the norm of the update, and again once the norm
    is known to be finite. The new weight and moments are written. The gradient is read before that,
    for its own norm. A tenth or two are not fused."""
    target = parse("h100:1x1")
    report = plan(experiment(target, embed=512, mlp=2048, layers=4), target)
    updates = [one for one in report.estimate.scopes if one.scope == "optimizer"]
    assert sum(one.bytes for one in updates) == pytest.approx(12 * 4 * report.parameters, rel=0.2)


@pytest.mark.slow
@needs_tpu_compiler
def test_too_large_for_a_tpu_is_an_answer():
    target = parse("v5e:1x1")
    report = plan(experiment(target, embed=4096, layers=40, mlp=16384), target)
    memory = report.memory
    assert memory.fits is False
    assert memory.needed > 4 * 4 * report.parameters * 0.9  # weights, moments and gradients
    assert memory.verdict.startswith("does not fit: needs at least ")
    assert report.collectives is None and "the step does not fit" in str(report)


def test_the_capacity_decides_whether_a_step_fits(planned):
    target, report = planned
    if target.accelerator.platform == "cuda":
        assert report.memory.capacity == round(0.95 * 84_942_979_072)
    less = dataclasses.replace(report.memory, capacity=report.memory.needed - 10_000)
    assert less.fits is False and less.verdict.endswith(", 10.0 KB too much")
    enough = dataclasses.replace(report.memory, capacity=report.memory.needed)
    assert enough.fits is True and enough.verdict.endswith(", 0 B to spare")


def test_reading_weights_may_need_more_than_the_step(planned):
    """The largest tensor is read whole."""
    _, report = planned
    assert report.memory.loading == 0 and "reading weights" not in str(report.memory)
    more = dataclasses.replace(
        report.memory, loading=report.memory.step + 1_000_000_000, capacity=1
    )
    assert more.needed == more.loading and more.fits is False
    assert " to read the weights of 1 B, " in more.verdict
    size = re.escape(bytes_text(more.loading))
    assert re.search(rf"\nreading weights +{size} +before the first step", str(more))
    run = experiment(parse("cpu:8"))
    assert reading(run) == 0
    table = VOCAB * EMBED  # in bfloat16, plus a device's share in float32
    read = dataclasses.replace(run, init_from="a/folder")
    assert reading(read) == 2 * table + (2 + 4) * table // 8


@needs_gpu_compiler
@pytest.mark.slow
def test_the_expected_step_is_what_an_h200_measured():
    """86.2 ms: `attention=triton` of 84m in docs/gpus.md."""
    target = parse("h200:1x1")
    prepare(target)
    cfg = load("experiments/llama_84m", ["fast"])
    cfg.compute.attention = "triton"
    rows = fdl.Config(Synthetic, cfg.model.vocab, 64, 1_024)
    cfg.data = cfg.validation = rows
    cfg.mesh = fdl.Config(make_mesh, devices=target.devices())
    found = plan(fdl.build(cfg), target)
    assert found.estimate.step_seconds == pytest.approx(86.2e-3, rel=0.05)
    assert found.memory.step == pytest.approx(22.4e9, rel=0.05)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("target", "expected"), [("h100:1x1", "auto"), ("mi300x:1x1", "blockwise")]
)
def test_another_vendors_compiler_plans_without_its_own_kernels(target, expected):
    target = parse(target)
    planned, _ = compilable(experiment(target), target)
    assert planned.compute.attention == expected


@needs_gpu_compiler
def test_products_that_another_vendors_card_lacks_are_refused():
    target = parse("mi300x:1x1")
    run = experiment(target, Compute(quantized={"mlp": "mxfp8"}))
    with pytest.raises(ValueError, match=r"'mxfp8', which needs NVIDIA.*MI300X: use 'float8'"):
        plan(run, target)


def expansions(product, topology):
    """Warnings of the program of a product by group and its gradients."""
    target = parse(topology)
    prepare(target)
    mesh = make_mesh(devices=target.devices()[:1])
    whole = NamedSharding(mesh, PartitionSpec())
    x, w, sizes = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        for shape, dtype in (
            ((1_024, 128), jnp.bfloat16),
            ((4, 128, 256), jnp.bfloat16),
            ((4,), jnp.int32),
        )
    )

    def loss(*given):
        return jnp.sum(product(*given).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        gradient = shard_map(
            jax.grad(loss, argnums=(0, 1)),
            inputs=3 * (PartitionSpec(),),
            outputs=2 * (PartitionSpec(),),
            tracked=False,
        )
        text = jax.jit(gradient).lower(x, w, sizes).compile().as_text()
    return dense_expansions(read_program(text))


def by_group(x, w, sizes):
    return grouped_product(x, w, Groups(sizes))


@needs_gpu_compiler
@pytest.mark.slow
def test_on_gpus_ragged_dot_is_expanded_and_blocks_are_not():
    (warning,) = expansions(jax.lax.ragged_dot, "h100:1x1")
    assert "transpose(jvp())/ragged_dot_general" in warning
    assert not expansions(by_group, "h100:1x1")


@needs_tpu_compiler
@pytest.mark.slow
def test_on_tpus_the_product_by_group_is_not_expanded():
    assert not expansions(by_group, "v5e:2x2")


@needs_gpu_compiler
@pytest.mark.slow
def test_405b_trains_on_eight_devices_of_192_gb():
    """Without a copy of the base, of its stacks, or of its gradients."""
    target = parse("b200:8")
    prepare(target)
    cfg = without_data(configs.load("experiments/llama_405b_lora"))
    report = plan(built(cfg, target.devices()), target)
    base = 405_853_388_800  # Llama 3.1 405B's
    assert report.memory.frozen == 2 * base // 8
    assert report.memory.parameters == 4 * (report.parameters - base) // 8  # adapters
    assert report.memory.needed < 150e9
    assert report.memory.counted.temporaries < report.memory.frozen / 3
    made_once = report.flops.counted.of("forward", "backward") / report.flops.tokens
    assert made_once == pytest.approx(report.flops.analytic, rel=0.03)


def test_messages_about_memory_are_read():
    text = (Path(__file__).parent / "programs/out_of_memory.txt").read_text()
    before, after = (out_of_memory(f"RESOURCE_{each}") for each in text.split("RESOURCE_")[1:])
    assert before.temporaries_only and not after.temporaries_only
    assert (before.needed, after.needed) == (round(19.79 * 2**30), round(20.63 * 2**30))
    first, second = after.largest
    assert before.largest == () and "dot_general" in first.name
    assert (first.bytes, second.bytes) == (4 * 2**30, 512 * 2**20)
    assert first.name.startswith("bf16[32,2048,32768]")
    assert second.name.startswith("bf16[8192,32768]")
    assert out_of_memory("UNIMPLEMENTED: Stable sorting of more than 2^31-1 elements") is None
    assert out_of_memory("RESOURCE_EXHAUSTED: too many open files") is None


def test_a_step_needs_its_program_beside_what_is_in_use():
    counted = Counted(
        arguments=100, outputs=10, temporaries=1_000, program=7, peak=None, on_host=50
    )
    assert counted.needed == 100 + 10 + 1_000 + 7
    assert dataclasses.replace(counted, peak=600).needed == 600 + 7
    assert dataclasses.replace(counted, peak=600, tpu_program=800).needed == 100 + 10 + 800


def test_a_peak_beyond_its_parts_is_on_the_chip_and_not_in_memory():
    def shown(counted):
        parts = dict.fromkeys(("parameters", "frozen", "reference_model", "optimizer_state"), 0)
        nothing = {"saved": SavedActivations(), "largest_arrays": (), "remarks": ()}
        return Memory(
            **parts, **nothing, capacity=None, gradients=0, batch=0, loading=0, counted=counted,
            step=counted.needed,
        )  # fmt: skip

    counted = Counted(600, 10, 90, program=50, peak=650, on_host=0)
    assert (counted.needed, counted.on_chip) == (650 + 50, 0)
    assert "on the chip" not in str(shown(counted))
    more = dataclasses.replace(counted, peak=720)
    assert (more.needed, more.on_chip) == (600 + 10 + 90 + 50, 20)
    assert re.search(r"\npeak +720 B .*\nof it on the chip +20 B ", str(shown(more)))
