"""Chat templates give the texts that they give with transformers. Needs lmlib[parity]."""

import itertools
import json
from datetime import datetime

import pytest
from chat_templates import CHATS, TEMPLATES, TOKENS, TOOLS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data_tools.prepare_chats.conversations import (
    ConversationField,
    chat_of,
    read_conversations,
)
from data_tools.prepare_chats.documents import Templated
from data_tools.prepare_chats.template import load_template, template_names
from data_tools.rows.files import Files
from lmlib.data.chats.chat import ChatTemplate, read_chat_template
from lmlib.data.text import codec_of_file

transformers = pytest.importorskip("transformers", reason="needs lmlib[parity]")
pytestmark = pytest.mark.slow

MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<|user|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def stored(folder, template):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template} | TOKENS
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return theirs, read_chat_template(folder)


def encoded(folder, template, *conversation):
    """The documents of a conversation."""
    tokenizer = (folder / "tokenizer.json").read_text()
    documents = Templated(template, datetime.now(), tokenizer)
    return documents.of_row([chat_of(*conversation)])


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_have_the_text_and_ids_of_transformers(folder, name, chat, tools):
    theirs, template = stored(folder, TEMPLATES[name])
    codec = codec_of_file(folder / "tokenizer.json", bos_id=256)
    for prompted in (False, True):
        asked = {"add_generation_prompt": prompted, "tools": tools}
        text = theirs.apply_chat_template(CHATS[chat], tokenize=False, **asked)
        rendered = template.render(CHATS[chat], **asked)
        assert rendered.text == text
        encoded = theirs.apply_chat_template(
            CHATS[chat], return_dict=True, return_assistant_tokens_mask=True, **asked
        )
        assert codec.encode_marked(rendered.text) == list(encoded["input_ids"])
        said = list(itertools.compress(encoded["input_ids"], encoded["assistant_masks"]))
        marked = "".join(text[begin:end] for begin, end in rendered.assistant)
        assert said == codec.encode_marked(marked)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", ["chatml", "mistral"])
def test_targets_equal_the_mask_of_transformers(folder, name, tools):
    theirs, template = stored(folder, TEMPLATES[name])
    expected = theirs.apply_chat_template(
        CHATS["turns"], tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    (found,) = encoded(folder, template, CHATS["turns"], tools)
    assert found.ids.tolist() == list(expected["input_ids"])
    assert found.is_target.astype(int).tolist() == list(expected["assistant_masks"])
    assert found.is_target.any()


def test_nulls_in_json_lines_give_the_ids_of_transformers(folder, tmp_path):
    """Shown by `tojson`, as templates with tools do."""
    source = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    theirs, template = stored(folder, source)
    call = {"name": "find", "arguments": {"limit": None}}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    row = {"messages": said, "tools": [{"name": "find", "default": None}]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    source = Files([str(file)], field=ConversationField())
    (found,) = [row for block in source.blocks(0, 1) for row in block.rows(source.field)]
    (conversation,) = read_conversations(found.text)
    (document,) = encoded(folder, template, conversation.messages, conversation.tools)
    expected = theirs.apply_chat_template(said, tools=row["tools"], return_dict=True)
    assert document.ids.tolist() == list(expected["input_ids"])


@pytest.mark.parametrize("name", template_names())
def test_our_templates_give_the_ids_and_the_mask_of_transformers(folder, name):
    theirs, _ = stored(folder, "")
    template = load_template(str(folder), name)
    theirs.chat_template = template.sources["default"]
    chat = CHATS["turns"][name == "gemma2" :]  # without the system message
    (found,) = encoded(folder, template, chat)
    expected = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert template.render(chat).text == theirs.apply_chat_template(chat, tokenize=False)
    assert found.ids.tolist() == list(expected["input_ids"])
    assert found.is_target.astype(int).tolist() == list(expected["assistant_masks"])
    prompt = {"tokenize": False, "add_generation_prompt": True}
    asked = template.render(chat[:-1], add_generation_prompt=True)
    assert asked.text == theirs.apply_chat_template(chat[:-1], **prompt)


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_a_template_that_rewrites_history_gives_its_ids(folder, name):
    theirs, template = stored(folder, TEMPLATES[name])
    chat = CHATS["turns"]
    found = encoded(folder, template, chat)
    for document, until in zip(found, (3, 5), strict=True):
        asked = {"return_dict": True, "add_generation_prompt": True}
        prompt = list(theirs.apply_chat_template(chat[: until - 1], **asked)["input_ids"])
        whole = list(theirs.apply_chat_template(chat[:until], return_dict=True)["input_ids"])
        assert document.ids.tolist() == whole[: len(document.ids)]
        assert len(whole) - len(document.ids) <= 1  # a newline
        assert document.ids[~document.is_target].tolist() == prompt


def test_the_marker_of_the_next_turn_ends_an_answer(folder):
    theirs, template = stored(folder, TEMPLATES["glm"])
    chat = CHATS["turns"]
    (found,) = encoded(folder, template, chat)
    longer = [*chat, {"role": "user", "content": ""}]
    marker = theirs.convert_tokens_to_ids("<|user|>")
    (*whole, end, _) = theirs.apply_chat_template(longer, return_dict=True)["input_ids"]
    assert found.ids.tolist() == [*whole, end] and end == marker
    assert found.ids[found.is_target].tolist().count(marker) == 2
    assert whole == list(theirs.apply_chat_template(chat, return_dict=True)["input_ids"])


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_the_same_one_of_several_templates_is_chosen(folder, tools):
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "other"}]
    theirs, template = stored(folder, named)
    chat = CHATS["a question"]
    text = theirs.apply_chat_template(chat, tokenize=False, tools=tools)
    assert template.render(chat, tools=tools).text == text


def test_both_refuse_what_the_template_refuses(folder):
    theirs, _ = stored(folder, TEMPLATES["gemma"])
    chat = CHATS["turns"][2:]
    with pytest.raises(Exception, match="Roles must alternate"):
        theirs.apply_chat_template(chat, tokenize=False)
    with pytest.raises(ValueError, match="Roles must alternate"):
        ChatTemplate({"default": TEMPLATES["gemma"]}, TOKENS).render(chat)
