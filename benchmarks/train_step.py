"""Speed of lmlib's training step on this machine, beside the same step written by others.

    python benchmarks/train_step.py                       # on a CPU: the small sizes, some minutes
    python benchmarks/train_step.py                       # on a GPU: 84m to 2b, under 8 minutes
    python benchmarks/train_step.py --sizes=84m,2b --peers=pytorch_eager --setting=unroll=8
    python benchmarks/train_step.py --sizes=1b --sequence=8192 --packed
    python benchmarks/train_step.py --sizes=84m,8x2048 --muon
    python benchmarks/train_step.py --compile_only=h200   # anywhere: what an absent GPU would run

lmlib's own step is the one that the runner makes, of the experiments' model. Beside it:

- `jax`: a bare JAX step, one function over a dict of weights (step_peers/jax_step.py);
- `pytorch_eager`, `pytorch_compiled`: a plain PyTorch step with SDPA and fused AdamW
  (step_peers/pytorch_peer.py);
- `maxtext`: MaxText at the same shapes, where it is installed (step_peers/maxtext_peer.py).

All contenders keep freed memory as a run on CPUs does. All but MaxText begin with lmlib's weights,
see the same batches of one document a row, clip and update by the same numbers. The losses of the
first 20 steps must agree (tolerances: step_peers/report.py), else the script says which step of
whom differs and fails: speeds of other work say nothing. --packed gives several documents to a row,
a quarter of it each on average; lmlib then runs alone, since its peers would not keep them apart;
so it does with --muon, and at the size 8x2048, a mixture of eight experts of which each token goes
to two.

On a CPU the contenders take turns of five steps, the first of which warms up, and the figure is
tokens per CPU-second of all threads, the median over turns. Beside it stands what travels from one
machine to another: the model's FLOPs over what XLA makes of a CPU-second between the turns, when it
multiplies 2,048 × 2,048 matrices. On a GPU they have the device to themselves one after another.
FLOPs, in MFU too, are 6 for each parameter that multiplies and each token, and attention with
("causal") and without ("whole") the saving of its masked half, recomputation never; MFU is over the
dense bf16 peak that is printed.
"""

import ast
import dataclasses
import gc
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from absl import app, flags, logging

# The waiting threads of OpenMP (PyTorch's) spin by default, which counts as CPU time: on a busy
# machine a third of the speed was seen. Read when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# JAX takes three quarters of a GPU's memory at once otherwise, and PyTorch needs its own.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
from step_peers import maxtext_peer
from step_peers.ahead_of_time import compiled_for, target_of
from step_peers.contender import Contender, Work
from step_peers.machine import cpu_name, versions
from step_peers.matmul import Matmul
from step_peers.measure import TURN, Measurement, in_turns
from step_peers.report import CHECKED, TOLERANCE, OtherWork, check_same_work, table, title
from step_peers.sizes import ON_CPU, ON_GPU, SIZES, Size

from lmlib.compute import Compute
from lmlib.hardware.specifications import peak_flops
from runner.jax_settings.allocator import keep_freed_memory
from runner.jax_settings.xla_flags import set_gpu_flags

PEERS = ("jax", "pytorch_eager", "pytorch_compiled", "maxtext")

_PLATFORM = flags.DEFINE_enum(
    "platform", "auto", ["auto", "cpu", "gpu"], "Where to run; auto: on a GPU if there is one."
)
_SIZES = flags.DEFINE_list(
    "sizes", None, f"Of {', '.join(SIZES)}. Default: {', '.join(ON_CPU)} or {', '.join(ON_GPU)}."
)
_PRECISIONS = flags.DEFINE_list(
    "precisions", None, "Of float32, bfloat16. Default: both on a CPU, bfloat16 on a GPU."
)
_PEERS = flags.DEFINE_list(
    "peers", None, f"Of {', '.join(PEERS)}. Default: all on a CPU, pytorch_compiled on a GPU."
)
_STEPS = flags.DEFINE_integer(
    "steps", CHECKED, f"Of each contender, in turns of {TURN}.", lower_bound=2 * TURN
)
_SETTINGS = flags.DEFINE_multi_string(
    "setting", [], "Of lmlib's Compute, NAME=LITERAL: --setting=unroll=8 --setting=saved=()"
)
_SEQUENCE = flags.DEFINE_integer(
    "sequence", None, "Tokens of a row, instead of the size's own; a step keeps its tokens."
)
_PACKED = flags.DEFINE_bool("packed", False, "Several documents in each row; lmlib alone.")
_MUON = flags.DEFINE_bool("muon", False, "Muon in AdamW's place; lmlib alone.")
_COMPILE_ONLY = flags.DEFINE_string(
    "compile_only", None, "Compile lmlib's step for one of these, h200 or h100:1x8 say, and stop."
)

