"""Requests to OpenAI's API, checked field by field.

The API: https://platform.openai.com/docs/api-reference. `top_k`, `min_p` and `repetition_penalty`
are fields of other servers, such as vLLM.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmlib.generate import Sampling
from lmlib.serve.requests import MOST_TOP
from lmlib.storage.stored_json import parse_json
from runner.serving.errors import ApiError

_COMPLETION_TOKENS = 16  # OpenAI's default for completions
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
Rule = tuple[Callable[[Any], bool], str]  # a test of values, and its description for errors


def _whole(least: int, most: int) -> Rule:
    return lambda value: type(value) is int and least <= value <= most, f"in [{least}, {most}]"


def _text(longest: int) -> Rule:
    return (
        lambda value: isinstance(value, str) and 0 < len(value) <= longest,
        f"a string of 1 to {longest:,} characters",
    )


def _neutral(*values: Any) -> Rule:
    return lambda value: value in values, "left out, because it is not supported"


def _is_stop(value: Any) -> bool:
    is_stop, several = _text(1_000)[0], value if isinstance(value, list) else [value]
    return len(several) <= 32 and all(map(is_stop, several))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _is_ids(value):
        return True
    several = isinstance(value, list) and value
    return bool(several) and all(isinstance(each, str) or _is_ids(each) for each in value)


def _is_message(value: Any) -> bool:
    """A message has a role and a text; clients also send other fields, without a value."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content, others = value.get("content"), value.keys() - {"role", "content", "name"}
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return value["role"] in _ROLES and not any(map(value.get, others)) and all(
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        for part in parts
    )  # fmt: skip


_NUMBER: Rule = (lambda value: type(value) in (int, float) and abs(value) < 1e9, "a number")
_FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
_OF_BOTH: dict[str, Rule] = {
    "model": _text(200), "user": _text(200), "n": _whole(1, 128), "stream": _FLAG,
    "max_tokens": _whole(0, 2**31 - 1), "seed": _whole(-(2**63), 2**63 - 1),
    "stop": (_is_stop, "up to 32 strings of 1 to 1,000 characters"),
    "stream_options": (lambda value: isinstance(value, dict), "an object"),
    **dict.fromkeys(_SAMPLING, _NUMBER), "top_k": _whole(-1, 2**31 - 1),
    **dict.fromkeys(
        ("metadata", "safety_identifier", "prompt_cache_key"), (lambda value: True, "anything")
    ),
    "frequency_penalty": _neutral(0), "presence_penalty": _neutral(0), "logit_bias": _neutral({}),
    "best_of": _neutral(1), "suffix": _neutral(""), "tools": _neutral([]), "store": _neutral(False),
    "tool_choice": _neutral("none", "auto"), "response_format": _neutral({"type": "text"}),
    "modalities": _neutral(["text"]), "service_tier": _neutral("auto", "default"),
    "parallel_tool_calls": _neutral(True, False),
}  # fmt: skip
_OF_COMPLETIONS = _OF_BOTH | {
    "prompt": (_is_prompt, "a text, a list of ids, or a list of texts or of such lists"),
    "logprobs": _whole(0, MOST_TOP),
    "echo": _FLAG,
}
_OF_CHATS = _OF_BOTH | {
    "messages": (
        lambda value: isinstance(value, list) and bool(value) and all(map(_is_message, value)),
        f"messages with a text and a role of {', '.join(_ROLES)}",
    ),
    "max_completion_tokens": _whole(1, 2**31 - 1),
    "logprobs": _FLAG,
    "top_logprobs": _whole(0, MOST_TOP),
}


@dataclass(frozen=True)
class Asked:
    """A request for completions or for an answer in a chat."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]  # texts or ids to continue; empty for a chat
    messages: tuple[Mapping[str, str], ...]  # the chat; empty for completions
    max_tokens: int | None  # `None`: as many as there is room for
    sampling: Sampling
    samples: int  # answers per prompt
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    top: int  # likeliest tokens beside each token
    echo: bool
    stream: bool
    include_usage: bool  # a last event of the stream has the usage
    user: str

    @property
    def chat(self) -> bool:
        return bool(self.messages)


def asked_for(body: bytes, chat: bool) -> Asked:
    """Reads the body of a request; raises ApiError if a field is wrong or not supported."""
    given = _checked(body, _OF_CHATS if chat else _OF_COMPLETIONS)
    for name in ("model", "messages" if chat else "prompt"):
        if name not in given:
            raise ApiError(400, f"{name} is missing: you must provide it", name)
    prompt, stop, logprobs = given.get("prompt"), given.get("stop", []), given.get("logprobs")
    longest = given.get("max_completion_tokens", given.get("max_tokens"))
    if chat and longest == 0:
        raise ApiError(400, "max_tokens must be at least 1", "max_tokens")
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt or []
    return Asked(
        model=given["model"],
        prompts=tuple(each if isinstance(each, str) else tuple(each) for each in prompts),
        messages=tuple(map(_message, given.get("messages", ()))),
        max_tokens=_COMPLETION_TOKENS if longest is None and not chat else longest,
        sampling=_sampling({name: given[name] for name in _SAMPLING if name in given}),
        samples=given.get("n", 1),
        seed=given.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs is not None and logprobs is not False,
        top=given.get("top_logprobs", 0) if chat else logprobs or 0,
        echo=given.get("echo", False),
        stream=given.get("stream", False),
        include_usage=given.get("stream_options", {}).get("include_usage") is True,
        user=given.get("user", ""),
    )


def _checked(body: bytes, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Returns the fields of a JSON object; null counts as absent."""
    try:
        given = parse_json(body)
        json.dumps(given, ensure_ascii=False).encode()  # finds halves of surrogate pairs
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {error!s:.200}") from error
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in rules:
            shown = name[:80]
            raise ApiError(400, f"there is no parameter {shown!r}", shown, "unknown_parameter")
        is_allowed, text = rules[name]
        if not is_allowed(value):
            raise ApiError(400, f"{name} must be {text}, got {value!r:.80}", name)
    return given


def _sampling(given: dict[str, Any]) -> Sampling:
    if given.get("top_k") in (0, -1):  # all tokens, for other servers
        del given["top_k"]
    try:
        values: dict[str, Any] = {n: v if n == "top_k" else float(v) for n, v in given.items()}
        return Sampling(**values)
    except ValueError as error:
        raise ApiError(400, str(error), str(error).partition(" ")[0]) from error


def _message(given: Mapping[str, Any]) -> Mapping[str, str]:
    content = given["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {"role": _ROLES[given["role"]], "content": text}
