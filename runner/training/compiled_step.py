"""The compiled steps of a run. One host may save them to files for others to load.

Such a file is a program: loading it can run any code, as starting a program can. Take it only from
where you would take a program from. What it was compiled for is read and compared first, so that a
file that does not belong to the run is refused; that guards against mistakes, not against malice.

The file: a line that names the format; a line of JSON with `identity`, the `config` as text and the
`sha256` of the rest; the rest, which JAX has written, with `pickle`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from lmlib.experiment import Experiment
from lmlib.parallel.axes import PartError
from lmlib.storage.stored_json import parse_json
from lmlib.storage.whole_file import write_whole
from lmlib.terminal.quantities import bytes_text, duration_text
from runner.config.text import changed_paths, settings
from runner.errors import ConfigError, user_errors
from runner.monitoring.program_dump import dump_program
from runner.processes.agreement import agreed
from runner.training.run import Run

_FORMAT = b"lmlib compiled step, format 1\n"
_LONGEST_HEADER = 2**24

Texts = Mapping[str, str]
Identity = dict[str, str]


@dataclasses.dataclass(frozen=True)
class _StepProgram:
    """The train step of a stage of a run: traced once, and compiled as the run's options say.

    Args:
      experiment: one of `Experiment.stages`, with batches of one size.
      begin: steps made before its first. The program of a later stage has a file of its own,
        FILE.2000 after 2,000 steps.
    """

    run: Run
    experiment: Experiment
    begin: int

    def file(self, path: Path) -> Path:
        """The program's file, given that of the first stage."""
        return path.with_name(f"{path.name}.{self.begin}") if self.begin else path

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        with user_errors((PartError,)):
            return self.experiment.trace_step().lower()

    @functools.cached_property
    def identity(self) -> Identity:
        return identity_of(self.lowered, self.experiment.mesh)

    def compiled(self) -> jax.stages.Compiled:
        run, options, config = self.run, self.run.options, settings(self.run.cfg)
        title = f"the step from {self.begin + 1:,} on" if self.begin else "the step"
        began = time.perf_counter()
        done = f"reused an earlier run's program for {title}"

        def compile_step() -> jax.stages.Compiled:
            nonlocal done
            run.tell(f"compiling {title}")
            done = f"compiled {title}"
            return self.lowered.compile()

        if options.compiled is not None:
            with agreed():
                file = self.file(options.compiled)
                compiled = load_compiled(file, self.lowered, self.identity, config)
            done = f"took the compiled step out of {file}"
        elif options.save_compiled is not None:
            with compiled_anew():
                compiled = compile_step()
        else:
            compiled = options.programs(self.lowered, self.experiment.mesh, compile_step)
        run.tell(f"{done} in {duration_text(time.perf_counter() - began)}")
        memory = compiled.memory_analysis()
        if memory is not None:  # not every platform says
            run.tell(
                f"on each device it needs {bytes_text(memory.argument_size_in_bytes)} for state "
                f"and batch and {bytes_text(memory.temp_size_in_bytes)} for temporaries"
            )
        if options.save_compiled is not None:
            file = self.file(options.save_compiled)
            with agreed():
                if run.primary:
                    save_compiled(compiled, file, self.identity, config)
            run.tell(f"wrote the compiled step to {file}")
        return compiled


class StepPrograms:
    """The train step of each stage of a run."""

    def __init__(self, run: Run):
        self._run = run
        self._programs = {
            steps: _StepProgram(run, stage, steps.start)
            for steps, stage in run.experiment.stages.items()
        }

    def check(self) -> None:
        """Raises ConfigError if the file of a program holds another one, or if steps of several
        stages are to be traced together."""
        options = self._run.options
        traced = options.profile or range(0)
        for steps, program in self._programs.items():
            if options.compiled is not None:
                if options.save_compiled is not None:
                    raise ConfigError("give --compiled or --save_compiled, not both")
                file, config = program.file(options.compiled), settings(self._run.cfg)
                read_compiled(file, program.identity, config)
            if steps.start in traced and steps.start + 1 in traced:
                raise ConfigError(
                    f"--profile has steps of two stages: trace up to step {steps.start:,}, or from "
                    f"{steps.start + 1:,} on"
                )

    def compiled(self, made: int) -> dict[range, jax.stages.Compiled]:
        """Compiles the programs of the stages that are left after `made` steps, before the first
        step, so that errors come now. The keys are their steps from 0."""
        run, last = self._run, self._run.experiment.steps
        compiled = {
            steps: program.compiled()
            for steps, program in self._programs.items()
            if steps.stop > made or steps.stop == last
        }
        for steps, program in compiled.items():
            if run.options.dump_hlo and run.primary:
                name = f"train_step_{steps.start + 1}" if steps.start else "train_step"
                run.tell(dump_program(program, run.workdir, name))
        return compiled