Found = dict[str, Measurement]  # by the contender's name


def missing(name: str, on_gpu: bool) -> str | None:
    """Why the peer cannot run here, or None."""
    if name.startswith("pytorch"):
        if importlib.util.find_spec("torch") is None:
            return "PyTorch: not installed (pip install torch)"
        import torch

        if on_gpu and not torch.cuda.is_available():
            return f"PyTorch: {torch.__version__} sees no GPU; install the build for CUDA"
    if name == "maxtext":
        if not maxtext_peer.installed():
            return "MaxText: not installed (pip install maxtext)"
        if on_gpu:
            return "MaxText: measured on CPUs only"
    return None


def make_contender(name: str, work: Work) -> Contender:
    if name == "lmlib":
        from step_peers.lmlib_step import LmlibStep

        return LmlibStep(work)
    if name == "jax":
        from step_peers.jax_step import BareJaxStep

        return BareJaxStep(work)
    from step_peers.pytorch_peer import PyTorchStep

    return PyTorchStep(work, compiled=name == "pytorch_compiled")


def order(
    works: Sequence[Work], names: Sequence[str], on_gpu: bool
) -> list[tuple[Work, list[str]]]:
    """Who runs beside whom, in order."""
    if not on_gpu:
        return [(work, of(work, names)) for work in works]
    # PyTorch can give a GPU's memory back and JAX keeps what it once had: so JAX comes last, and
    # its largest model first.
    of_pytorch = [name for name in names if name.startswith("pytorch")]
    of_jax = [name for name in names if not name.startswith("pytorch")]
    alone = [(work, [name]) for name in of_pytorch for work in works if work.size.has_peers]
    return alone + [(work, [name]) for work in reversed(works) for name in of(work, of_jax)]


def of(work: Work, names: Sequence[str]) -> list[str]:
    """Those of `names` that do this work."""
    return [name for name in names if name == "lmlib" or work.size.has_peers]


def measure(
    works: Sequence[Work], names: Sequence[str], on_gpu: bool, failures: list[str]
) -> Iterator[tuple[Work, Found, Matmul | None]]:
    """Each work as soon as all contenders have done it, with what they did in the order of `names`
    and, on a CPU, the matmuls between their turns.

    `failures` takes a line for each that could not.
    """
    found: dict[str, Found] = {title(work): {} for work in works}
    left = {title(work): of(work, names) for work in works}
    for work, together in order(works, names, on_gpu):
        began = time.perf_counter()
        matmul = None if on_gpu else Matmul(work.precision)
        try:
            in_process = [name for name in together if name != "maxtext"]
            contenders = {name: make_contender(name, work) for name in in_process}
            found[title(work)] |= in_turns(contenders, work.steps, matmul)
            if "maxtext" in together:
                found[title(work)]["maxtext"] = maxtext_peer.measured(work)
        except RuntimeError as error:  # what JAX and PyTorch raise where memory is short
            reason = str(error).strip().partition("\n")[0]
            failures.append(f"{', '.join(together)} at {work.size.name}: {reason}")
        contenders = {}
        release_memory()
        took = time.perf_counter() - began
        print(f"{work.size.name} {work.precision}: {', '.join(together)}: {took:.0f} s", flush=True)
        left[title(work)] = [name for name in left[title(work)] if name not in together]
        if not left[title(work)]:
            done = found[title(work)]
            yield work, {name: done[name] for name in names if name in done}, matmul


def release_memory() -> None:
    """Gives back what contenders that are gone have held."""
    gc.collect()
    if "torch" in sys.modules:
        import torch

        torch.cuda.empty_cache()


def chosen(flag: flags.FlagHolder, default: Sequence[str], known: Collection[str]) -> list[str]:
    """The flag's names, or `default`."""
    names = list(default if flag.value is None else flag.value)
    for name in names:
        if name not in known:
            sys.exit(f"--{flag.name}={name} is not known; choose from {', '.join(known)}")
    return names


