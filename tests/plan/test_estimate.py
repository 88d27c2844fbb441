"""The estimate of a step's time, against the roofline by hand."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from aot import absent
from program_texts import program_text

from lmlib.hardware.specifications import ACCELERATORS, CPU
from lmlib.models.matmul import matmul as matmul_of_weight
from lmlib.parallel.mesh import make_mesh
from lmlib.plan import step_time
from lmlib.plan.collectives import Collective
from lmlib.plan.flops import FlopsPerToken, Matmul, StepFlops, count_flops
from lmlib.plan.program import ArrayType, read_program
from lmlib.plan.scopes import Routing
from lmlib.plan.step_time import Route, closes, estimate, route, with_communication
from lmlib.plan.traffic import Kernels, Traffic, kernels, traffic

pytestmark = pytest.mark.several_devices

SCOPES = ("embed", "projections", "attention", "mlp", "loss", "optimizer")

H100 = ACCELERATORS["h100"]
MEMORY = H100.memory_bandwidth * step_time.MEMORY_EFFICIENCY


def matmul(M, N, K, phase="forward", in_layers=True, count=10, dtype="bfloat16"):
    flops, size = 2.0 * M * N * K * count, 2 * (M * K + K * N + M * N) * count
    return Matmul(
        "mlp", phase, in_layers, "dot_general", dtype, (1, M, N, K), count, 8 * flops, flops, size
    )


def sent(bytes_sent, overlaps, phase="forward", kind="all-gather", count=10):
    array = ArrayType("bf16", (bytes_sent * 8 // 7 // 2,))
    return Collective(
        "c", kind, ("fsdp",), 8, (array,), array.bytes, bytes_sent, count, "layer", phase,
        overlaps, False, "jit(step)/jvp(layers)/while/body/reshard",
    )  # fmt: skip


def estimated(matmuls=(), moved=(), collectives=(), accelerator=H100, tokens=1_000):
    mesh = make_mesh(fsdp=8)
    flops = FlopsPerToken(3e9, 2e9, StepFlops(tuple(matmuls), SCOPES), tokens)
    return estimate(flops, moved, collectives, accelerator, mesh)


def test_a_large_matmul_is_bound_by_flops_and_a_thin_one_by_memory():
    large, thin = matmul(4_096, 4_096, 4_096), matmul(4_096, 128, 128)
    rate = (
        989e12
        * step_time.MATMUL_EFFICIENCY["cuda"]
        * 4_096
        / (4_096 + step_time.PIPELINE_FILL["cuda"])
    )
    found = estimated([large])
    assert found.step_seconds == pytest.approx(large.device_flops / rate)
    assert [one.limit for one in found.scopes] == ["FLOPs"]
    found = estimated([thin])
    assert found.step_seconds == pytest.approx(thin.device_bytes / MEMORY)
    assert [one.limit for one in found.scopes] == ["memory"]


def test_float32_and_blocks_that_are_not_full_cost_more():
    plain = estimated([matmul(4_096, 4_096, 4_096)]).step_seconds
    wide = estimated([matmul(4_096, 4_096, 4_096, dtype="float32")]).step_seconds
    assert wide == pytest.approx(plain / step_time.FLOAT32_RATE["cuda"])
    # 1,025 rows take as long as 1,152, which are nine blocks of 128.
    ragged = estimated([matmul(1_025, 8_192, 8_192)]).step_seconds
    assert ragged == pytest.approx(estimated([matmul(1_152, 8_192, 8_192)]).step_seconds)


def test_both_products_of_float8_have_its_rate():
    x, w = jnp.zeros((8_192, 4_096), jnp.bfloat16), jnp.zeros((4_096, 4_096), jnp.bfloat16)

    def seconds(precision):
        def loss(x):
            return jnp.sum(matmul_of_weight("se,ef->sf", x, w, precision).astype(jnp.float32) ** 2)

        counted = count_flops(jax.make_jaxpr(jax.grad(loss))(x))
        found = estimated(counted.matmuls).scopes
        assert sum(one.count for one in counted.matmuls) == 2
        return sum(one.seconds for one in found)

    assert seconds("float8") == pytest.approx(seconds(None) * 989 / 1_979)


def test_other_operations_take_their_bytes():
    found = estimated(moved=[Traffic("optimizer", "update", False, 10**9)])
    assert found.step_seconds == pytest.approx(1e9 / MEMORY)


def test_mfu_and_tokens_per_second_are_those_of_all_devices():
    found = estimated([matmul(4_096, 4_096, 4_096)], tokens=5_000)
    assert found.tokens_per_second == pytest.approx(5_000 / found.step_seconds)
    assert found.mfu == pytest.approx(3e9 * 5_000 / found.step_seconds / (8 * 989e12))
    assert found.mfu_causal / found.mfu == pytest.approx(2 / 3)


def test_collectives_hide_behind_the_compute_of_their_own_loop_only():
    forward = matmul(4_096, 4_096, 4_096)
    alone = estimated([forward]).step_seconds
    way = route(("fsdp",), make_mesh(fsdp=8), H100)
    small, huge = 10**6, 10**9
    small_seconds, huge_seconds = (10 * way.seconds(size, "all-gather") for size in (small, huge))
    assert small_seconds < alone < huge_seconds

    def with_collective(*arguments):
        return estimated([forward], collectives=[sent(*arguments)]).step_seconds

    assert with_collective(small, True) == pytest.approx(alone)
    assert with_collective(small, False) == pytest.approx(alone + small_seconds)
    assert with_collective(huge, True) == pytest.approx(huge_seconds)
    # Nothing runs in the backward loop here.
    assert with_collective(small, True, "backward") == pytest.approx(alone + small_seconds)
    # Two that overlap share what there is to hide behind.
    both = estimated([forward], collectives=[sent(huge, True), sent(huge, True, kind="all-to-all")])
    assert both.step_seconds == pytest.approx(2 * huge_seconds)


def test_a_report_names_its_assumptions_and_turns_into_json():
    found = estimated([matmul(4_096, 4_096, 4_096)], collectives=[sent(10**6, True)])
    text = str(found)
    for said in ("estimate", "989 TFLOP/s", "mlp", "all-gather", "MFU", "ms"):
        assert said in text
    assert json.loads(json.dumps(dataclasses.asdict(found)))["step_seconds"] == found.step_seconds


def test_a_report_names_the_busiest_device():
    of_experts = dataclasses.replace(matmul(8, 8, 8), scope="experts")
    counted = StepFlops((of_experts,), (*SCOPES, "experts"), Routing(1.3, 1.25))
    found = estimate(FlopsPerToken(3e9, 2e9, counted, 1_000), (), (), H100, make_mesh(fsdp=8))
    assert "gets 1.3 times the rows of even routing, in 2 rounds" in str(found)
    assert "even routing" not in str(estimated([matmul(8, 8, 8)]))


def test_nothing_is_made_up_about_devices_whose_rates_are_unknown():
    assert estimated([matmul(8, 8, 8)], accelerator=CPU) is None


def test_seconds_of_a_route():
    # Eight hosts of eight: each device sends its host's share, 1/8, over the network.
    both = Route(8, 8, link_bandwidth=1e9, network_bandwidth=1e8, latency=0.0, mean_hops=1.0)
    flat = 63 * 10**9  # sent in a ring of 64 for 64 GB
    on_links, on_network = 64 * 7 / 8, 64 / 8 * 7 / 8 * 10
    assert both.seconds(flat, "all-gather") == pytest.approx(max(on_links, on_network))
    slow = dataclasses.replace(both, network_bandwidth=1e7)
    assert slow.seconds(flat, "all-gather") == pytest.approx(10 * on_network)
    late = dataclasses.replace(both, latency=1.0)
    assert late.seconds(flat, "all-reduce") == pytest.approx(both.seconds(flat, "all-reduce") + 2)
    # An all-to-all sends 7/8 of a device's 64 GB to other hosts, through its own adapter.
    assert both.seconds(flat, "all-to-all") == pytest.approx(64 * 7 / 8 * 10)
    # On a ring of eight, each message crosses two links.
    ring = Route(8, 1, link_bandwidth=1e9, network_bandwidth=1e8, latency=0.0, mean_hops=2.0)
    assert ring.seconds(7 * 10**9, "all-to-all") == pytest.approx(7 * 2)
    assert ring.seconds(7 * 10**9, "all-gather") == pytest.approx(7)
    alone = Route(1, 1, 1e9, 1e8, 0.0, 1.0)
    assert alone.seconds(0, "all-gather") == 0


@pytest.mark.parametrize(
    ("size", "dimensions", "ring"), [(16, 2, True), (8, 2, False), (4, 3, True), (2, 3, False)]
)
def test_rings_of_a_torus(size, dimensions, ring):
    assert closes(size, dimensions) is ring


def devices_of(target):
    found, devices = absent(target)
    return found.accelerator, devices


@pytest.mark.parametrize(
    ("target", "sizes", "axes", "inside", "outside", "links"),
    [
        # 4 × 4 has a ring in neither dimension: one way along each.
        ("v5e:4x4", {"fsdp": 16}, ("fsdp",), 16, 1, 2),
        ("v5e:4x4", {"fsdp": 4, "tensor": 4}, ("tensor",), 4, 1, 1),
        # 16 × 16 is: both ways.
        ("v5e:16x16", {"fsdp": 16, "tensor": 16}, ("tensor",), 16, 1, 2),
        ("v5e:16x16", {"fsdp": 16, "tensor": 16}, ("fsdp", "tensor"), 256, 1, 4),
        ("v5p:4x4x4", {"fsdp": 64}, ("fsdp",), 64, 1, 6),
        ("2xv5e:4x4", {"data": 2, "fsdp": 16}, ("data",), 1, 2, 1),
        ("h100:4x8", {"fsdp": 32}, ("fsdp",), 8, 4, 1),
        ("h100:4x8", {"data": 4, "fsdp": 8}, ("fsdp",), 8, 1, 1),
        ("h100:4x8", {"data": 4, "fsdp": 8}, ("data",), 1, 4, 1),
    ],
)
def test_routes_on_real_topologies(target, sizes, axes, inside, outside, links):
    accelerator, devices = devices_of(target)
    way = route(axes, make_mesh(**sizes, devices=devices), accelerator)
    assert (way.inside, way.outside) == (inside, outside)
    bandwidth = accelerator.link_bandwidth * step_time.LINK_EFFICIENCY
    assert way.link_bandwidth == pytest.approx(links * bandwidth)


@pytest.mark.parametrize(("axis", "times"), [("fsdp", 1), ("data", 10)])
def test_a_slower_network_slows_what_crosses_it_alone(axis, times):
    """`data` spans hosts, and `fsdp` a host's devices; one step is timed on several networks."""
    target, devices = absent("h100:4x8")
    mesh, one = make_mesh(data=4, fsdp=8, devices=devices), sent(10**9, overlaps=False)
    collectives = [dataclasses.replace(one, mesh_axes=(axis,))]
    flops = FlopsPerToken(3e9, 2e9, StepFlops((), SCOPES), 1_000)
    fast = estimate(flops, (), collectives, target.accelerator, mesh)
    slower = target.on_network(target.accelerator.network_bandwidth / 10)
    slow = with_communication(fast.scopes, flops, collectives, slower.accelerator, mesh)
    assert slow.exposed_seconds == pytest.approx(times * fast.exposed_seconds, rel=1e-2)
    assert slow == estimate(flops, (), collectives, slower.accelerator, mesh)
    assert str(slower) == "h100:4x8" and slower.devices()


