"""FLOPs of traced programs, against counts by hand and the model's analytic number."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from sentinels import sentinels

from lmlib import train
from lmlib.compute import Compute
from lmlib.models.attend import attend
from lmlib.models.attend.fused import splash
from lmlib.models.attend.kernel import Options, whole_row
from lmlib.models.experts.grouped import Groups, grouped_product
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.flops import count_flops
from lmlib.plan.program import read_program
from lmlib.state import Training, abstract_batch, abstract_state

SCOPES = ("embed", "projections", "attention", "mlp", "loss", "optimizer")

M, K, N = 6, 10, 14


def counted(function, *arguments):
    return count_flops(jax.make_jaxpr(function)(*arguments), SCOPES)


def shapes(*each, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in each]


def test_a_matmul_and_what_it_moves():
    (one,) = counted(lambda x, w: x @ w, *shapes((5, M, K), (K, N), dtype=jnp.bfloat16)).matmuls
    assert one.flops == one.device_flops == 2 * 5 * M * K * N
    assert one.sizes == (1, 5 * M, N, K)
    assert one.device_bytes == 2 * (5 * M * K + K * N + 5 * M * N)
    assert (one.dtype, one.count, one.scope, one.phase) == ("bfloat16", 1, "other", "update")


def test_large_steps_are_shown_in_pflop():
    big = functools.partial(counted, lambda x, w: x @ w)
    below, above = (str(big(*shapes((rows, 10**6), (10**6, 10**4)))) for rows in (450_000, 550_000))
    assert "together (TFLOP)" in below and "9,000.000" in below
    assert "together (PFLOP)" in above and "11.000" in above and "TFLOP" not in above


def test_scans_count_as_often_as_they_turn():
    def outer(x, w):
        def inner(x, _):
            return x @ w, None

        def middle(x, _):
            return jax.lax.scan(inner, x, None, length=3)[0] @ w, None

        return jax.lax.scan(jax.jit(middle), x, None, length=5)[0]

    (one,) = counted(outer, *shapes((M, K), (K, K))).matmuls
    assert one.count == 5 * (3 + 1)
    assert one.flops == one.count * 2 * M * K * K


def with_its_own_derivative(function):
    made = jax.custom_vjp(function)
    made.defvjp(lambda *given: (function(*given), given), lambda given, _: given)
    return made


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, with_its_own_derivative])
def test_products_of_unused_results_of_calls_are_not_counted(call):
    both = call(lambda x, a, b: (x @ a, x @ b))

    def function(x, a, b):
        return both(x, a, b)[1]

    arguments = shapes((M, K), (K, N), (K, 3 * N))
    found = counted(function, *arguments)
    assert found.total == 2 * M * K * 3 * N
    assert found.total == jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("rows", [96, 80])  # 48 are whole blocks, 40 end with smaller ones
def test_products_by_group_count_as_in_even_routing(rows):
    def function(x, w, sizes):
        return grouped_product(x, w, Groups(sizes))

    given = shapes((rows, K), (2, K, N)) + shapes((2,), dtype=jnp.int32)
    assert counted(function, *given).total == 2 * rows * K * N
    text = jax.jit(function).lower(*given).compile().as_text()
    trips = {
        place.loops[-1].trips
        for one, place in read_program(text).instructions()
        if one.op_name.endswith("dot_general") and place.loops
    }
    assert trips == ({3, 0} if rows == 96 else {2})


def test_a_conditional_counts_its_dearer_branch():
    def function(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x @ w) @ w)

    assert counted(function, *shapes((M, K), (K, K))).total == 2 * 2 * M * K * K


def test_phases_of_a_rematerialised_scan():
    """Forward x @ w; its backward multiplies twice, and computes the first product again."""

    def loss(w_LKK, x):
        def layer(x, w):
            return jnp.sin(jnp.sin(x @ w) @ w), None

        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, w_LKK)
        with jax.named_scope("loss"):
            return jnp.sum(x @ w_LKK[0])

    found = counted(jax.value_and_grad(loss), *shapes((7, K, K), (M, K)))
    each = 2 * M * K * K
    assert found.of("forward") == (7 * 2 + 1) * each
    # sin' of the second product needs it, and the first.
    assert found.of("recomputation") == 7 * 2 * each
    assert found.of("backward") == 2 * found.of("forward")
    assert found.total == found.of("forward", "recomputation", "backward")
    assert {one.scope for one in found.matmuls if not one.in_layers} == {"loss"}
    assert "loss" in str(found)


@pytest.mark.several_devices
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}])
def test_sharded_matmuls_count_whole_and_for_one_device(sizes):
    mesh = make_mesh(**sizes)

    def by_type(x, w):
        return jnp.einsum("mk,kn->mn", x, w, out_sharding=P("fsdp", "tensor"))

    def by_hand(x, w):
        specs = P("fsdp", None), P(None, "tensor")
        return jax.shard_map(lambda x, w: x @ w, in_specs=specs, out_specs=P("fsdp", "tensor"))(
            x, w
        )

    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in (((16, K), P("fsdp", None)), ((K, 8), P(None, "tensor")))
    ]
    with jax.set_mesh(mesh):
        found = [counted(function, *arguments) for function in (by_type, by_hand)]
    for each in found:
        (one,) = each.matmuls
        assert one.flops == 2 * 16 * K * 8
        assert one.device_flops == one.flops / 8
        assert one.sizes == (1, 16 // mesh.shape["fsdp"], 8 // mesh.shape["tensor"], K)


def test_splash_attention_counts_the_tiles_that_it_computes():
    B, S, H, D, tile = 2, 1_536, 4, 64, 512
    arguments = shapes(*[(B, S, H, D)] * 3, dtype=jnp.bfloat16)
    options = Options(window=None, scale=D**-0.5, soft_cap=None)
    segment_ids_BS = jax.ShapeDtypeStruct((B, S), jnp.int32)

    def total(q, k, v, segments_BS):
        mixed, _ = splash.attend(q, k, v, segments_BS, segments_BS, whole_row(S), options)
        return jnp.sum(mixed.astype(jnp.float32))

    product = 2 * B * H * tile * tile * D * 6  # of 3 × 3 tiles, 6 are not all masked
    forward = counted(total, *arguments, segment_ids_BS)
    assert forward.total == 2 * product
    both = counted(jax.grad(total, argnums=(0, 1, 2)), *arguments, segment_ids_BS)
    # Gradients of keys and values take four products, and gradients of queries three.
    kernels = [one for one in both.matmuls if one.operation == "pallas_call"]
    assert sum(one.flops for one in kernels) == (2 + 4 + 3) * product
    # A kernel moves its operands and results, not its tiles.
    assert all(one.device_bytes < 10 * B * S * H * D * 4 * one.count for one in kernels)


@pytest.mark.parametrize(("name", "products"), [("fwd", 2), ("bwd", 5)])
@pytest.mark.parametrize(("mask", "share"), [("MaskType.CAUSAL", 0.5), ("MaskType.NO_MASK", 1.0)])
def test_kernels_of_cudnn_are_counted_by_rule(name, products, mask, share):
    # By a primitive of the same name: the kernel itself is traced on NVIDIA's libraries only.
    kernel = Primitive(f"dot_product_attention_{name}_wrapper")
    kernel.def_abstract_eval(lambda query, key, value, mask_type: query)
    B, S, T, H, D = 2, 8, 16, 3, 4
    arguments = shapes((B, S, H, D), (B, T, H, D), (B, T, H, D), dtype=jnp.bfloat16)
    (one,) = counted(lambda q, k, v: kernel.bind(q, k, v, mask_type=mask), *arguments).matmuls
    assert one.flops == products * 2 * B * H * S * T * D * share
    assert one.device_bytes == 2 * (2 * B * S * H * D + 2 * B * T * H * D)


def test_products_of_blocks_count_elements_and_scales():
    B, M, N, K = 2, 64, 96, 128
    elements = shapes((B, M, K), (B, N, K), dtype=jnp.float8_e4m3fn)
    scales = shapes((B, M, K // 32), (B, N, K // 32), dtype=jnp.float8_e8m0fnu)
    (one,) = counted(jax.nn.scaled_matmul, *elements, *scales).matmuls
    assert (one.dtype, one.sizes) == ("float8_e4m3fn", (B, M, N, K))
    assert one.flops == one.device_flops == 2 * B * M * N * K
    assert one.device_bytes == B * (M + N) * (K + K // 32) + 4 * B * M * N


V, E, L, HEADS, KV, HEAD_DIM, F = 96, 32, 3, 4, 2, 16, 48
make = functools.partial(llama, V, E, L, HEADS, F, KV, HEAD_DIM, key=jax.random.key(0))
B, S = 8, 64


def step_flops(mesh, microbatches=1, tied=False, **settings):
    compute = Compute(attention="plain", **settings)
    training = Training(adamw(10, 1e-3), mesh, compute, microbatches=microbatches)
    state = abstract_state(functools.partial(make, tied=tied), training)
    numbers = training.hyperparameters
    step = functools.partial(train.step, hyperparameters=numbers, training=training)
    with jax.set_mesh(mesh):
        return counted(step, state, abstract_batch(B, S, mesh))


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "settings"),
    sentinels(
        [
            ({}, {}),
            ({"fsdp": 8}, {}),
            ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
            ({"fsdp": 4, "tensor": 2}, {"sequence_parallel": True}),
            ({"fsdp": 4}, {"microbatches": 2, "unroll": L}),
            ({"fsdp": 4}, {"tied": True}),
        ],
        lambda case: "sequence_parallel" in case[1],
    ),
)
def test_a_step_multiplies_what_the_analytic_count_says_and_what_it_recomputes(mesh, settings):
    found = step_flops(make_mesh(**mesh), **settings)
    model = jax.eval_shape(functools.partial(make, tied=settings.get("tied", False)))
    analytic = model.flops_per_token(S, causal=False) * B * S
    assert found.of("forward", "backward") == analytic
    scores = 12 * L * HEADS * HEAD_DIM * S * B * S
    assert model.flops_per_token(S, causal=True) * B * S == analytic - scores / 2
    # Each layer again, except for mlp's last product: nothing in the backward pass needs it.
    layer = 2 * E * HEAD_DIM * (2 * HEADS + 2 * KV) + 4 * S * HEADS * HEAD_DIM + 2 * 2 * E * F
    assert found.of("recomputation") == layer * L * B * S
    assert found.of("update") == 0
    devices = make_mesh(**mesh).devices.size
    assert sum(one.device_flops for one in found.matmuls) * devices == found.total


@pytest.mark.several_devices
def test_scopes_of_a_step():
    found = step_flops(make_mesh(fsdp=2, tensor=2))
    forward = {}
    for one in found.matmuls:
        if one.phase == "forward":
            forward[one.scope] = forward.get(one.scope, 0) + one.flops / (B * S)
    loss = forward.pop("loss")
    assert forward == {
        "projections": L * 2 * E * HEAD_DIM * (2 * HEADS + 2 * KV),
        "attention": L * 4 * S * HEADS * HEAD_DIM,
        "mlp": L * 6 * E * F,
    }
    # The loss computes the gradients of its logits along with them.
    assert loss == 3 * 2 * E * V


@pytest.mark.landing
@pytest.mark.several_devices
def test_splash_attention_of_split_rows_counts_what_each_device_computes():
    B, S, H, D, tile, devices = 2, 4_096, 4, 64, 512, 2
    with jax.set_mesh(make_mesh(context=devices, devices=jax.devices()[:devices])):
        layout = jax.sharding.PartitionSpec(None, "context")
        mesh = jax.sharding.get_abstract_mesh()
        arguments = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, layout))
            for shape, dtype in [((B, S, H, D), jnp.bfloat16)] * 3 + [((B, S), jnp.int32)]
        ]

        def total(q, k, v, segments):
            mixed_BSHD = attend(
                q, k, v, segments, "splash", order="zigzag", context_method="gather"
            )
            return jnp.sum(mixed_BSHD.astype(jnp.float32))

        both = counted(jax.grad(total, argnums=(0, 1, 2)), *arguments)
    kernels = [one for one in both.matmuls if one.operation == "pallas_call"]
    tiles = S // tile
    product = 2 * B * H * tile * tile * D * (tiles * (tiles + 1) // 2) / devices
    assert sum(one.device_flops for one in kernels) == (2 + 4 + 3) * product
