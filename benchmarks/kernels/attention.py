"""Speed of the attention kernels on this GPU, forward and backward, compared with cuDNN's.

    python benchmarks/kernels/attention.py                           # about a minute a shape
    python benchmarks/kernels/attention.py --shapes=4x16384x8x128 --document=2048

Rows are one document each ("whole"), or documents of `--document` tokens on average ("packed"),
for which cuDNN computes everything under a mask. Each kernel is first compared with float32, then
timed in turns; values are medians. FLOP/s count the two matrix products of the forward pass and the
five of the backward pass, for the causal half of whole rows.

`--launches` times Triton's kernels with other tiles, warps and stages than
`lmlib.models.attend.fused.triton_kernels` has, and lists the fastest. `--compile_only` compiles
them for an absent GPU.
"""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax import Array
from launches import device_of, prepare, programs, shapes_on
from turns import seconds

from lmlib.models.attend import attend, problem
from lmlib.models.attend.fused import triton_kernels
from lmlib.models.attend.fused.triton_kernels import Launch
from lmlib.models.attend.fused.visits import Tiles, sight
from lmlib.models.attend.kernel import Options, Shapes, whole_row
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices

TOLERANCE = 2e-2  # relative to the norm, in bfloat16
KERNELS = "mixed", "query_gradients", "key_gradients"

_SHAPES = flags.DEFINE_list(
    "shapes",
    ["64x1024x8x128", "64x1024x16x64", "4x16384x8x128", "32x1024x4x256"],
    "Rows × tokens × heads × head_dim.",
)
_DOCUMENT = flags.DEFINE_integer("document", 256, "Tokens of a packed document, on average.")
_LAUNCHES = flags.DEFINE_bool("launches", False, "Try other tiles, warps and stages.")
_COMPILE_ONLY = flags.DEFINE_string(
    "compile_only", None, "Only compile the launches, for an absent GPU: h200:1x1."
)


class Inputs(NamedTuple):
    """Queries, keys, values and the output's gradient, [B, S, H, D] in bfloat16."""

    q: Array
    k: Array
    v: Array
    d: Array


def inputs(shape: Sequence[int]) -> Inputs:
    keys = jax.random.split(jax.random.key(0), 4)
    return Inputs(*(jax.random.normal(key, shape, jnp.bfloat16) for key in keys))


def segments(shape: Sequence[int], document: int) -> Array:
    borders_BS = np.random.default_rng(0).random(shape[:2]) < 1 / document
    return jnp.asarray(np.cumsum(borders_BS, axis=1), jnp.int32)


def forward(implementation: str, given: Inputs, segments_BS: Array | None) -> Array:
    return attend(given.q, given.k, given.v, segments_BS, implementation)


def both(implementation: str, given: Inputs, segments_BS: Array | None) -> tuple[Array, ...]:
    def mixed(q: Array, k: Array, v: Array) -> Array:
        return attend(q, k, v, segments_BS, implementation)

    value, backward = jax.vjp(mixed, given.q, given.k, given.v)
    return value, *backward(given.d)


def check(names: Sequence[str], given: Inputs, segments_BS: Array) -> None:
    """Exits if a kernel differs from the float32 definition, in one row and two heads."""
    few = Inputs(*(x[:1, :, :2] for x in given))
    wide = Inputs(*(x.astype(jnp.float32) for x in few))
    with jax.default_matmul_precision("highest"):
        right = jax.jit(functools.partial(both, "plain"))(wide, segments_BS[:1])
    for name in names:
        for value, expected in zip(
            jax.jit(functools.partial(both, name))(few, segments_BS[:1]), right, strict=True
        ):
            error = jnp.linalg.norm(value.astype(jnp.float32) - expected)
            if not error <= TOLERANCE * jnp.linalg.norm(expected):
                sys.exit(f"{name} is not attention here: off by {error} in the norm")


