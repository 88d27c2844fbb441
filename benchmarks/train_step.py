"""Speed of lmlib's training step on this machine, compared with other implementations.

    python benchmarks/train_step.py                       # on a CPU: the small sizes, some minutes
    python benchmarks/train_step.py                       # on a GPU: 84m to 2b, under 8 minutes
    python benchmarks/train_step.py --sizes=84m,2b --peers=pytorch_eager --setting=unroll=8
    python benchmarks/train_step.py --sizes=8_of_512,32_of_256 --precisions=float32   # mixtures
    python benchmarks/train_step.py --sizes=1b --rows=8x8192  # 8 rows of 8,192 tokens a step
    python benchmarks/train_step.py --sizes=1b --packed
    python benchmarks/train_step.py --sizes=84m,8x2048 --muon

lmlib's own step is the one that the runner compiles. Its peers are a bare JAX step (`jax`) and a
plain PyTorch step with SDPA, grouped matmuls of experts and fused AdamW (`pytorch_eager`,
`pytorch_compiled`; its compiler has grouped matmuls in bfloat16 only). Mixtures of experts have
more peers, on CPUs only: lmlib's Llama whose MLP is as large as the experts of a token together
(`dense`), and transformers' Mixtral with its experts one after another or as grouped matmuls
(`transformers`, `transformers_grouped`).

All except `dense` start from lmlib's weights, and see the same batches of one document per row and
the same hyperparameters. The losses of all 30 steps must agree, or the script names the step
and fails. With --packed (several documents in a row) or --muon, lmlib runs without peers.

Contenders take turns of five steps, and the first turn warms up. Values are medians over turns: on
a CPU tokens per CPU-second of all threads, and the model's FLOPs divided by those that XLA achieves
in large matrix products between the turns. FLOPs are 6 per token and parameter used in a matmul,
plus attention with ("causal") and without ("whole") the saving of its masked half. On a GPU, MFU
refers to the printed dense bf16 peak. There contenders run one after another; --together makes them
take turns, if the memory is enough for all. JAX counts memory from the start of the process, so
only the first size of a command shows its own measured peak.
"""

import ast
import dataclasses
import gc
import importlib.util
import inspect
import os
import re
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from absl import app, flags, logging

# Waiting OpenMP threads of PyTorch spin by default, which counts as CPU time: on a busy machine
# this cost a third of the speed. The variable is read when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Otherwise JAX takes three quarters of a GPU's memory at once, and PyTorch needs its own.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
from step_peers import jax_step, lmlib_step
from step_peers.measure import STEPS, TOLERANCE, Measurements, machine, title
from step_peers.work import (
    ON_CPU,
    ON_GPU,
    PEERS_OF_LLAMA,
    PEERS_OF_MIXTRAL,
    SIZES,
    Contender,
    Work,
    dense_of,
)

from lmlib.compute import Compute
from lmlib.hardware.specifications import peak_flops
from runner.jax_settings.devices import choose_devices, keep_freed_memory
from runner.jax_settings.xla_flags import set_gpu_flags

PEERS = tuple(dict.fromkeys(PEERS_OF_LLAMA + PEERS_OF_MIXTRAL))

_SIZES = flags.DEFINE_list(
    "sizes",
    None,
    f"Sizes: {', '.join(SIZES)}. Default: {', '.join(ON_CPU)} or {', '.join(ON_GPU)}.",
)
_PRECISIONS = flags.DEFINE_list(
    "precisions", None, "float32, bfloat16. Default: both on a CPU, bfloat16 on a GPU."
)
_PEERS = flags.DEFINE_list(
    "peers", None, f"Peers: {', '.join(PEERS)}. Default: all on a CPU, pytorch_compiled on a GPU."
)
_SETTINGS = flags.DEFINE_multi_string(
    "setting", [], "Setting of lmlib's Compute, NAME=LITERAL, as in --setting=unroll=8."
)
_PACKED = flags.DEFINE_bool("packed", False, "Put several documents in each row, without peers.")
_ROWS = flags.DEFINE_string(
    "rows", None, "Rows × tokens of each step, as in 8x8192. Default: the size's own."
)
_TOGETHER = flags.DEFINE_bool(
    "together", False, "On a GPU contenders take turns, which needs the memory of all at once."
)
_MUON = flags.DEFINE_bool("muon", False, "Use Muon instead of AdamW, without peers.")


def missing(name: str, on_gpu: bool) -> str | None:
    """Returns the reason why the peer cannot run here, or `None`."""
    if name.startswith(("pytorch", "transformers")):
        if importlib.util.find_spec("torch") is None:
            return "PyTorch: not installed (pip install torch)"
        import torch

        if on_gpu and not torch.cuda.is_available():
            return f"PyTorch: {torch.__version__} sees no GPU; install the build for CUDA"
    if name.startswith("transformers") and importlib.util.find_spec("transformers") is None:
        return "transformers: not installed (pip install 'lmlib[parity]')"
    if name.startswith(("dense", "transformers")) and on_gpu:
        return f"{name}: measured on CPUs only"
    return None


def make_contender(name: str, work: Work) -> Contender:
    if name == "lmlib":
        return lmlib_step.LmlibStep(work)
    if name == "dense":
        return lmlib_step.LmlibStep(dataclasses.replace(work, size=dense_of(work.size)))
    if name == "jax":
        return jax_step.BareJaxStep(work)
    from step_peers import pytorch_peer

    if name.startswith("pytorch"):
        return pytorch_peer.decoder_step(work, compiled=name == "pytorch_compiled")
    experts = "grouped_mm" if name == "transformers_grouped" else "eager"
    return pytorch_peer.mixtral_step(work, experts)


