"""Programs of StableHLO from a process that is not trusted: made there, checked and compiled here.

A program has no effects: it cannot read files, call Python, or see anything except its arguments.
The checks refuse what could break this, and constants that could hold a text or trained weights.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax import export

import lmlib
from runner.errors import ConfigError
from runner.lab.exporting import Request

NEEDED = ("begin", "step", "weights")
OF_MODELS = ("fresh", "logits")
MOST_BYTES = 64 << 20  # of a program's file
# Characters of a program's constants; the step of the tiny quickstart with Muon has 1,248.
MOST_CONSTANTS = 16_384
_MOST_PARAMETERS = 1.01  # of a candidate, times the baseline's
_EXPORT_SECONDS = 900.0
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "JAX_PLATFORMS")
# Beginnings of the names of functions that a program may call: linear algebra, and notes for XLA.
_ALLOWED = (
    *("LayoutConstraint", "Sharding", "SPMD", "mhlo.", "stablehlo.", "xla.sdy.", "ApproxTopK"),
    *("lapack_", "cusolver_", "cublas_", "cu_", "Qr", "Eigh", "ProductOf", "ducc_fft", "TopK"),
)
_CALLED = re.compile(r"custom_call\s*@\"?([^\s\"(]+)")
_EFFECTS = re.compile(r"stablehlo\.(infeed|outfeed|send|recv|rng)\b")
_CONSTANTS = re.compile(r"dense(?:_resource)?<(\"[^\"]*\"|[^>]*)>|\"0x([0-9A-Fa-f]+)\"")


@dataclasses.dataclass(frozen=True)
class Program:
    """A checked program.

    `digest` is of its text, without places in files. `constants` counts the characters of its
    different constants.
    """

    name: str
    exported: export.Exported
    digest: str
    constants: int

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The shapes and dtypes of its arguments."""
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.exported.in_avals]
        found, _ = jax.tree.unflatten(self.exported.in_tree, shapes)
        return tuple(found)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """The compiled program; a step donates the state."""
        donated = (0,) if self.name == "step" else ()
        made = jax.jit(self.exported.call, donate_argnums=donated)
        return made.lower(*self.arguments).compile()

    @property
    def results(self) -> list[tuple[tuple[int, ...], str]]:
        """The shape and dtype of each result."""
        return _shapes(self.exported.out_avals)


def exported(request: Request, who: str) -> dict[str, Program]:
    """Exports `request` in a new process, and returns the checked programs.

    Raises ConfigError if the process fails or a program is refused; `who` names it in messages.
    """
    Path(request.folder).mkdir(parents=True)
    of_library = str(Path(lmlib.__file__).parents[1])
    paths = (of_library, os.environ.get("PYTHONPATH", ""))
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(
        [sys.executable, "-m", "runner.lab.exporting"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=request.folder,
        env=environment,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        _, errors = process.communicate(json.dumps(dataclasses.asdict(request)), _EXPORT_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{who} was not exported within {_EXPORT_SECONDS:.0f} s: its module must only define "
            "functions and classes"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also processes that the module left behind
        process.wait()
    if process.returncode:
        said = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        raise ConfigError(f"{who} cannot be exported: {said[-1]}")
    return read(Path(request.folder), who)


def read(folder: Path, who: str) -> dict[str, Program]:
    """Reads and checks the programs in `folder`; raises ConfigError for a refused one."""
    found = {}
    for name in (*NEEDED, *OF_MODELS):
        file = folder / f"{name}.program"
        if file.is_file() and not file.is_symlink():
            found[name] = checked(name, file, who)
    missing = [name for name in NEEDED if name not in found]
    if missing or len(found.keys() & set(OF_MODELS)) == 1:
        raise ConfigError(f"{who} has not written its programs: its module ended the process")
    return found


def checked(name: str, file: Path, who: str) -> Program:
    """Reads a program. Raises ConfigError if it could have effects, or holds large constants."""
    if file.stat().st_size > MOST_BYTES:
        raise ConfigError(f"the program {name} of {who} has more than {MOST_BYTES:,} bytes")
    try:
        made = export.deserialize(bytearray(file.read_bytes()))
        text = made.mlir_module()
    except Exception as error:
        raise ConfigError(f"{file} is damaged: {type(error).__name__}") from error
    if made.nr_devices != 1 or jax.default_backend() not in made.platforms:
        raise ConfigError(f"the program {name} of {who} is not for one {jax.default_backend()}")
    called = {each for each in _CALLED.findall(text) if not each.startswith(_ALLOWED)}
    effects = {*_EFFECTS.findall(text)} | called
    if effects or made.ordered_effects or made.unordered_effects:
        names = ", ".join(sorted(effects)) or "effects"
        raise ConfigError(
            f"the program {name} of {who} uses {names}, which could reach outside the program: "
            "leave out callbacks, printing and kernels of your own"
        )
    constants = sum(max(map(len, each)) for each in {*_CONSTANTS.findall(text)})
    if constants > MOST_CONSTANTS:
        raise ConfigError(
            f"the program {name} of {who} has constants of {constants:,} characters, at most "
            f"{MOST_CONSTANTS:,} are allowed: compute arrays from numbers, as by jnp.arange"
        )
    return Program(name, made, hashlib.sha256(text.encode()).hexdigest(), constants)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of a comparison: its programs, and the length of its runs."""

    programs: Mapping[str, Program]
    steps: int

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(math.prod(shape) for shape, _ in self.programs["fresh"].results)

    @property
    def state_bytes(self) -> int:
        """The size of weights and optimizer state."""
        leaves = self.programs["begin"].exported.out_avals
        return sum(each.size * getattr(each.dtype, "itemsize", 4) for each in leaves)


def candidate_arm(baseline: Arm, made: Mapping[str, Program], steps: int) -> Arm:
    """Returns the candidate's arm, which takes the baseline's model unless it has its own.

    Raises ConfigError if shapes do not fit, or if it has too many weights.
    """
    arm = Arm({**baseline.programs, **made}, steps)
    ours, theirs = arm.programs, baseline.programs
    fresh, state = ours["fresh"].results, ours["begin"].results
    agree = (
        _shapes(ours["begin"].arguments) == [*fresh, ((), "uint32")]
        and state == _shapes(ours["step"].arguments[0]) == ours["step"].results
        and _shapes(ours["weights"].arguments) == state
        and ours["weights"].results == fresh
        and _shapes(ours["logits"].arguments[0]) == fresh
        and ours["logits"].results == theirs["logits"].results
        and _shapes(ours["step"].arguments[1]) == _shapes(theirs["step"].arguments[1])
        and _shapes(ours["logits"].arguments[1:]) == _shapes(theirs["logits"].arguments[1:])
    )
    if not agree:
        raise ConfigError(
            "the candidate's programs have other shapes than the task: batches, logits and the "
            "weights to evaluate must have the task's sizes"
        )
    if arm.parameters > _MOST_PARAMETERS * baseline.parameters:
        more = 100 * (_MOST_PARAMETERS - 1)
        raise ConfigError(
            f"the candidate's model has {arm.parameters:,} weights, and the baseline's "
            f"{baseline.parameters:,}: at most {more:.0f} % more are allowed"
        )
    return arm


def _shapes(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]
