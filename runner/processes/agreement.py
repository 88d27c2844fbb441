"""What all processes of a run agree on: the user's mistakes, settings, what the disk shows."""

import atexit
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lmlib.data.resumable import gather_states
from runner.command_line.errors import AGREED, ConfigError


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """A block whose ConfigError on one process is raised on all; every process must enter it."""
    mistake: ConfigError | None = None
    try:
        yield
    except ConfigError as error:
        mistake = error
    if jax.process_count() == 1:
        if mistake is not None:
            raise mistake
        return
    messages = [
        answer["mistake"] for answer in gather_states({"mistake": mistake and str(mistake)})
    ]
    if messages[0] is not None and len(set(messages)) == 1:
        raise ConfigError(messages[0]) from mistake
    found = [f"process {n}: {message}" for n, message in enumerate(messages) if message]
    if found:
        raise ConfigError("\n".join(found)) from mistake


def require_same(what: str, text: str) -> None:
    """Raises ConfigError on all processes if `text` is not the same on all; every one must call."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = [answer["digest"] for answer in gather_states({"digest": digest})]
    others = [str(n) for n, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ConfigError(
            f"{what} of process {', '.join(others)} is another than that of process 0: start all "
            "processes with the same code, experiment, fiddlers and overrides"
        )


def from_first(value: Any) -> Any:
    """The JSON value that process 0 calls this with, on all processes; every one must call."""
    if jax.process_count() == 1:
        return value
    content = np.zeros(0, np.uint8)
    if jax.process_index() == 0:
        content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    padded = np.zeros(length, np.uint8)
    padded[: content.size] = content
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


@contextlib.contextmanager
def ends_other_processes() -> Iterator[None]:
    """A block that ends the other processes soon after it fails on this one.

    They wait for this process in a collective operation, and JAX would have it wait for them at
    exit, for five minutes. It exits without that wait instead, with status 1, after the usual
    traceback. What is `AGREED` passes: all processes find the same.
    """
    try:
        yield
    except AGREED:
        raise
    except BaseException:
        if jax.process_count() > 1:
            atexit.register(_exit_at_once)  # before what JAX registered: the last comes first
        raise


def _exit_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
