"""The token that ends an answer is a target, or the user is told that none is."""

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from chat_templates import TEMPLATES, TOKENS

from data_tools.prepare_chats.conversations import Conversation, ConversationField
from data_tools.prepare_chats.documents import Templated
from data_tools.prepare_chats.prepare import prepare_chats
from data_tools.prepare_chats.template import load_template, template_names
from data_tools.rows.files import Files
from data_tools.tokenizer import JsonTokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.data.chats.chat import ChatTemplate, write_chat_template

ENDS = ("</s>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>")
MARKERS = ("<|user|>", "<|observation|>", "<|assistant|>")
NOW = datetime(2024, 3, 5)
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [{"name": "look"}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three.\n"},
    {"role": "user", "content": "And you?"},
    {"role": "assistant", "content": "Four."},
]
# As GLM 4.5: what earlier answers had thought is left out.
THINKING = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
    "{% if m.role == 'assistant' %}<think>{{ m.thought if loop.last }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def tokenizer() -> JsonTokenizer:
    special = ("<s>", *ENDS, *MARKERS)
    return train_byte_level_bpe(["a"], 256 + len(special), special_tokens=special)


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, TOKENS)


def targets(tokenizer: JsonTokenizer, source: str, chat: list) -> list[tuple[str, list[str]]]:
    """Each document's text and its targets, special tokens by name."""
    documents = Templated(template(source), NOW, tokenizer.tokenizer_json)
    (found,) = documents.of_rows([[Conversation(chat)]])
    assert isinstance(found, list)
    known = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json)

    def text(ids: np.ndarray) -> str:
        return known.decode(ids.tolist(), skip_special_tokens=False)

    shown = []
    for document in found:
        edges = np.flatnonzero(np.diff(document.is_target, prepend=False, append=False))
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        assert all(tokenizer.decode([document.ids[end - 1]]) == "" for _, end in spans)  # special
        shown.append((text(document.ids), [text(document.ids[a:b]) for a, b in spans]))
    return shown


def test_the_marker_of_the_next_turn_ends_an_answer(tokenizer: JsonTokenizer) -> None:
    ((text, said),) = targets(tokenizer, TEMPLATES["glm"], CHAT)
    assert said == ["\nLet me look.<|observation|>", "\nThree.\n<|user|>", "\nFour.<|user|>"]
    assert text == template(TEMPLATES["glm"]).render(CHAT).text + "<|user|>"
    ((text, said),) = targets(tokenizer, TEMPLATES["glm"], CHAT[:2])
    assert said == ["\nLet me look.<|observation|>"] and text.endswith(said[0])
    ((text, said),) = targets(tokenizer, TEMPLATES["glm"], CHAT[:3])
    assert said == ["\nLet me look.<|observation|>"] and text.endswith("<|observation|>\n3")


def test_it_does_where_each_answer_is_a_document(tokenizer: JsonTokenizer) -> None:
    chat = [message | {"thought": "?"} for message in CHAT]
    found = targets(tokenizer, THINKING, chat)
    assert [said for _, said in found] == [
        ["\n<think>?</think>Let me look.<|observation|>"],
        ["\n<think>?</think>Three.\n<|user|>"],
        ["\n<think>?</think>Four.<|user|>"],
    ]
    for (text, _), turn in zip(found, (1, 3, 5), strict=True):
        assert text.startswith(template(THINKING).render(chat[: turn + 1]).text)


def test_answers_with_an_end_get_no_other(tokenizer: JsonTokenizer) -> None:
    for name in ("gemma", "llama3", "qwen3"):
        chat = [CHAT[0], CHAT[5]]
        ((text, said),) = targets(tokenizer, TEMPLATES[name], chat)
        assert not any(marker in text for marker in MARKERS)
        assert len(said) == 1 and said[0].endswith(tuple(ENDS))


@pytest.mark.parametrize("name", template_names())
def test_every_template_of_ours_ends_its_answers(
    name: str, tokenizer: JsonTokenizer, tmp_path: Path
) -> None:
    write_chat_template(tmp_path, ChatTemplate({"default": ""}, TOKENS))
    ours = load_template(str(tmp_path), name)
    assert ours is not None
    source = ours.sources["default"]
    ((_, said),) = targets(tokenizer, source, [CHAT[0], CHAT[5], CHAT[4], CHAT[5]])
    assert len(said) == 2
    without = train_byte_level_bpe(["a"], 257, special_tokens=["<s>"])
    assert not Templated(ours, NOW, without.tokenizer_json).ends_answers()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
         "{{ 'assistant:' if add_generation_prompt }}", True),
        (TEMPLATES["glm"], False),
        (TEMPLATES["chatml"], False),
    ],
)  # fmt: skip
def test_answers_without_an_end_are_told_of(
    tmp_path: Path,
    tokenizer: JsonTokenizer,
    source: str,
    told: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Hi", "response": "yes"}\n')
    rows = Files([str(file)], field=ConversationField())
    prepare_chats(rows, tokenizer, template(source), tmp_path / "out", "train")
    assert ("WARNING: answers end with no special token" in capsys.readouterr().err) is told
