"""Our chat templates write chats as their models were trained on them, and mark the answers.

tests/hf/test_chat_parity.py compares them with transformers."""

import json
from datetime import datetime
from pathlib import Path

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

# By template: a question with the prompt for its answer, then turns, then turns after a system
# message, if the template takes one. The assistant's answers are in ‹ ›.
EXPECTED = json.loads(Path(__file__).with_name("written_chats.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A tokenizer's folder that names `TOKENS`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_chat_template(folder, ChatTemplate({"default": ""}, TOKENS))
    return str(folder)


def ours(name, tokens):
    return load_template(tokens, name)


def marked(rendered):
    text = rendered.text
    for begin, end in reversed(rendered.assistant):
        text = f"{text[:begin]}‹{text[begin:end]}›{text[end:]}"
    return text


def test_every_template_is_tried_here():
    assert template_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_chats_are_written_as_the_model_knows_them(name, tokens):
    template, expected = ours(name, tokens), EXPECTED[name]
    asked = template.render(ASKED, add_generation_prompt=True, now=NOW)
    assert asked == Rendered(expected["prompt"], ())
    assert marked(template.render(TURNS, now=NOW)) == expected["turns"]
    if expected["after_system"] is None:
        with pytest.raises(ValueError, match="there is no system message"):
            template.render([SYSTEM, *TURNS])
    else:
        assert marked(template.render([SYSTEM, *TURNS], now=NOW)) == expected["after_system"]


@pytest.mark.parametrize("name", EXPECTED)
def test_content_that_a_template_would_drop_is_refused(name, tokens):
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
def test_texts_are_those_of_templates_in_the_style_of_the_models(name, stock, chat, tokens):
    expected = ChatTemplate({"default": TEMPLATES[stock]}, TOKENS)
    for prompted in (False, True):
        found = ours(name, tokens).render(chat, add_generation_prompt=prompted).text
        assert found == expected.render(chat, add_generation_prompt=prompted).text


def test_qwen3_learns_no_answer_without_the_thought_that_it_had(tokens):
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
    assert unasked == EXPECTED["chatml"]["prompt"] + "<think>\n\n</think>\n\n"


def test_a_template_is_a_name_or_a_file(tmp_path, tokens):
    (tmp_path / "mine.jinja").write_text("mine")
    mine = load_template(tokens, str(tmp_path / "mine.jinja"))
    assert mine.render(ASKED).text == "mine"
    with pytest.raises(FileNotFoundError, match="--template=qwen is neither a file nor one of cha"):
        load_template(tokens, "qwen")
    assert load_template(tokens, "") is None


def test_a_token_that_a_template_writes_must_be_known(tmp_path):
    write_tokenizer_folder(tmp_path, begins=False)
    assert load_template(str(tmp_path), "phi3") is not None
    with pytest.raises(
        ValueError, match=r"--template=llama3 writes a bos_token, and tokenizer_con"
    ):
        load_template(str(tmp_path), "llama3")
