"""Compiles the train steps of a run, and saves them to files for other hosts to load.

Loading such a file can run arbitrary code, so load it only from a source that you would trust with
a program. The file's header is compared with the run first, and a file for another run is rejected.
This check guards against mistakes, not against malice.

File format: one line that names the format; one line of JSON with `identity`, the `config` as text
and the `sha256` of the content; the content, which JAX serializes with `pickle`.
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
    """The train step of one stage: traced once, and compiled or loaded as `run.options` say.

    Args:
      experiment: one of `Experiment.stages`, with batches of one size.
      begin: steps completed before this stage. A stage that begins after 2,000 steps is stored in
        its own file, FILE.2000.
    """

    run: Run
    experiment: Experiment
    begin: int

    def file(self, path: Path) -> Path:
        """Returns this stage's file; `path` is the first stage's."""
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
        if memory is not None:  # some platforms don't report it
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
    """The train steps of all stages of a run."""

    def __init__(self, run: Run):
        self._run = run
        self._programs = {
            steps: _StepProgram(run, stage, steps.start)
            for steps, stage in run.experiment.stages.items()
        }

    def check(self) -> None:
        """Checks the files of saved programs, and the steps to profile.

        Raises:
          ConfigError: if a file holds a program for another run, or the steps to profile belong to
            several stages.
        """
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
        """Compiles the remaining stages after `made` steps, so that errors appear early.

        Returns:
          The compiled step of each stage, by the stage's range of steps, counted from 0.
        """
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
    """Returns the properties that a saved step must share with `step`, by name.

    Any change of the computation changes "program". Hyperparameters are arguments of the step, so
    they don't.
    """
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
    """Disables JAX's compilation cache in a block: cached programs cannot be saved again."""
    settings: Any = jax.config  # type checkers don't see its attributes
    before = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the cache reads the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def save_compiled(
    compiled: jax.stages.Compiled, path: str | os.PathLike[str], identity: Identity, config: Texts
) -> None:
    """Writes a compiled step atomically. It must have been compiled in `compiled_anew`.

    Args:
      config: the run's settings, for the message when another run loads the file.

    Raises:
      ConfigError: if JAX cannot serialize the step or the file cannot be written.
    """
    try:
        content, _, _ = serialize_executable.serialize(compiled)
    except Exception as error:  # any error of JAX or XLA
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
    """Loads a program saved by `save_compiled`. This can run arbitrary code; see the module.

    Args:
      step: the step that the program replaces.
      identity: `identity_of(step, mesh)`.

    Raises:
      ConfigError: as `read_compiled`, or if JAX cannot load the program. Code from the file runs
        only after the checks of `read_compiled`.
    """
    content = read_compiled(path, identity, config)
    try:
        return serialize_executable.deserialize_and_load(content, step.in_tree, step.out_tree)
    except Exception as error:  # any error of JAX, XLA or pickle
        reason = str(error).partition("\n")[0]
        raise _refused(path, f"cannot be loaded by JAX here: {reason}") from error


def read_compiled(path: str | os.PathLike[str], identity: Identity, config: Texts) -> bytes:
    """Reads and checks a program's file without running any code from it.

    Raises:
      ConfigError: if the program was saved with another `identity` (the message names the
        differences), or the file is damaged or has another format.
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
