"""Runs the choices of a request on the `Service`; frees their slots when the client leaves."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.types import Receive, Scope, Send

from lmlib.serve.requests import Full, Update
from lmlib.serve.service import Service
from runner.serving.asked import Asked
from runner.serving.choice import Choice, stopping
from runner.serving.errors import ApiError, json_bytes, json_response

_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Answering:
    """An ASGI application that answers one request, in the shape of its endpoint.

    Submits all choices, or none: raises ApiError if the queue is full or one is wrong.
    """

    def __init__(self, service: Service, model: str, asked: Asked, choices: Sequence[Choice]):
        self._asked, self._choices = asked, choices
        kind = "chatcmpl" if asked.chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid4().hex}", "created": int(time.time())}
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._loop, self._cancels = asyncio.get_running_loop(), list[Callable[[], None]]()
        try:
            for choice in choices:
                receive = partial(self._receive, choice.index)
                self._cancels.append(service.submit(model, choice.request, receive))
        except (Full, ValueError, RuntimeError) as error:
            self._cancel()
            if isinstance(error, Full):
                seconds = {"Retry-After": str(max(1, round(error.retry_after)))}
                raise ApiError(429, str(error), code="queue_full", headers=seconds) from error
            raise (
                ApiError(400, str(error)) if isinstance(error, ValueError) else stopping()
            ) from error

    def _receive(self, number: int, update: Update) -> None:
        """Called on the thread of the devices."""
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._updates.put_nowait, (number, update))

    def _cancel(self) -> None:
        for cancel in self._cancels:
            cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = self._stream(send) if self._asked.stream else self._whole(scope, receive, send)
        tasks = asyncio.ensure_future(answer), asyncio.ensure_future(leave())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            self._cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _changed(self) -> AsyncIterator[Choice]:
        """Yields a choice whenever it has changed, until all have ended."""
        running = {choice.index for choice in self._choices}
        while running:
            number, update = await self._updates.get()
            if number not in running:
                continue
            choice = self._choices[number]
            choice.push(update)
            if choice.answer.ended is not None:
                running.remove(number)
                self._cancels[number]()  # a stop string ends no request by itself
            yield choice

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for _ in self._changed():
            pass
        content = self._content([self._part(each) for each in self._choices], usage=self._usage())
        await json_response(content)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async def write(text: bytes, more: bool = True) -> None:
            line = b"data: " + text + b"\n\n"
            await send({"type": "http.response.body", "body": line, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        try:
            async for event in self._events():
                await write(json_bytes(event))
        except ApiError as error:
            await write(json_bytes(error.content))
        await write(b"[DONE]", more=False)

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        for each in self._choices if self._asked.chat else ():
            begin = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield self._content([{"index": each.index, **begin, "finish_reason": None}])
        async for choice in self._changed():
            if part := self._part(choice):
                yield self._content([part])
        if self._asked.include_usage:
            yield self._content([], usage=self._usage())

    def _content(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        kind, asked = "text_completion", self._asked
        if asked.chat:
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        return {**self._head, "object": kind, "model": asked.model, "choices": choices, **more}

    def _part(self, choice: Choice) -> dict[str, Any] | None:
        """The text and tokens of a choice that were not sent yet, or `None` in a stream."""
        (text, tokens), stream = choice.new(), self._asked.stream
        if stream and not (text or tokens or choice.finish_reason):
            return None
        body: dict[str, Any] = {"text": text}
        if self._asked.chat and stream:
            body = {"delta": {"content": text} if text else {}}
        elif self._asked.chat:
            body = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = choice.logprobs(tokens) if tokens or not stream else None
        end = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
        return {"index": choice.index, **body, **end}

    def _usage(self) -> dict[str, Any]:
        """The numbers of tokens; a prompt counts once for all of its samples."""
        first = self._choices[:: self._asked.samples]
        prompt = sum(len(choice.request.prompt) for choice in first)
        answer = sum(len(choice.answer.tokens) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(choice.reused for choice in first)},
        }
