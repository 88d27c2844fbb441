"""Errors in the shape of OpenAI's API."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer with an error status, and a sentence that says what to change."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status, self.headers = status, headers
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        return json_response(self.content, self.status, self.headers)


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a response of JSON; texts with lone surrogates are escaped."""
    return Response(json_bytes(content), status, headers, "application/json")


def json_bytes(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
