"""The routes of the server: OpenAI's API, and the chat page with its files."""

import asyncio
import functools
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lmlib.serve.service import Service
from runner.errors import did_you_mean
from runner.serving.answering import Answering
from runner.serving.asked import Asked, asked_for
from runner.serving.choice import Choice
from runner.serving.errors import ApiError, json_response
from runner.serving.guard import Guard, body_of
from runner.serving.served import Served

_PAGE = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
}  # fmt: skip
_SHORT = 16 << 10  # bytes of a body that is read without a thread
_THREADS = 2  # that read long bodies and prompts


def application(
    service: Service,
    models: Sequence[Served],
    hosts: Collection[str],
    any_address: bool = False,
    api_key: str | None = None,
) -> ASGIApp:
    """Returns the ASGI application; for `hosts`, `any_address` and `api_key` see `Guard`."""
    api = _Api(service, {model.name: model for model in models})
    files = {f"/{file.name}": file for file in _PAGE.iterdir() if file.suffix in _TYPES}
    files["/"] = files.pop("/index.html")
    app = Starlette(
        routes=[
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/completions", functools.partial(api.answer, False), methods=["POST"]),
            Route("/v1/chat/completions", functools.partial(api.answer, True), methods=["POST"]),
            Route("/health", api.health),
            *(Route(path, _sent(file)) for path, file in files.items()),
        ],
        exception_handlers=dict.fromkeys((HTTPException, ApiError, Exception), _told),
    )
    return Guard(app, hosts, any_address, None if api_key is None else api_key.encode())


def _sent(file: Path) -> Any:
    content = file.read_bytes()
    return lambda request: Response(content, media_type=_TYPES[file.suffix])


async def _told(request: Request, error: Exception) -> Response:
    """Answers after an error; uvicorn logs the traceback of an unexpected one."""
    if isinstance(error, HTTPException):  # no route matches
        text = f"{request.method} {request.url.path} is not served"[:200]
        error = ApiError(error.status_code, text, headers=error.headers)
    elif not isinstance(error, ApiError):
        kind = type(error).__name__
        error = ApiError(500, f"the server made a mistake ({kind}); its log shows where")
    return error.response()


class _Api:
    def __init__(self, service: Service, models: Mapping[str, Served]):
        self._service, self._models = service, models
        self._threads = asyncio.Semaphore(_THREADS)

    async def health(self, request: Request) -> Response:
        load = {name: each._asdict() for name, each in self._service.load().items()}
        return json_response({"status": "ok", "load": load})

    async def list_models(self, request: Request) -> Response:
        data = [model.described for model in self._models.values()]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        return json_response(self._model(request.path_params["name"]).described)

    def _model(self, name: str) -> Served:
        if name not in self._models:
            near = did_you_mean(name, self._models)
            text = f"there is no model {name!r:.80}. {near:.300}"
            raise ApiError(404, text, "model", "model_not_found")
        return self._models[name]

    async def answer(self, chat: bool, request: Request) -> ASGIApp:
        """Answers a request for completions, or for a chat."""
        body = await body_of(request)

        def read() -> tuple[Asked, Served, list[list[int]]]:
            asked = asked_for(body, chat)
            served = self._model(asked.model)
            return asked, served, served.prompts(asked)

        if len(body) <= _SHORT and not chat:
            asked, served, prompts = read()
        else:
            async with self._threads:
                asked, served, prompts = await asyncio.to_thread(read)
        if len(prompts) * asked.samples > (most := self._service.waiting):
            text = f"{len(prompts)} prompts with n={asked.samples} are more than {most}"
            raise ApiError(400, f"{text} answers, which is the most that can wait", "n")
        seed = secrets.randbits(32) if asked.seed is None else asked.seed % 2**32
        client = f"{request.client.host if request.client else ''} {asked.user}"
        choices = list[Choice]()
        for ids in (ids for ids in prompts for _ in range(asked.samples)):
            choices.append(Choice(served, asked, ids, len(choices), seed, client))
        return Answering(self._service, served.engine, asked, choices)