def test_traffic_of_a_compiled_program_is_what_its_arrays_hold():
    size = 1_000

    def step(x, w_LE):
        def layer(x, w_E):
            return jnp.sin(x) * w_E, None

        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(layer, x, w_LE)
        with jax.named_scope("optimizer"):
            return jnp.cos(x)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((size,), (7, size))]
    found = traffic(read_program(jax.jit(step).lower(*shapes).compile().as_text()), SCOPES)
    moved = {(one.scope, one.in_layers): one.bytes for one in found}
    assert moved["optimizer", False] == 2 * size * 4
    # Each turn reads x and a row, and writes x. The loop's counter moves too.
    in_layers = sum(size for (_, in_layers), size in moved.items() if in_layers)
    assert 7 * 3 * size * 4 <= in_layers < 7 * 3 * size * 4 + 7 * 50


def test_slices_that_gpus_copy_ahead_of_time_are_not_what_they_are_cut_from():
    (found,) = traffic(read_program(program_text("slice_copied_ahead")), SCOPES)
    assert found.bytes == 2 * 1_000 * 4


def test_a_slice_of_another_dtype_reads_only_the_slice():
    (found,) = traffic(read_program(program_text("slice_of_another_dtype")), SCOPES)
    assert found.bytes == (4 + 2) * 1_000


def test_kernels_are_counted_as_often_as_their_loop_turns():
    array = 50 * 50 * 4
    found = kernels(read_program(program_text("kernels_in_a_loop")))
    assert found == Kernels(14, 7 * (3 + 2) * array, 7 * 3 * array)
    assert str(found) == (
        "14 kernels read and write 350 KB, 140 KB of it outside matmuls and attention"
    )
