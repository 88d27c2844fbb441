"""One emulator for each scheme behind a proxy, for the whole process.

TensorStore reads the address of Google's server only once.
"""

import atexit
import contextlib
import functools
import secrets
from collections.abc import Iterator

import pytest

from buckets.proxy import FaultyProxy
from buckets.servers import BUCKET, emulator, environment

SCHEMES = ("s3", "gs")


@functools.cache
def proxy_of(scheme: str) -> FaultyProxy:
    """Returns this process's proxy for a scheme, with a server behind it."""
    started = contextlib.ExitStack()
    atexit.register(started.close)
    port = started.enter_context(emulator(scheme))
    return started.enter_context(FaultyProxy(port, keeps_conditions=scheme == "gs"))


@contextlib.contextmanager
def folder_in_bucket(scheme: str, patch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultyProxy]]:
    """Yields the URL of an empty folder and its proxy; all faults end with the block."""
    proxy = proxy_of(scheme)
    for name, value in environment(scheme, proxy.port).items():
        patch.setenv(name, value)
    with proxy.faultless_afterwards():
        yield f"{scheme}://{BUCKET}/{secrets.token_hex(4)}", proxy
