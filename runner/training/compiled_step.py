"""A compiled step in a file: one host compiles, the others start without.

Such a file is a program: loading it can run any code, as starting a program can. Take it only from
where you would take a program from. What it was compiled for is read and compared first, so that a
file that does not belong to the run is refused; that guards against mistakes, not against malice.

The file: a line that names the format; a line of JSON with `identity`, the names of the step's
`metrics` and the `sha256` of the rest; the rest, which JAX has written, with `pickle`.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fiddle as fdl
import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from lmlib.data.batch import Batch
from lmlib.state import State
from lmlib.storage.stored_json import parse_json
from lmlib.storage.whole_file import write_whole
from runner.config.code import code_digest
from runner.config.text import changed_paths, flattened
from runner.errors import ConfigError

_FORMAT = b"lmlib compiled step, format 1\n"
_LONGEST_HEADER = 2**24

Identity = dict[str, str]


def identity_of(cfg: fdl.Config, mesh: Mesh, state: State, batch: Batch) -> Identity:
    """What must be the same for a compiled step to be taken: names to readable values.

    Args:
      state, batch: arrays, or `ShapeDtypeStruct`s with shardings.
    """
    device = mesh.devices.flat[0]
    laid_out = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec}"
        for path, leaf in jax.tree_util.tree_leaves_with_path((state, batch))
    ]
    return {
        "config": flattened(cfg),
        "code": code_digest(cfg),
        "jax": f"{jax.__version__} with jaxlib {jaxlib.__version__}",
        "platform": device.client.platform_version,
        "devices": f"{mesh.devices.size} of kind {device.device_kind}",
        "processes": str(jax.process_count()),
        "mesh": f"{dict(mesh.shape)} of devices {[each.id for each in mesh.devices.flat]}",
        "arguments": hashlib.sha256("\n".join(laid_out).encode()).hexdigest(),
    }


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Within, JAX takes no program out of its cache on disk: such a one cannot be saved again."""
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
    compiled: jax.stages.Compiled, path: str | os.PathLike[str], identity: Identity
) -> None:
    """Writes a step `(state, batch) -> (state, metrics)`, whole or not at all.

    It must have been compiled in `compiled_anew`.

    Raises:
      ConfigError: if JAX or the disk refuses.
    """
    try:
        content, _, outputs = serialize_executable.serialize(compiled)
    except Exception as error:  # JAX's or XLA's
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--save_compiled: JAX cannot save this program: {reason}") from error
    _, metrics = jax.tree.unflatten(outputs, range(outputs.num_leaves))
    digest = hashlib.sha256(content).hexdigest()
    header = {"identity": identity, "metrics": list(metrics), "sha256": digest}
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _FORMAT + json.dumps(header).encode() + b"\n" + content)
    except OSError as error:
        raise ConfigError(f"--save_compiled={path}: {error}") from error


def check_compiled(path: str | os.PathLike[str], identity: Identity) -> None:
    """Raises ConfigError unless `path` was saved with `identity`; none of its code is run."""
    with _opened(path) as file:
        _read_header(file, path, identity)


def load_compiled(
    path: str | os.PathLike[str], identity: Identity, state: State, batch: Batch
) -> jax.stages.Compiled:
    """What `save_compiled` wrote, which may be code; see this module.

    Args:
      identity: of the run, its state and its batch, which may be abstract.

    Raises:
      ConfigError: if it was saved with another `identity`, which names what differs; if the file is
        no such file, or damaged; if JAX cannot load it. None of its code has run but in the last
        case.
    """
    with _opened(path) as file:
        header = _read_header(file, path, identity)
        content = file.read()
    if hashlib.sha256(content).hexdigest() != header["sha256"]:
        raise _refused(path, "is damaged")
    outputs = state, dict.fromkeys(header["metrics"], 0)
    try:
        return serialize_executable.deserialize_and_load(
            content, jax.tree.structure(((state, batch), {})), jax.tree.structure(outputs)
        )
    except Exception as error:  # JAX's, XLA's and pickle's
        reason = str(error).partition("\n")[0]
        raise _refused(path, f"cannot be loaded by JAX here: {reason}") from error


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"--compiled={path}: {error.strerror}") from error


def _read_header(
    file: BinaryIO, path: str | os.PathLike[str], identity: Identity
) -> dict[str, Any]:
    if file.readline(len(_FORMAT)) != _FORMAT:
        raise _refused(path, "is no compiled step, or of another version")
    try:
        header = parse_json(file.readline(_LONGEST_HEADER))
        saved = dict(header["identity"])
    except (ValueError, TypeError, KeyError) as error:
        raise _refused(path, "is damaged") from error
    if differing := _differences(saved, identity):
        raise _refused(path, f"was compiled for another run: {'; '.join(differing)}")
    return header


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
        if name == "config":
            found.append(f"the config differs in {', '.join(changed_paths(before, now))}")
        elif name in ("code", "arguments", "platform"):
            found.append(f"the {name} differ{'s' * (name != 'arguments')}")
        else:
            found.append(f"{name} {before}, here {now}")
    return found
