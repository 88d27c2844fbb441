"""Chats as texts. tests/hf/test_chat_parity.py compares them with transformers."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from chat_templates import CHATS, TEMPLATES, TOKENS, TOOLS
from refusals import refusals
from tokenizers import Tokenizer, models

from lmlib.data.chats.chat import (
    ChatTemplate,
    answer_ends,
    check_messages,
    put_chat_template,
    read_chat_template,
)
from lmlib.data.text import codec_of_json

QUESTION = CHATS["a question"]
EXPECTED = json.loads(Path(__file__).with_name("written_questions.json").read_text("utf-8"))


def template(source):
    return ChatTemplate({"default": source}, TOKENS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_question_is_written_as_its_template_says(name):
    now = datetime(2024, 3, 5)
    rendered = template(TEMPLATES[name]).render(QUESTION, add_generation_prompt=True, now=now)
    assert rendered.text == EXPECTED[name]
    assert rendered.assistant == ()


def test_marked_answers_are_found():
    for name, end in {"chatml": "<|im_end|>", "mistral": "</s>"}.items():
        text, spans = (rendered := template(TEMPLATES[name]).render(CHATS["turns"])).text, []
        assert rendered.assistant
        spans = [text[begin:end].strip(" ") for begin, end in rendered.assistant]
        assert spans == [f"Hello! 😀{end}", f"Fine.\n\n{end}"]


def test_a_text_may_have_lone_surrogates():
    halves = [{"role": "user", "content": half} for half in ("\ud83d", "\ude00")]
    joined = template("{{ messages[0].content ~ messages[1].content }}").render(halves).text
    assert [*joined] == ["\ud83d", "\ude00"]


def write(folder, template, **others):
    config = {"bos_token": {"content": "<s>", "special": True}, "add_bos_token": True} | others
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def test_the_template_of_a_folder_is_found(tmp_path):
    assert read_chat_template(tmp_path) is None
    write(tmp_path, None)
    assert read_chat_template(tmp_path) is None
    write(tmp_path, "{{ bos_token }}{{ eos_token }}one")
    assert read_chat_template(tmp_path).render(QUESTION).text == "<s>one"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "other"}]
    write(tmp_path, named)
    chosen = read_chat_template(tmp_path)
    assert [chosen.render(QUESTION, tools=tools).text for tools in (None, TOOLS)] == [
        "one",
        "other",
    ]
    (tmp_path / "chat_template.jinja").write_text("alone")
    assert read_chat_template(tmp_path).render(QUESTION).text == "alone"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_elsewhere_is_no_template_of_the_folder(tmp_path, name):
    """It is copied into data sets."""
    secret = tmp_path / "secret"
    secret.write_text('"secret"')
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match=rf"{name}: it is a link to {secret}, which is not in its"):
        read_chat_template(folder)
    if name == "chat_template.jinja":  # which the user may name himself
        (tmp_path / "named.jinja").symlink_to(secret)
        assert read_chat_template(folder, tmp_path / "named.jinja").sources["default"]


def test_a_folder_takes_another_template(tmp_path):
    put_chat_template(tmp_path, template("one"))
    assert read_chat_template(tmp_path).special_tokens == TOKENS
    write(tmp_path, "one", eos_token="<end>")
    (tmp_path / "chat_template.jinja").write_text("alone")
    for sources in ({"default": "one"}, {"default": "one", "tool_use": "other"}):
        put_chat_template(tmp_path, ChatTemplate(sources, TOKENS))
        found = read_chat_template(tmp_path)
        assert found.sources == sources
        assert found.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is True


def test_answer_ends_follow_the_template():
    letters = Tokenizer(models.BPE(vocab={"a": 0, "<": 1}, merges=[]))
    special = ["<s>", "</s>", "<|im_end|>", "<end_of_turn>", "<|im_start|>", "<|user|>"]
    letters.add_special_tokens([*special, "<|observation|>"])
    codec = codec_of_json(letters.to_str(), "it", None)
    ends = {"chatml": {3, 4}, "gemma": {3, 5}, "mistral": {3}, "llama3": {3}, "glm": {3, 7, 8}}
    for name, ids in ends.items():
        assert answer_ends(template(TEMPLATES[name]), codec) == ids
    assert (
        answer_ends(ChatTemplate({"default": "{{ messages[0].nothing.more }}"}, {}), codec) == set()
    )


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("\n{% if %}", "the chat template cannot be compiled: it is wrong in line 2"),
        (7, "neither a text nor a list of named ones: 7"),
        ([{"name": "other", "template": ""}], r"named 'default'; there are \['other'\]"),
        ("{{ " + "(" * 5000, "recursion"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested"),
    ],
)
def test_a_damaged_template_is_refused(tmp_path, stored, message):
    write(tmp_path, stored)
    with pytest.raises(ValueError, match=rf"tokenizer_config.json: .*{message}"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize(("source", "reason"), refusals(__file__, "templates"))
def test_a_template_that_fails_says_why(source, reason):
    with pytest.raises(ValueError, match=f"cannot take these messages: .*{reason}"):
        template(source).render(QUESTION)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ([{"role": "user"}, {"content": "?"}], 'message 2 is no object with a "role"'),
        ([{"role": "user", "content": object()}], "a value that is not JSON"),
    ],
)
def test_invalid_messages_are_refused(messages, reason):
    with pytest.raises(ValueError, match=reason):
        template("").render(messages)
    with pytest.raises(ValueError, match="must be a list"):
        check_messages("hello")
