"""OpenAI's API: the official client, and answers that equal those of the model in this process."""

import asyncio
import itertools

import numpy as np
import pytest
from running_server import asked, is_idle, running_server, until
from small_tokenizer import TEXTS

from runner import load

openai = pytest.importorskip("openai", reason="needs lmlib[test]")
pytest.importorskip("uvicorn", reason="needs lmlib[serve]")
pytestmark = pytest.mark.landing
CHAT = [{"role": "user", "content": "Which of these is a fruit?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def base(models):
    return load(str(models["base"]))


def test_the_client_lists_the_models(client):
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == ["chatty", "base"]
    assert [listed[name].chat for name in listed] == [True, False]
    assert client.models.retrieve("base").max_model_len == 256
    with pytest.raises(openai.NotFoundError, match="Did you mean base"):
        client.models.retrieve("bas")


def test_texts_equal_those_of_the_model_alone(client, base):
    found = client.completions.create(model="base", prompt=TEXTS[0][:20], **GREEDY)
    expected = base.generate(TEXTS[0][:20], 12, temperature=0.0)
    assert found.choices[0].text == expected
    assert found.usage.prompt_tokens == len(base.ids(TEXTS[0][:20]))
    ids = base.ids(TEXTS[1][:9])
    for prompt in (TEXTS[1][:9], [TEXTS[1][:9]], ids, [ids, ids]):
        answers = client.completions.create(model="base", prompt=prompt, **GREEDY).choices
        assert {answer.text for answer in answers} == {base.generate(ids, 12, temperature=0.0)}
        assert len(answers) == (2 if prompt == [ids, ids] else 1)


def test_log_probabilities_equal_those_of_the_model_alone(client, base):
    text = TEXTS[4]
    found = client.completions.create(
        model="base", prompt=text, echo=True, max_tokens=0, logprobs=3
    ).choices[0]
    expected = base.token_losses(text)
    logprobs = found.logprobs
    assert found.text == text and logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(
        logprobs.token_logprobs[1:], [-token.nats for token in expected], rtol=1e-4, atol=1e-5
    )
    logits_SV = base.logits(text)
    for position, top in enumerate(logprobs.top_logprobs[1:]):
        nats_V = logits_SV[position] - np.logaddexp.reduce(logits_SV[position])
        np.testing.assert_allclose(
            sorted(top.values())[-3:], np.sort(nats_V)[-3:], rtol=1e-4, atol=1e-5
        )
    pieces = [text[a:b] for a, b in itertools.pairwise([*logprobs.text_offset, len(text)])]
    assert pieces[1:] == [token.text for token in expected]


def test_a_stream_has_the_parts_of_the_whole_answer(client):
    settings = {"model": "chatty", "messages": CHAT, "seed": 3, "max_tokens": 20, "n": 2}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    texts, tokens, ends, usage = {0: "", 1: ""}, {0: [], 1: []}, {}, None
    stream = client.chat.completions.create(
        **settings, logprobs=True, top_logprobs=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            ends[choice.index] = choice.finish_reason
    assert texts == {each.index: each.message.content for each in whole.choices}
    assert texts[0] != texts[1]
    assert ends == {each.index: each.finish_reason for each in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        assert tokens[choice.index] == choice.logprobs.content
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 2
            assert token.logprob <= token.top_logprobs[0].logprob
    again = client.chat.completions.create(**settings)
    assert [each.message.content for each in again.choices] == list(texts.values())
    other = client.chat.completions.create(**settings | {"seed": 4})
    assert other.choices[0].message.content != texts[0]


def test_stop_strings_cut_text_and_tokens(client, base):
    text = base.generate(TEXTS[0][:20], 30, temperature=0.0)
    stop = text[9:12]
    settings = {"model": "base", "prompt": TEXTS[0][:20], "temperature": 0, "max_tokens": 30}
    found = client.completions.create(**settings, stop=[stop, "never"], logprobs=0).choices[0]
    assert found.text == text[: text.index(stop)] and found.finish_reason == "stop"
    assert all(offset < len(found.text) for offset in found.logprobs.text_offset)
    streamed = client.completions.create(**settings, stop=stop, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == found.text


def test_usage_counts_reused_tokens_of_a_prompt(client, base):
    ids = (base.ids(" ".join(TEXTS[:5])) * 2)[:200]
    settings = {"model": "base", "prompt": ids, "max_tokens": 3, "seed": 1}
    first, second = (client.completions.create(**settings) for _ in range(2))
    assert first.usage.prompt_tokens == second.usage.prompt_tokens == 200
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 128  # a whole chunk
    assert first.choices[0].text == second.choices[0].text


def test_many_asynchronous_clients_get_what_each_gets_alone(served, client):
    prompts = [text[: 10 + i] for i, text in enumerate(TEXTS * 3)]
    settings = {"model": "base", "max_tokens": 10, "temperature": 1.0}

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as many:
            asking = (
                many.completions.create(prompt=prompt, seed=i, **settings)
                for i, prompt in enumerate(prompts)
            )
            return [answer.choices[0].text for answer in await asyncio.gather(*asking)]

    alone = [
        client.completions.create(prompt=prompt, seed=i, **settings).choices[0].text
        for i, prompt in enumerate(prompts)
    ]
    assert asyncio.run(together()) == alone


def test_errors_have_a_status_and_a_parameter(served, client):
    body = {"model": "base", "prompt": "The", "max_tokens": 1}
    for change, status, param in (
        ({"model": "basis"}, 404, "model"),
        ({"prompt": [1, 100_000]}, 400, "prompt"),
        ({"prompt": "a" * 5000}, 400, "prompt"),
        ({"max_tokens": 10_000}, 400, "prompt"),
        ({"temperature": -1}, 400, "temperature"),
    ):
        found, _, content = asked(served.port, "/v1/completions", body | change)
        assert (found, content["error"]["param"]) == (status, param), content
        kind = openai.NotFoundError if status == 404 else openai.BadRequestError
        with pytest.raises(kind):
            client.completions.create(**body | change)


def test_a_model_without_a_template_does_not_chat(served):
    body = {"model": "base", "messages": CHAT}
    status, _, content = asked(served.port, "/v1/chat/completions", body)
    assert status == 400 and "has no chat template" in content["error"]["message"]
    body = {"model": "chatty", "messages": [{"role": "system", "content": "?"}, *CHAT]}
    status, _, content = asked(served.port, "/v1/chat/completions", body)
    assert status == 400 and "the chat template cannot take these" in content["error"]["message"]


def test_a_disconnected_client_frees_its_slot(served, client):
    settings = {"model": "base", "prompt": "The", "max_tokens": 250, "stop": "no such text"}
    streams = [client.completions.create(**settings, stream=True, n=4) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
        stream.close()
    until(lambda: is_idle(served.service))


def test_a_full_queue_is_429_and_a_key_is_needed(models):
    settings = {"model": "base", "prompt": "The", "max_tokens": 250}
    with (
        running_server({"base": models["base"]}, 2, "secret", length=256, slots=2) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as client,
    ):
        streams = []
        for _ in range(4):  # two run, and two wait
            streams.append(client.completions.create(**settings, stream=True))
            until(lambda: served.service.load()["base"].waiting == max(0, len(streams) - 2))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**settings, n=2)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        until(lambda: is_idle(served.service))
        assert client.completions.create(**settings).choices[0].text
        for key in ("", "secreu", "Secret", "s"):
            status, headers, _ = asked(
                served.port, "/v1/models", headers={"Authorization": f"Bearer {key}"}
            )
            assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
        assert asked(served.port, "/health")[0] == asked(served.port, "/")[0] == 200