def compared(shape: Sequence[int], document: int) -> str:
    B, S, H, D = shape
    given, packed_BS = inputs(shape), segments(shape, document)
    names = [
        name for name in ("triton", "cudnn") if problem(name, Shapes(S, D, jnp.bfloat16)) is None
    ]
    check(names, given, packed_BS)
    calls = {
        f"{name} {rows} {part.__name__}": functools.partial(
            jax.jit(functools.partial(part, name)), given, of_rows
        )
        for name, (rows, of_rows), part in itertools.product(
            names, {"whole": None, "packed": packed_BS}.items(), (forward, both)
        )
    }
    took = seconds(calls)
    product = 2 * B * H * D * S**2 / 2
    rows = [["", "forward, ms", "TFLOP/s", "backward, ms", "TFLOP/s"]]
    for name, kind in itertools.product(names, ("whole", "packed")):
        first = took[f"{name} {kind} forward"]
        second = took[f"{name} {kind} both"] - first
        row = [f"{name}, {kind} rows"]
        for each, products in ((first, 2), (second, 5)):
            row += [f"{each * 1e3:.3f}", f"{products * product / each / 1e12:,.0f}"]
        rows.append(row)
    return columns(rows)


def programs_of(
    kernel: str, shape: Sequence[int], given: Any, segments_BS: Any, device: jax.Device
) -> dict[Launch, Any]:
    """Compiles the kernel with each launch that fits into the GPU's shared memory."""
    B, S, H, D = shape
    options, places_S = Options.of(None, None, None, D), whole_row(S).own_S

    def run(launch: Launch, given: Inputs, segments_BS: Array) -> Any:
        of_length = (S,) if kernel == "key_gradients" else ()
        arrays = *given[:3], sight(places_S, segments_BS, segments_BS, None)
        numbers = jnp.zeros((B, H, S), jnp.float32)
        backward = () if kernel == "mixed" else (given.d, numbers, numbers)
        function = getattr(triton_kernels, kernel)
        return function(launch, *of_length, options, *arrays, *backward)

    sizes = [size for size in (32, 64, 128) if S % size == 0]
    tried = [
        Launch(Tiles(queries, keys), warps, stages)
        for queries, keys, warps, stages in itertools.product(sizes, sizes, (4, 8), (2, 3))
    ]
    return programs(run, tried, (given, segments_BS), device)


def quickest_launches(shape: Sequence[int], document: int) -> str:
    """Lists each Triton kernel's fastest three launches for whole rows, with packed times."""
    given, packed_BS = inputs(shape), segments(shape, document)
    rows = [["kernel", "tile", "warps", "stages", "whole, ms", "packed, ms"]]
    for kernel in KERNELS:
        compiled = programs_of(kernel, shape, given, packed_BS, device_of(None))
        whole, packed = (
            seconds(
                {
                    str(launch): functools.partial(each, given, segments_BS)
                    for launch, each in compiled.items()
                }
            )
            for segments_BS in (jnp.zeros_like(packed_BS), packed_BS)
        )
        for launch in sorted(compiled, key=lambda launch: whole[str(launch)])[:3]:
            tiles, warps, stages = launch
            times = (f"{each[str(launch)] * 1e3:.3f}" for each in (whole, packed))
            rows.append([kernel, " × ".join(map(str, tiles)), str(warps), str(stages), *times])
    return columns(rows)


def compiled_for(target: str, shape: Sequence[int]) -> str:
    """Compiles all launches for an absent GPU, and counts those that fit into shared memory."""
    device = device_of(target)
    given = shapes_on(device, jax.eval_shape(functools.partial(inputs, shape)))
    segments_BS = shapes_on(device, jax.ShapeDtypeStruct(tuple(shape[:2]), jnp.int32))
    counts = [
        f"{len(programs_of(kernel, shape, given, segments_BS, device))} of {kernel}"
        for kernel in KERNELS
    ]
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
            sys.exit(f"--shapes: {text!r} is not rows x tokens x heads x head_dim")
        if _COMPILE_ONLY.value:
            print(f"\n{text}")
            print(compiled_for(_COMPILE_ONLY.value, shape), flush=True)
            continue
        print(f"\n{text}, packed documents of {_DOCUMENT.value} tokens on average")
        made = quickest_launches if _LAUNCHES.value else compared
        print(made(shape, _DOCUMENT.value), flush=True)


if __name__ == "__main__":
    app.run(main)
