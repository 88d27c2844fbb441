"""The fields of requests: errors name the parameter, and the others reach the engine."""

import json

import pytest

from lmlib.generate import Sampling

asked_module = pytest.importorskip("runner.serving.asked", reason="needs lmlib[serve]")
asked_for, ApiError = asked_module.asked_for, asked_module.ApiError
GOOD = {"model": "base", "prompt": "The"}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "?"}]}


@pytest.mark.parametrize(
    "change, param",
    [
        ({"model": None}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temprature": 1}, "temprature"),
        ({"messages": []}, "messages"),  # it is for chats
    ],
)
def test_errors_name_the_parameter(change, param):
    with pytest.raises(ApiError) as raised:
        asked_for(json.dumps(GOOD | change).encode(), chat=False)
    error = raised.value.content["error"]
    assert raised.value.status == 400 and error["param"] == param and param in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        "hello", {}, {"role": "tool", "content": "a"}, {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "content": "a", "tool_calls": [{}]},
    ],
)  # fmt: skip
def test_messages_have_a_role_and_a_text(message):
    with pytest.raises(ApiError, match="messages must be messages with a text and a role"):
        asked_for(json.dumps(CHAT | {"messages": [message]}).encode(), chat=True)


def test_fields_and_defaults():
    asked = asked_for(json.dumps(GOOD).encode(), chat=False)
    assert asked.prompts == ("The",) and asked.max_tokens == 16 and asked.samples == 1
    assert asked.sampling == Sampling() and not (asked.chat or asked.logprobs or asked.stream)
    settings = {"temperature": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2}
    others = {"stop": "a", "logprobs": 0, "seed": -1, "tools": [], "frequency_penalty": 0}
    asked = asked_for(json.dumps(GOOD | settings | others).encode(), chat=False)
    assert asked.sampling == Sampling(1.0, 5, 0.5, 0.1, 2.0)
    assert asked.stop == ("a",) and asked.logprobs and asked.top == 0 and asked.seed == -1
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [{"role": "developer", "content": parts}, {"role": "user", "content": "c", "name": "d"}]
    chat = CHAT | {"messages": said, "max_completion_tokens": 3, "max_tokens": 9, "top_k": -1}
    asked = asked_for(json.dumps(chat).encode(), chat=True)
    assert [*asked.messages] == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c"},
    ]
    assert asked.max_tokens == 3 and asked.sampling.top_k is None
    assert asked_for(json.dumps(CHAT).encode(), chat=True).max_tokens is None
