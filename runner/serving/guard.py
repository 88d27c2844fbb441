"""Checks of every request: host, origin, API key, size and time; and headers of every answer."""

import asyncio
import contextlib
import hmac
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.serving.errors import ApiError

LARGEST_BODY = 4 << 20  # bytes
LARGEST_HEADERS = 32 << 10
_LARGEST_DROPPED = 64 << 20  # bytes of a body that are read so that the client reads the error
BODY_SECONDS = 30.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Guard:
    """An ASGI application that refuses what `app` should not see.

    A request that names another host is refused: a website whose name resolves to this machine
    (DNS rebinding) could read the answers. So is one that another website's page sent.
    """

    app: ASGIApp
    hosts: Collection[str]  # names of this server, without ports
    any_address: bool  # True to accept every IP address as the host; a website has a name
    api_key: bytes | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, answer)
            return
        with contextlib.suppress(ClientDisconnect):
            await self.app(scope, receive, answer)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if size + len(scope["query_string"]) + len(scope["raw_path"]) > LARGEST_HEADERS:
            raise ApiError(431, f"the headers have more than {LARGEST_HEADERS:,} bytes")
        given = headers.getlist("host")
        if len(given) != 1 or not self._is_ours(given[0]):
            raise ApiError(421, "this server does not answer under that name; see --public_name")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != given[0].lower():
            raise ApiError(403, "pages of other websites may not use this server")
        if self.api_key is not None and scope["path"].startswith("/v1"):
            kind, _, key = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(key.strip().encode("latin-1"), self.api_key)
            if kind.lower() != "bearer" or not right:
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _is_ours(self, host: str) -> bool:
        name = host_name(host)
        if name in self.hosts:
            return True
        try:
            return self.any_address and bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def host_name(host: str) -> str:
    """Returns the name in a Host header, without port and brackets, in small letters."""
    found = re.fullmatch(r"(?:\[([0-9a-f.:]+)\]|([^][:]+))(?::[0-9]{1,5})?", host.lower())
    return (found[1] or found[2]) if found else host


async def body_of(request: Request) -> bytes:
    """Returns a body of JSON; raises ApiError if it is too large, too slow, or said to be else.

    Browsers send other types of bodies to other websites without asking them.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON: send Content-Type: application/json")
    found, size, length = bytearray(), 0, request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > _LARGEST_DROPPED:
        size = _LARGEST_DROPPED
    try:
        async with asyncio.timeout(BODY_SECONDS):
            parts = request.stream()
            while size < _LARGEST_DROPPED and (part := await anext(parts, None)) is not None:
                size += len(part)
                if size <= LARGEST_BODY:
                    found += part
    except TimeoutError as error:
        text = f"the body did not arrive within {BODY_SECONDS:g} seconds"
        raise ApiError(408, text, headers={"Connection": "close"}) from error
    if size > LARGEST_BODY:
        text, closing = f"the body has more than {LARGEST_BODY:,} bytes", {"Connection": "close"}
        raise ApiError(413, text, code="body_too_large", headers=closing)
    return bytes(found)
