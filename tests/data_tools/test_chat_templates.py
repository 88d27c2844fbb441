"""Our chat templates write what the models they are named after were trained on, and mark what the
assistant says. tests/hf/test_chat_parity.py compares them with transformers."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATS, TEMPLATES, TOKENS, TOOLS
from small_tokenizer import write_tokenizer_folder

from data_tools.prepare_chats.template import load_template, template_names
from lmlib.data.chats.chat import ChatTemplate, Rendered, write_chat_template

SYSTEM = {"role": "system", "content": "Be kind."}
ASKED = [{"role": "user", "content": "Hi"}]
TURNS = [
    *ASKED,
    {"role": "assistant", "content": "Hello! 😀"},
    {"role": "user", "content": "And you?"},
    {"role": "assistant", "content": "Fine."},
]
NOW = datetime(2024, 3, 5)

# Of each template: a question with the prompt for its answer, then turns, then turns after what the
# system says, where it may say anything. What the assistant says is in ‹ ›.
_CHATML = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n‹Hello! 😀<|im_end|>›\n"
    "<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n‹Fine.<|im_end|>›\n",
)
_QWEN_SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"
_KIND = _QWEN_SYSTEM.format("Be kind.")
_QWEN_2 = _QWEN_SYSTEM.format("You are a helpful assistant.")
_QWEN_2_5 = _QWEN_SYSTEM.format(
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
)
_QWEN_3 = _CHATML[1].replace("‹Fine.", "‹<think>\n\n</think>\n\nFine.")
_HEADERS = (
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "‹Hello! 😀<|eot_id|>›<|start_header_id|>user<|end_header_id|>\n\nAnd you?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n‹Fine.<|eot_id|>›",
)
_DATED = (
    "<s><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 05 Mar 2024\n\n{}<|eot_id|>"
)
_GEMMA = (
    "<s><start_of_turn>user\n{}Hi<end_of_turn>\n<start_of_turn>model\n",
    "‹Hello! 😀<end_of_turn>›\n<start_of_turn>user\nAnd you?<end_of_turn>\n"
    "<start_of_turn>model\n‹Fine.<end_of_turn>›\n",
)
_LLAMA_2 = "<s>[INST] {}Hi [/INST]‹ Hello! 😀 </s>›<s>[INST] And you? [/INST]‹ Fine. </s>›"
_MISTRAL = "<s>[INST] {}Hi[/INST]‹ Hello! 😀</s>›[INST] And you?[/INST]‹ Fine.</s>›"
_OLMO = (
    "<|user|>\nHi\n<|assistant|>\n‹Hello! 😀</s>›\n<|user|>\nAnd you?\n<|assistant|>\n‹Fine.</s>›"
)
_PHI_3 = (
    "<|user|>\nHi<|end|>\n<|assistant|>\n‹Hello! 😀<|end|>›\n"
    "<|user|>\nAnd you?<|end|>\n<|assistant|>\n‹Fine.<|end|>›\n</s>"
)
_PHI_4 = (
    "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>‹Hello! 😀<|im_end|>›"
    "<|im_start|>user<|im_sep|>And you?<|im_end|><|im_start|>assistant<|im_sep|>‹Fine.<|im_end|>›"
)
EXPECTED = {
    "chatml": (*_CHATML, _KIND + _CHATML[1]),
    "gemma2": (_GEMMA[0].format(""), "".join(_GEMMA).format(""), None),
    "gemma3": (
        _GEMMA[0].format(""),
        "".join(_GEMMA).format(""),
        "".join(_GEMMA).format("Be kind.\n\n"),
    ),
    "llama2": (
        "<s>[INST] Hi [/INST]",
        _LLAMA_2.format(""),
        _LLAMA_2.format("<<SYS>>\nBe kind.\n<</SYS>>\n\n"),
    ),
    "llama3": (
        "<s>" + _HEADERS[0],
        "<s>" + "".join(_HEADERS),
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>" + "".join(_HEADERS),
    ),
    "llama3_1": (
        _DATED.format("") + _HEADERS[0],
        _DATED.format("") + "".join(_HEADERS),
        _DATED.format("Be kind.") + "".join(_HEADERS),
    ),
    "mistral": ("<s>[INST] Hi[/INST]", _MISTRAL.format(""), _MISTRAL.format("Be kind.\n\n")),
    "olmo2": (
        "<s><|user|>\nHi\n<|assistant|>\n",
        "<s>" + _OLMO,
        "<s><|system|>\nBe kind.\n" + _OLMO,
    ),
    "phi3": (
        "<|user|>\nHi<|end|>\n<|assistant|>\n",
        _PHI_3,
        "<|system|>\nBe kind.<|end|>\n" + _PHI_3,
    ),
    "phi4": (
        "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>",
        _PHI_4,
        "<|im_start|>system<|im_sep|>Be kind.<|im_end|>" + _PHI_4,
    ),
    "qwen2": (_QWEN_2 + _CHATML[0], _QWEN_2 + _CHATML[1], _KIND + _CHATML[1]),
    "qwen2_5": (_QWEN_2_5 + _CHATML[0], _QWEN_2_5 + _CHATML[1], _KIND + _CHATML[1]),
    "qwen3": (_CHATML[0], _QWEN_3, _KIND + _QWEN_3),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer's folder that names `TOKENS`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_chat_template(folder, ChatTemplate({"default": ""}, TOKENS))
    return str(folder)


def ours(name: str, tokens: str) -> ChatTemplate:
    template = load_template(tokens, name)
    assert template is not None
    return template


def marked(rendered: Rendered) -> str:
    text = rendered.text
    for begin, end in reversed(rendered.assistant):
        text = f"{text[:begin]}‹{text[begin:end]}›{text[end:]}"
    return text


def test_every_template_is_tried_here() -> None:
    assert template_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_chats_are_written_as_the_model_knows_them(name: str, tokens: str) -> None:
    template, (prompt, turns, after_system) = ours(name, tokens), EXPECTED[name]
    assert template.render(ASKED, add_generation_prompt=True, now=NOW) == Rendered(prompt, ())
    assert marked(template.render(TURNS, now=NOW)) == turns
    if after_system is None:
        with pytest.raises(ValueError, match="there is no system message"):
            template.render([SYSTEM, *TURNS])
    else:
        assert marked(template.render([SYSTEM, *TURNS], now=NOW)) == after_system


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_template_would_leave_out_is_refused(name: str, tokens: str) -> None:
    template = ours(name, tokens)
    called = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    for chat, tools in ((ASKED, TOOLS), (called, None)):
        with pytest.raises(ValueError, match=f"the template {name} has no tools"):
            template.render(chat, tools=tools)
    if name != "chatml":  # which has any role
        with pytest.raises(ValueError, match=r"system, user and assistant|must take turns"):
            template.render([*ASKED, {"role": "tool", "content": "3"}])


THOUGHT = "<think>\nWho?\n</think>\n\n"
THOUGHTFUL = [ASKED[0], {"role": "assistant", "content": f"{THOUGHT}Hello!"}, *TURNS[2:]]
LAST_THOUGHT = [*TURNS[:3], {"role": "assistant", "content": f"{THOUGHT}Fine."}]


@pytest.mark.parametrize(
    ("name", "stock"),
    [("chatml", "chatml"), ("gemma3", "gemma"), ("phi3", "phi3"), ("qwen3", "qwen3")],
)
@pytest.mark.parametrize("chat", [*CHATS.values(), TURNS, THOUGHTFUL, LAST_THOUGHT])
def test_texts_are_those_of_templates_in_the_style_of_the_models(
    name: str, stock: str, chat: list[dict[str, Any]], tokens: str
) -> None:
    expected = ChatTemplate({"default": TEMPLATES[stock]}, TOKENS)
    for prompted in (False, True):
        found = ours(name, tokens).render(chat, add_generation_prompt=prompted).text
        assert found == expected.render(chat, add_generation_prompt=prompted).text


def test_qwen3_learns_no_answer_without_the_thought_that_it_had(tokens: str) -> None:
    template = ours("qwen3", tokens)
    text = marked(template.render(THOUGHTFUL))
    assert "assistant\nHello!<|im_end|>\n" in text
    assert text.endswith("assistant\n‹<think>\n\n</think>\n\nFine.<|im_end|>›\n")
    text = marked(template.render(LAST_THOUGHT))
    assert "assistant\n‹Hello! 😀<|im_end|>›\n" in text
    assert text.endswith(f"assistant\n‹{THOUGHT}Fine.<|im_end|>›\n")
    apart = [*LAST_THOUGHT[:3], LAST_THOUGHT[3] | {"content": "Fine.", "reasoning_content": "Who?"}]
    assert marked(template.render(apart)) == text
    unasked = template.render(ASKED, add_generation_prompt=True, enable_thinking=False).text
    assert unasked == _CHATML[0] + "<think>\n\n</think>\n\n"


def test_a_template_is_a_name_or_a_file(tmp_path: Path, tokens: str) -> None:
    (tmp_path / "mine.jinja").write_text("mine")
    mine = load_template(tokens, str(tmp_path / "mine.jinja"))
    assert mine is not None and mine.render(ASKED).text == "mine"
    with pytest.raises(FileNotFoundError, match="--template=qwen is neither a file nor one of cha"):
        load_template(tokens, "qwen")
    assert load_template(tokens, "") is None


def test_a_token_that_a_template_writes_must_be_known(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path, begins=False)
    assert load_template(str(tmp_path), "phi3") is not None
    with pytest.raises(
        ValueError, match=r"--template=llama3 writes a bos_token, and tokenizer_con"
    ):
        load_template(str(tmp_path), "llama3")
