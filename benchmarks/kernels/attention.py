"""Speed of the attention kernels on this GPU, forward and backward, compared with cuDNN's.

    python benchmarks/kernels/attention.py                           # about a minute a shape
    python benchmarks/kernels/attention.py --shapes=4x16384x8x128 --document=2048

Rows are one document each ("whole"), or documents of `--document` tokens on average ("packed"),
for which cuDNN computes everything under a mask. Each kernel is first compared with float32, then
timed in turns; values are medians. FLOP/s count the two matrix products of the forward pass and the
five of the backward pass, for the causal half of whole rows.

`--launches` times Triton's kernels with other tiles, warps and stages than
`lmlib.models.attend.fused.triton_kernels` has, and lists the fastest.
"""

import concurrent.futures
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import Array
from turns import seconds

from lmlib.models.attend import attend, problem
from lmlib.models.attend.fused import triton_kernels
from lmlib.models.attend.fused.triton_kernels import Launch
from lmlib.models.attend.fused.visits import Tiles, sight
from lmlib.models.attend.kernel import Options, Shapes, whole_row
from lmlib.terminal.table import columns
from runner.jax_settings.devices import choose_devices

TOLERANCE = 2e-2  # relative to the norm, in bfloat16

_SHAPES = flags.DEFINE_list(
    "shapes",
    ["64x1024x8x128", "64x1024x16x64", "4x16384x8x128", "32x1024x4x256"],
    "Rows × tokens × heads × head_dim.",
)
_DOCUMENT = flags.DEFINE_integer("document", 256, "Tokens of a packed document, on average.")
_LAUNCHES = flags.DEFINE_bool("launches", False, "Try other tiles, warps and stages.")


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


def quickest_launches(shape: Sequence[int], document: int) -> str:
    """Lists each Triton kernel's fastest three launches for whole rows, with packed times."""
    _, S, H, D = shape
    given, packed_BS = inputs(shape), segments(shape, document)
    numbers = jnp.zeros((shape[0], H, S), jnp.float32)
    options, places_S = Options.of(None, None, None, D), whole_row(S).own_S

    def run(kernel: str, launch: Launch, given: Inputs, seen: Array) -> Any:
        of_length = (S,) if kernel == "key_gradients" else ()
        arrays = *given[:3], sight(places_S, seen, seen, None)
        backward = () if kernel == "mixed" else (given.d, numbers, numbers)
        function = getattr(triton_kernels, kernel)
        return function(launch, *of_length, options, *arrays, *backward)

    def compiled(kernel: str, launch: Launch) -> Any:
        try:
            program = jax.jit(functools.partial(run, kernel, launch))
            return program.lower(given, packed_BS).compile()
        except jax.errors.JaxRuntimeError:  # more shared memory than the GPU has
            return None

    sizes = [size for size in (32, 64, 128) if S % size == 0]
    launches = {
        str(launch): launch
        for queries, keys, warps, stages in itertools.product(sizes, sizes, (4, 8), (2, 3))
        for launch in [Launch(Tiles(queries, keys), warps, stages)]
    }
    rows = [["kernel", "tile", "warps", "stages", "whole, ms", "packed, ms"]]
    for kernel in ("mixed", "query_gradients", "key_gradients"):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            programs = pool.map(functools.partial(compiled, kernel), launches.values())
            fit = {name: each for name, each in zip(launches, programs, strict=True) if each}
        whole, packed = (
            seconds({name: functools.partial(each, given, of) for name, each in fit.items()})
            for of in (jnp.zeros_like(packed_BS), packed_BS)
        )
        for name in sorted(fit, key=whole.__getitem__)[:3]:
            tiles, warps, stages = launches[name]
            times = (f"{each[name] * 1e3:.3f}" for each in (whole, packed))
            rows.append([kernel, " × ".join(map(str, tiles)), str(warps), str(stages), *times])
    return columns(rows)


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"unknown argument {arguments[1]!r}; options begin with --, see --help")
    choose_devices()
    if jax.default_backend() != "gpu":
        sys.exit(f"these kernels are for NVIDIA GPUs; JAX sees {jax.default_backend()}")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16")
    for text in _SHAPES.value:
        shape = [int(size) for size in text.split("x")]
        if len(shape) != 4:
            sys.exit(f"--shapes: {text!r} is not rows x tokens x heads x head_dim")
        print(f"\n{text}, packed documents of {_DOCUMENT.value} tokens on average")
        made = quickest_launches if _LAUNCHES.value else compared
        print(made(shape, _DOCUMENT.value), flush=True)


if __name__ == "__main__":
    app.run(main)
