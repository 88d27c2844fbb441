"""Speed of grouped products on this GPU, the three of a training step, beside XLA's and PyTorch's.

    python benchmarks/kernels/grouped.py                               # about a minute a shape
    python benchmarks/kernels/grouped.py --shapes=131072x1024x2048x8   # rows × in × out × groups
    python benchmarks/kernels/grouped.py --launches

`forward` multiplies rows by the matrix of their group, `rows` the outputs' gradient by its
transpose, and `matrices` adds the outer products of each group. Groups have the sizes of even
routing ("even"), or half of them have three quarters of the rows ("uneven"). Each kernel is first
compared with float32, then timed in turns; values are medians. `dense` is XLA's batched product of
groups of equal size, which no grouped product can be expected to beat.

`--launches` times the kernels of `lmlib.models.experts.triton_grouped` with other tiles, warps and
stages than they have, and lists the fastest. `--compile_only` compiles them for an absent GPU.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax import Array
from launches import device_of, prepare, programs, shapes_on
from turns import seconds

from lmlib.models.experts import triton_grouped
from lmlib.models.experts.grouped import Groups, grouped_product
from lmlib.models.experts.triton_grouped import Launch
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices

TOLERANCE = 2e-2  # relative to the norm, in bfloat16
KINDS = "forward", "rows", "matrices"
IMPLEMENTATIONS = "triton", "ragged_dot"

_SHAPES = flags.DEFINE_list(
    "shapes",
    ["131072x1024x2048x8", "65536x2048x2816x8", "131072x2048x768x128"],
    "Rows × in × out × groups; of 8x2048, 8x2816 and Qwen3-30B.",
)
_LAUNCHES = flags.DEFINE_bool("launches", False, "Try other tiles, warps and stages.")
_COMPILE_ONLY = flags.DEFINE_string(
    "compile_only", None, "Only compile the launches, for an absent GPU: h200:1x1."
)


class Inputs(NamedTuple):
    """Rows, matrices and the outputs' gradient, in bfloat16."""

    x_NE: Array
    w_XEF: Array
    dy_NF: Array


def inputs(shape: Sequence[int]) -> Inputs:
    N, E, F, X = shape
    shapes = (N, E), (X, E, F), (N, F)
    keys = jax.random.split(jax.random.key(0), 3)
    return Inputs(
        *(jax.random.normal(*each, jnp.bfloat16) for each in zip(keys, shapes, strict=True))
    )


def sizes_of(shape: Sequence[int]) -> dict[str, Array]:
    """Returns sizes of even and of uneven groups."""
    rows, groups = shape[0], shape[3]
    shares = {"even": np.ones(groups), "uneven": np.where(np.arange(groups) % 2, 3.0, 1.0)}
    draw = np.random.default_rng(0).multinomial
    return {
        name: jnp.asarray(draw(rows, each / each.sum()), jnp.int32) for name, each in shares.items()
    }


def product(kind: str, implementation: str, given: Inputs, sizes_X: Array) -> Array:
    """Returns one of the three products of a training step."""

    def multiply(x_NE: Array, w_XEF: Array) -> Array:
        return grouped_product(x_NE, w_XEF, Groups(sizes_X, implementation))

    if kind == "forward":
        return multiply(given.x_NE, given.w_XEF)
    _, backward = jax.vjp(multiply, given.x_NE, given.w_XEF)
    return backward(given.dy_NF)[KINDS.index(kind) - 1]


def dense(kind: str, given: Inputs) -> Array:
    """Returns the batched product of groups of equal size."""
    x_XCE, dy_XCF = (x.reshape(len(given.w_XEF), -1, x.shape[1]) for x in given[::2])
    if kind == "forward":
        return jnp.einsum("xce,xef->xcf", x_XCE, given.w_XEF)
    if kind == "rows":
        return jnp.einsum("xcf,xef->xce", dy_XCF, given.w_XEF)
    return jnp.einsum("xce,xcf->xef", x_XCE, dy_XCF)