def contenders_of(work: Work, names: Sequence[str]) -> list[str]:
    """Returns the contenders among `names` that support this work."""
    peers = set(work.size.peers)
    if work.precision == "bfloat16":
        peers -= {"transformers", "transformers_grouped"}
    elif "experts" in work.size.settings:
        peers -= {"pytorch_compiled"}
    return [name for name in names if name == "lmlib" or name in peers]


def order(
    works: Sequence[Work], names: Sequence[str], together: bool
) -> list[tuple[Work, list[str]]]:
    """Returns the order of works, with the contenders that take turns on each."""
    if together:
        return [(work, contenders_of(work, names)) for work in works]
    # PyTorch can return a GPU's memory, and JAX keeps it. So JAX comes last, with its largest model
    # first.
    of_pytorch = [name for name in names if name.startswith("pytorch")]
    of_jax = [name for name in names if name not in of_pytorch]
    alone = [
        (work, [name])
        for name in of_pytorch
        for work in works
        if name in contenders_of(work, [name])
    ]
    return alone + [(work, contenders_of(work, of_jax)) for work in reversed(works)]


def measure(works: Sequence[Work], names: Sequence[str], on_gpu: bool) -> list[str]:
    """Prints a table of each work as soon as all contenders have finished it.

    Returns a line for each contender that failed, or whose losses differ.
    """
    found = {title(work): Measurements(work) for work in works}
    failures, to_do = [], order(works, names, _TOGETHER.value or not on_gpu)
    for number, (work, together) in enumerate(to_do):
        began = time.perf_counter()
        measurements = found[title(work)]
        try:
            measurements.add({name: make_contender(name, work) for name in together})
        except RuntimeError as error:  # out-of-memory errors of JAX and PyTorch
            reason = str(error).strip().partition("\n")[0]
            failures.append(f"{', '.join(together)} at {work.size.name}: {reason}")
        gc.collect()
        if on_gpu and "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
        took = time.perf_counter() - began
        print(f"{work.size.name} {work.precision}: {', '.join(together)}: {took:.0f} s", flush=True)
        if all(later is not work for later, _ in to_do[number + 1 :]):
            print(f"\n{title(work)}")
            if "lmlib" in measurements.of:
                print(measurements.table(names))
                failures += measurements.problems()
            print(flush=True)
    return failures


def chosen(flag: flags.FlagHolder, default: Sequence[str], known: Collection[str]) -> list[str]:
    """Returns the flag's names, or `default`; exits if one is not known."""
    names = list(default if flag.value is None else flag.value)
    for name in names:
        if name not in known:
            sys.exit(f"--{flag.name}={name} is not known; choose from {', '.join(known)}")
    return names


def chosen_works(sizes: Sequence[str], precisions: Sequence[str]) -> list[Work]:
    """Returns the works of the flags, by default these sizes in these precisions."""
    changes: dict[str, Any] = {"changes": changed_settings(_SETTINGS.value)}
    if _ROWS.value:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", _ROWS.value):
            sys.exit(f"--rows={_ROWS.value} is not ROWSxTOKENS, as in 8x8192")
        changes |= zip(("batch", "sequence"), map(int, _ROWS.value.split("x")), strict=True)
    works = []
    for name in chosen(_SIZES, sizes, SIZES):
        size = dataclasses.replace(SIZES[name], **changes)
        for precision in chosen(_PRECISIONS, precisions, TOLERANCE):
            works.append(Work(size, precision, STEPS, _PACKED.value, _MUON.value))
    return works


def changed_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Returns values by name, from texts NAME=LITERAL."""
    known, changes = inspect.signature(Compute).parameters, {}
    for text in texts:
        name, _, literal = text.partition("=")
        if name not in known:
            sys.exit(f"--setting={text}: there is no {name!r}; there are {', '.join(known)}")
        try:
            changes[name] = ast.literal_eval(literal)
        except (SyntaxError, ValueError):
            sys.exit(f"--setting={text}: write a Python literal after =, as in {name}=8")
    return changes


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"unknown argument {arguments[1]!r}; options begin with --, see --help")
    logging.set_verbosity(logging.WARNING)  # hides JAX's messages about missing devices
    keep_freed_memory()  # as the runner does on CPUs, for all contenders alike
    set_gpu_flags()  # as the runner does, before JAX finds its devices
    choose_devices()
    device = jax.devices()[0]
    gpu = device.platform == "gpu"
    works = chosen_works(*((ON_GPU, ["bfloat16"]) if gpu else (ON_CPU, list(TOLERANCE))))
    peers = chosen(_PEERS, ["pytorch_compiled"] if gpu else PEERS, PEERS)
    peers = [name for name in peers if any(name in work.size.peers for work in works)]
    if _PACKED.value or _MUON.value:
        peers = []
    if gpu:
        peak = peak_flops(device.device_kind)
        peak_text = f"dense bf16 peak {peak / 1e12:,.0f} TFLOP/s" if peak else "no peak known"
        print(f"{device.device_kind}, {peak_text}")
    print(machine())
    absent = {name: reason for name in peers if (reason := missing(name, gpu))}
    for reason in dict.fromkeys(absent.values()):
        print(reason)
    began = time.perf_counter()
    failures = measure(works, ["lmlib", *(each for each in peers if each not in absent)], gpu)
    print(f"built, checked and measured in {time.perf_counter() - began:.0f} s")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    app.run(main)