def chosen_works(sizes: Sequence[str], precisions: Sequence[str]) -> list[Work]:
    """What the flags ask for, or these sizes in these precisions."""
    changes = changed_settings(_SETTINGS.value)
    return [
        Work(
            dataclasses.replace(with_rows_of(SIZES[size], _SEQUENCE.value), changes=changes),
            precision,
            _STEPS.value,
            packed=_PACKED.value,
            muon=_MUON.value,
        )
        for size in chosen(_SIZES, sizes, SIZES)
        for precision in chosen(_PRECISIONS, precisions, TOLERANCE)
    ]


def with_rows_of(size: Size, sequence: int | None) -> Size:
    """With fewer, longer rows or more, shorter ones; `None`: with its own."""
    if sequence is None:
        return size
    if sequence < 1 or size.tokens % sequence:
        sys.exit(f"--sequence={sequence} must divide the {size.tokens:,} tokens of a step")
    return dataclasses.replace(size, batch=size.tokens // sequence, sequence=sequence)


def changed_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Values by name from NAME=LITERAL."""
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


def on_gpu() -> bool:
    """Whether to measure on a GPU; exits if one is asked for and there is none."""
    if _PLATFORM.value == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return False
    found = jax.default_backend()
    if found == "gpu":
        return True
    if _PLATFORM.value == "gpu":
        sys.exit(
            f"--platform=gpu: JAX sees no GPU here, only {found}; install lmlib[cuda13] on a "
            "machine with one, or see what an absent one would run with --compile_only=h200"
        )
    return False


def main(arguments: Sequence[str]) -> None:
    if arguments[1:]:
        sys.exit(f"what is {arguments[1]!r}? Options begin with --; see --help")
    logging.set_verbosity(logging.WARNING)  # not what JAX looked for and did not find
    keep_freed_memory()  # as the runner does on CPUs, for all contenders alike
    set_gpu_flags()  # as the runner does, before JAX finds its devices
    if _COMPILE_ONLY.value is not None:
        target = target_of(_COMPILE_ONLY.value)
        for row in compiled_for(target, chosen_works(ON_GPU, ["bfloat16"])):
            print(": ".join(row), flush=True)
        return
    if _STEPS.value % TURN:
        sys.exit(f"--steps={_STEPS.value} must be a multiple of {TURN}, the steps of a turn")
    gpu = on_gpu()
    works = chosen_works(*((ON_GPU, ["bfloat16"]) if gpu else (ON_CPU, list(TOLERANCE))))
    peers = chosen(_PEERS, ["pytorch_compiled"] if gpu else PEERS, PEERS)
    if _PACKED.value or _MUON.value:
        peers = []
    device = jax.devices()[0]
    kind = described(device) if gpu else f"{os.cpu_count()} × {cpu_name()}"
    print(f"{kind}, {versions()}")
    absent = {name: reason for name in peers if (reason := missing(name, gpu))}
    for reason in dict.fromkeys(absent.values()):
        print(reason)
    names = ["lmlib", *(name for name in peers if name not in absent)]
    began = time.perf_counter()
    failures: list[str] = []
    for work, measurements, matmul in measure(works, names, gpu, failures):
        print(f"\n{title(work)}")
        if "lmlib" in measurements:
            print(table(work.size, measurements, device, matmul))
            failures += other_work(work, measurements)
        if gpu and work.size.mfu_to_reach:
            print(f"to reach on an H100 or H200: {work.size.mfu_to_reach} % MFU, causal")
        print(flush=True)
    print(f"built, checked and measured in {time.perf_counter() - began:.0f} s")
    if failures:
        sys.exit("\n".join(failures))


def described(device: jax.Device) -> str:
    """An accelerator and its speed."""
    peak = peak_flops(device.device_kind)
    peak_text = f"dense bf16 peak {peak / 1e12:,.0f} TFLOP/s" if peak else "no peak known"
    return f"{device.device_kind}, {peak_text}"


def other_work(work: Work, measurements: Found) -> list[str]:
    """What is wrong with the losses, contender by contender."""
    reference, wrong = measurements["lmlib"].losses, []
    for name, measurement in measurements.items():
        if not measurement.same_data:
            continue
        try:
            check_same_work(name, measurement.losses, reference, work.precision)
        except OtherWork as error:
            wrong.append(f"{work.size.name}: {error}")
    return wrong


if __name__ == "__main__":
    app.run(main)