def identity_of(step: jax.stages.Lowered, mesh: Mesh) -> Identity:
    """Returns the properties, by name, that a saved step must share with `step`. Any change of the
    computation changes "program"; hyperparameters are not part of it."""
    device = mesh.devices.flat[0]
    arguments = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(step.args_info)
    ]
    return {
        "program": _digest(step.as_text()),
        "jax": f"{jax.__version__} with jaxlib {jaxlib.__version__}",
        "platform": device.client.platform_version,
        "devices": f"{mesh.devices.size} of kind {device.device_kind}",
        "processes": str(jax.process_count()),
        "mesh": f"{dict(mesh.shape)} of devices {[each.id for each in mesh.devices.flat]}",
        "arguments": _digest("\n".join(arguments)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Keeps JAX from taking programs out of its cache on disk, which cannot be saved again."""
    settings: Any = jax.config  # its attributes are made as it is imported
    before = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it asks for the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def save_compiled(
    compiled: jax.stages.Compiled, path: str | os.PathLike[str], identity: Identity, config: Texts
) -> None:
    """Writes a step, whole or not at all. It must have been compiled in `compiled_anew`.

    Args:
      config: for the sentence that refuses it to another run.

    Raises:
      ConfigError: if JAX or the disk refuses.
    """
    try:
        content, _, _ = serialize_executable.serialize(compiled)
    except Exception as error:  # JAX's or XLA's
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--save_compiled: JAX cannot save this program: {reason}") from error
    digest = hashlib.sha256(content).hexdigest()
    header = {"identity": identity, "config": dict(config), "sha256": digest}
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _FORMAT + json.dumps(header).encode() + b"\n" + content)
    except OSError as error:
        raise ConfigError(f"--save_compiled={path}: {error}") from error


def load_compiled(
    path: str | os.PathLike[str], step: jax.stages.Lowered, identity: Identity, config: Texts
) -> jax.stages.Compiled:
    """Loads a program that `save_compiled` wrote, which can run any code; see this module.

    Args:
      step: the step that the program replaces, and its identity.

    Raises:
      ConfigError: as `read_compiled`, or if JAX cannot load the program. None of its code has run
        but in the last case.
    """
    content = read_compiled(path, identity, config)
    try:
        return serialize_executable.deserialize_and_load(content, step.in_tree, step.out_tree)
    except Exception as error:  # JAX's, XLA's and pickle's
        reason = str(error).partition("\n")[0]
        raise _refused(path, f"cannot be loaded by JAX here: {reason}") from error


def read_compiled(path: str | os.PathLike[str], identity: Identity, config: Texts) -> bytes:
    """Reads and checks a program's file; none of its code is run.

    Raises:
      ConfigError: if the program was saved with another `identity`, naming the differences, or the
        file is damaged or something else.
    """
    try:
        with open(path, "rb") as file:
            if file.readline(len(_FORMAT)) != _FORMAT:
                raise _refused(path, "is no compiled step, or of another version")
            header, content = file.readline(_LONGEST_HEADER), file.read()
    except OSError as error:
        raise ConfigError(f"--compiled={path}: {error.strerror}") from error
    try:
        found = parse_json(header)
        saved, saved_config, digest = found["identity"], dict(found["config"]), found["sha256"]
        differing = _differences(dict(saved), identity)
    except (ValueError, TypeError, KeyError) as error:
        raise _refused(path, "is damaged") from error
    if differing:
        if changed := changed_paths(saved_config, config):
            differing.append(f"the config differs in {', '.join(changed)}")
        raise _refused(path, f"was compiled for another run: {'; '.join(differing)}")
    if hashlib.sha256(content).hexdigest() != digest:
        raise _refused(path, "is damaged")
    return content


def _refused(path: str | os.PathLike[str], reason: str) -> ConfigError:
    return ConfigError(
        f"--compiled={path} {reason}; compile anew: leave it out, and give --save_compiled"
    )


def _differences(saved: Identity, wanted: Identity) -> list[str]:
    found = []
    for name in sorted(saved.keys() | wanted.keys()):
        before, now = saved.get(name, "nothing"), wanted.get(name, "nothing")
        if before == now:
            continue
        if name in ("program", "arguments", "platform"):
            found.append(f"the {name} differ{'s' * (name != 'arguments')}")
        else:
            found.append(f"{name} {before}, here {now}")
    return found