def pytorch(kind: str, given: Inputs, sizes_X: Array) -> Callable[[], Any] | None:
    """Returns the call of PyTorch's kernel, or `None` without PyTorch for CUDA."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    x_NE, w_XEF, dy_NF = (torch.utils.dlpack.from_dlpack(each) for each in given)
    ends_X = torch.utils.dlpack.from_dlpack(jnp.cumsum(sizes_X, dtype=jnp.int32))
    factors = {
        "forward": (x_NE, w_XEF),
        "rows": (dy_NF, w_XEF.transpose(1, 2)),
        "matrices": (x_NE.T, dy_NF),
    }[kind]

    def call() -> Any:
        return torch.nn.functional.grouped_mm(*factors, offs=ends_X)

    return call


def finished(result: Any) -> None:
    """Waits for a result of JAX or of PyTorch."""
    if isinstance(result, jax.Array):
        jax.block_until_ready(result)
    else:
        sys.modules["torch"].cuda.synchronize()


def check(kind: str, implementation: str, given: Inputs, sizes_X: Array) -> None:
    """Exits if a product differs from the float32 product by blocks."""
    wide = Inputs(*(x.astype(jnp.float32) for x in given))
    with jax.default_matmul_precision("highest"):
        right = jax.jit(functools.partial(product, kind, "blocks"))(wide, sizes_X)
    found = jax.jit(functools.partial(product, kind, implementation))(given, sizes_X)
    error = jnp.linalg.norm(found.astype(jnp.float32) - right) / jnp.linalg.norm(right)
    if not error <= TOLERANCE:
        sys.exit(f"{implementation} is not the product {kind} here: off by {error} in the norm")


def compared(shape: Sequence[int]) -> str:
    """Times the products, by implementation and by sizes of groups."""
    N, E, F, X = shape
    given, rows = inputs(shape), [["", *(f"{kind}, ms" for kind in KINDS), "TFLOP/s of all"]]
    took: dict[str, dict[str, float]] = {}
    for name, sizes_X in sizes_of(shape).items():
        for kind in KINDS:
            for each in IMPLEMENTATIONS:
                check(kind, each, given, sizes_X)
            calls: dict[str, Callable[[], Any]] = {
                each: functools.partial(
                    jax.jit(functools.partial(product, kind, each)), given, sizes_X
                )
                for each in IMPLEMENTATIONS
            }
            if name == "even" and N % X == 0:
                calls["dense"] = functools.partial(jax.jit(functools.partial(dense, kind)), given)
            if (call := pytorch(kind, given, sizes_X)) is not None:
                calls["pytorch"] = call
            for each, one in seconds(calls, finished).items():
                took.setdefault(f"{each}, {name}", {})[kind] = one
    for name, of_kinds in took.items():
        rate = 6 * N * E * F / sum(of_kinds.values()) / 1e12
        times = (f"{of_kinds[kind] * 1e3:.3f}" for kind in KINDS)
        rows.append([name, *times, f"{rate:,.0f}"])
    return columns(rows)


def launched(kind: str, launch: Launch, given: Inputs, sizes_X: Array) -> Array:
    """Returns one of the products, from a kernel with these tiles, warps and stages."""
    if kind == "matrices":
        return triton_grouped.products_of_groups(given.x_NE, given.dy_NF, sizes_X, launch)
    rows, transposed = (given.x_NE, False) if kind == "forward" else (given.dy_NF, True)
    return triton_grouped.rows_by_groups([rows], [given.w_XEF], sizes_X, transposed, launch)


def programs_of(kind: str, given: Any, sizes_X: Any, device: jax.Device) -> dict[Launch, Any]:
    """Compiles the kernel with each launch that fits into the GPU's shared memory."""
    tiles = (64, 128), (32, 64), (64, 128, 256)
    if kind == "matrices":
        tiles = (32, 64), (64, 128), (64, 128)
    tried = itertools.starmap(Launch, itertools.product(*tiles, (4, 8), (2, 3, 4)))

    def kernel(launch: Launch, given: Inputs, sizes_X: Array) -> Array:
        return launched(kind, launch, given, sizes_X)

    return programs(kernel, tried, (given, sizes_X), device)


def quickest_launches(shape: Sequence[int]) -> str:
    """Lists the fastest three launches of each kernel for even groups, with uneven times."""
    given, sizes = inputs(shape), sizes_of(shape)
    rows = [["kernel", "tile", "warps", "stages", "even, ms", "uneven, ms"]]
    for kind in KINDS:
        compiled = programs_of(kind, given, sizes["even"], device_of(None))
        even, uneven = (
            seconds(
                {
                    str(one): functools.partial(each, given, sizes_X)
                    for one, each in compiled.items()
                }
            )
            for sizes_X in sizes.values()
        )
        for one in sorted(compiled, key=lambda one: even[str(one)])[:3]:
            *tile, warps, stages = one
            times = (f"{each[str(one)] * 1e3:.3f}" for each in (even, uneven))
            rows.append([kind, " × ".join(map(str, tile)), str(warps), str(stages), *times])
    return columns(rows)


def compiled_for(target: str, shape: Sequence[int]) -> str:
    """Compiles all launches for an absent GPU, and counts those that fit into shared memory."""
    device = device_of(target)
    given = shapes_on(device, jax.eval_shape(functools.partial(inputs, shape)))
    sizes_X = shapes_on(device, jax.ShapeDtypeStruct((shape[3],), jnp.int32))
    counts = [f"{len(programs_of(kind, given, sizes_X, device))} of {kind}" for kind in KINDS]
    return f"launches that compile for {target}: {', '.join(counts)}"


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"unknown argument {arguments[1]!r}; options begin with --, see --help")
    if _COMPILE_ONLY.value:
        prepare(_COMPILE_ONLY.value)
    logging.set_verbosity(logging.WARNING)  # hides messages about missing devices
    choose_devices()
    if not _COMPILE_ONLY.value and jax.default_backend() != "gpu":
        sys.exit(f"these kernels are for NVIDIA GPUs; JAX sees {jax.default_backend()}")
    print(f"{_COMPILE_ONLY.value or jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16")
    for text in _SHAPES.value:
        shape = [int(size) for size in text.split("x")]
        if len(shape) != 4:
            sys.exit(f"--shapes: {text!r} is not rows x in x out x groups")
        print(f"\n{text}")
        if _COMPILE_ONLY.value:
            print(compiled_for(_COMPILE_ONLY.value, shape), flush=True)
        else:
            print((quickest_launches if _LAUNCHES.value else compared)(shape), flush=True)


if __name__ == "__main__":
    app.run(main)
