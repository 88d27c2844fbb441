"""What tests of buckets share: an emulator for each scheme behind a proxy, found as users find one.

A process has one of each for as long as it lasts: TensorStore reads once where Google's server is.
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
    """The proxy, with a server behind it, that this process has for a scheme."""
    started = contextlib.ExitStack()
    atexit.register(started.close)
    port = started.enter_context(emulator(scheme))
    return started.enter_context(FaultyProxy(port, keeps_conditions=scheme == "gs"))


@contextlib.contextmanager
def folder_in_bucket(scheme: str, patch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultyProxy]]:
    """The URL of an empty folder, and the proxy through which this process finds it; no fault
    outlasts the block."""
    proxy = proxy_of(scheme)
    for name, value in environment(scheme, proxy.port).items():
        patch.setenv(name, value)
    with proxy.faultless_afterwards():
        yield f"{scheme}://{BUCKET}/{secrets.token_hex(4)}", proxy
