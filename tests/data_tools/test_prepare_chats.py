"""Conversations become tokens, the assistant's become targets. tests/hf/test_chat_parity.py
compares both with transformers."""

import itertools
import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from chat_templates import CHATS, TEMPLATES, TOKENS, TOOLS
from folder_contents import files_of
from forked_processes import run_forked
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusals
from small_tokenizer import write_tokenizer_folder

from data_tools.inspect.verification import verify_split
from data_tools.prepare_chats.conversations import ConversationField, chat_of
from data_tools.prepare_chats.documents import Templated
from data_tools.prepare_chats.prepare import prepare_chats, shortened
from data_tools.prepare_chats.template import load_template, template_names
from data_tools.rows.files import Files
from data_tools.tokenizer import ByteTokenizer, load_tokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.data.chats.chat import ChatTemplate, write_chat_template
from lmlib.data.flat_tokens import FlatTokens

REPOSITORY = Path(__file__).parents[2]
TURNS = CHATS["turns"]
MARKED = TEMPLATES["chatml"]
UNMARKED = re.sub(r"{%-? (end)?generation %}", "", MARKED)
ASKED = {"role": "user", "content": "Hi"}


def answer(text):
    return {"role": "assistant", "content": text}


def template(source):
    return ChatTemplate({"default": source}, TOKENS)


def rows(path, *found, **columns):
    path.mkdir(exist_ok=True)
    (path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return Files([str(path / "rows.jsonl")], field=ConversationField(**columns))


def prepare(path, *found, source=MARKED, **settings):
    names = "pairs", "labels", "response"
    columns = {name: settings.pop(name) for name in names if name in settings}
    chosen = None if source is None else template(source)
    taken = rows(path, *found, **columns)
    return prepare_chats(taken, ByteTokenizer(), chosen, path / "out", "train", **settings)


def documents(path):
    """Each document's text, and its targets where they are not cut; 256 and 257 are ^ and $."""
    source = FlatTokens(str(path / "out"), "train", 1, 4_000, seed=None, packed=False)
    shown = {256: b"^", 257: b"$"}

    def text(ids):
        return b"".join(shown.get(id) or bytes([id]) for id in ids).decode()

    found = []
    for step in range(source.batches or source.steps_per_epoch):
        batch = source.batch(step)
        for segment in range(1, int(batch.segment_ids.max()) + 1):
            here = np.flatnonzero(batch.segment_ids[0] == segment)
            ids, mask = batch.tokens[0, here].tolist(), batch.loss_mask[0, here].tolist()
            last = [int(batch.targets[0, here[-1]])] if mask[-1] else []
            pairs = zip(mask, batch.targets[0, here].tolist(), strict=True)
            runs = itertools.groupby(pairs, key=lambda pair: pair[0])
            targets = [text([id for _, id in run]) for is_target, run in runs if is_target]
            found.append((text(ids + last), targets))
    return found


@pytest.mark.parametrize("source", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_answers_are_targets(tmp_path, source):
    made = prepare(tmp_path, {"messages": TURNS}, source=source)
    ((text, targets),) = documents(tmp_path)
    whole = template(source).render(TURNS).text
    assert whole.startswith(text)
    assert targets == ["Hello! 😀<|im_end|>", "Fine.\n\n<|im_end|>"]
    count = sum(len(target.encode()) for target in targets)
    assert (made.content, made.documents, made.targets) == ("conversations", 1, count)
    assert (made.tokens, made.bytes) == (len(whole.encode()),) * 2
    assert verify_split(tmp_path / "out/train") == []
    kept = load_template(str(tmp_path / "out"))
    assert kept.render(TURNS).text == whole


WHO = "<think>\nWho?\n</think>\n\n"
AGAIN = {"role": "user", "content": "And you?"}
THOUGHTFUL = [*TURNS[:2], answer(f"{WHO}Hello!"), AGAIN, answer("Fine.")]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3", (f"{WHO}Hello!<|im_end|>", "<think>\n\n</think>\n\nFine.<|im_end|>")),
        ("phi3", (f"{WHO}Hello!<|end|>\n</s>", "Fine.<|end|>\n</s>")),
    ],
)
def test_each_answer_is_a_document_if_the_template_rewrites_history(tmp_path, name, targets):
    """Each follows the text that the model is shown when it answers, as the template writes it."""
    source = TEMPLATES[name]
    made = prepare(tmp_path, {"messages": THOUGHTFUL}, source=source, max_length=1_000)
    assert made.documents == 2
    found = dict((target, text) for text, (target,) in documents(tmp_path))
    assert found.keys() == set(targets)
    for target, before in zip(targets, (THOUGHTFUL[:2], THOUGHTFUL[:4]), strict=True):
        shown = template(source).render(before, add_generation_prompt=True).text
        assert (shown + target).startswith(found[target])
        assert found[target].startswith(shown)


def test_such_a_template_gives_the_last_answers_of_pairs(tmp_path):
    settings = {"source": TEMPLATES["qwen3"], "pairs": True}
    both = {"chosen": THOUGHTFUL, "rejected": [*THOUGHTFUL[:4], answer("Bad.")]}
    assert prepare(tmp_path / "one", both, **settings).documents == 2
    ends = [targets[-1].split()[-1] for _, targets in documents(tmp_path / "one")]
    assert ends == ["Fine.<|im_end|>", "Bad.<|im_end|>"]
    both["rejected"] = [*TURNS[:2], answer("Go away."), *THOUGHTFUL[3:]]
    with pytest.raises(ValueError, match="differ in more than the last"):
        prepare(tmp_path / "other", both, **settings)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, answer("yes")], "prompt": "of no use", "prompt_id": 3},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": [ASKED, answer("yes")]},
        {"prompt": "Hi", "response": "yes"},
        {"prompt": [ASKED], "response": [answer("yes")]},
    ],
)
def test_rows_of_every_form(tmp_path, row):
    prepare(tmp_path, row)
    ((text, targets),) = documents(tmp_path)
    assert text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nyes")
    assert targets == ["yes<|im_end|>"]


def test_system_and_tools_come_with_their_row(tmp_path):
    row = {"system": "Be brief.", "tools": json.dumps(TOOLS), "messages": [ASKED, answer("yes")]}
    prepare(tmp_path, row)
    ((text, _),) = documents(tmp_path)
    assert "añadir" in text and "<|im_start|>system\nBe brief.<|im_end|>" in text


def test_nulls_of_parquet_are_left_out(tmp_path):
    rows = [[ASKED, answer("a")], [ASKED, {**answer("b"), "tool_calls": [{"id": "1"}]}]]
    pq.write_table(pa.table({"messages": rows}), tmp_path / "rows.parquet")
    taken = Files([str(tmp_path / "rows.parquet")], field=ConversationField())
    source = "{% for m in messages %}{{ m.role[0] }}{{ 'x' if 'tool_calls' in m }}{{ m.content }}"
    source += "{% endfor %}{{ 'a' if add_generation_prompt }}"
    prepare_chats(taken, ByteTokenizer(), template(source), tmp_path / "out", "train")
    assert documents(tmp_path) == [("uHiaa", ["a"]), ("uHiaxb", ["xb"])]


CALLED = {
    "prompt": None,
    "tools": [{"name": "find", "parameters": {"limit": {"default": None}}}],
    "messages": [
        ASKED,
        answer("") | {"tool_calls": [{"name": "find", "arguments": {"limit": None, "of": [None]}}]},
        {"role": "tool", "content": None, "name": None},
        answer("yes"),
    ],
}
SHOWS_ALL = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m | tojson }}{% endgeneration %}{% else %}{{ m | tojson }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("tools", [CALLED["tools"], [], None])
def test_nulls_of_json_lines_reach_the_template(tmp_path, tools):
    prepare(tmp_path, CALLED | {"tools": tools}, source=SHOWS_ALL)
    ((text, _),) = documents(tmp_path)
    written = [tools, *CALLED["messages"]]
    assert text == "".join(json.dumps(each) for each in written)


def test_without_a_template_prompt_and_response_are_framed(tmp_path):
    made = prepare(
        tmp_path, {"prompt": "1 + 1 = ", "completion": "2"}, source=None, response="completion"
    )
    assert (made.bos_id, made.eos_id) == (256, 257)
    assert documents(tmp_path) == [("^1 + 1 = 2$", ["2$"])]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "good", "rejected": "bad"},
        {"prompt": [ASKED], "chosen": [answer("good")], "rejected": [answer("bad")]},
        {"prompt": "Hi", "chosen": [ASKED, answer("good")], "rejected": [ASKED, answer("bad")]},
    ],
)
def test_pairs_of_every_form(tmp_path, row):
    made = prepare(tmp_path, row, row, pairs=True)
    assert (made.content, made.documents) == ("pairs", 4)
    chosen, rejected = documents(tmp_path)[:2]
    assert "Hi<|im_end|>\n<|im_start|>assistant\ngood" in chosen[0]
    assert (chosen[1], rejected[1]) == (["good<|im_end|>"], ["bad<|im_end|>"])


def test_turns_that_both_answers_share_are_no_targets(tmp_path):
    begun = [ASKED, answer("Hello"), ASKED]
    row = {"chosen": [*begun, answer("good")], "rejected": [*begun, answer("bad")]}
    prepare(tmp_path, row, pairs=True)
    found = [targets for _, targets in documents(tmp_path)]
    assert found == [["good<|im_end|>"], ["bad<|im_end|>"]]


@pytest.mark.parametrize(
    ("overflow", "max_length", "kept", "dropped", "cut"),
    [
        ("drop", 40, [], (1, 45), (0, 0)),
        ("cut_prompt", 22, [("p" * 18 + "yes$", ["yes$"])], (0, 0), (1, 23)),
        ("cut_prompt", 4, [], (1, 45), (0, 0)),  # no token is left before the response
        ("cut_turns", 40, [], (1, 45), (0, 0)),
    ],
)
def test_long_conversations_are_counted(tmp_path, overflow, max_length, kept, dropped, cut):
    short, long = {"prompt": "", "response": "b"}, {"prompt": "p" * 40, "response": "yes"}
    made = prepare(tmp_path, short, long, source=None, overflow=overflow, max_length=max_length)
    assert documents(tmp_path) == [("^b$", ["b$"]), *kept]
    assert (made.dropped_documents, made.dropped_tokens) == dropped
    assert (made.cut_documents, made.cut_tokens) == cut


def test_the_last_turns_are_cut(tmp_path):
    long = {"messages": [ASKED, answer("one"), ASKED, answer("t" * 50)]}
    made = prepare(tmp_path, long, overflow="cut_turns", max_length=100)
    ((text, targets),) = documents(tmp_path)
    assert text.endswith("assistant\none<|im_end|>") and targets == ["one<|im_end|>"]
    assert made.cut_documents == 1


@given(
    mask=st.lists(st.booleans(), min_size=1).filter(any).map(lambda mask: [False, *mask]),
    overflow=st.sampled_from(["cut_prompt", "cut_turns"]),
    data=st.data(),
)
def test_a_response_is_kept_whole_or_not_at_all(mask, overflow, data):
    longest = data.draw(st.integers(1, len(mask) - 1))
    kept = shortened(np.arange(len(mask)), np.array(mask), longest, overflow)
    if kept is None:
        first = mask.index(True)
        end = next((n for n in range(first, len(mask)) if not mask[n]), len(mask))
        assert longest < (end if overflow == "cut_turns" else len(mask) - first + 1)
    else:
        assert len(mask[kept]) <= longest and any(mask[kept]) and not mask[kept][0]
        assert kept.stop == len(mask) or not mask[kept.stop]
        assert overflow == "cut_turns" or sum(mask[kept]) == sum(mask)


def test_pairs_are_dropped_together(tmp_path):
    short = {"prompt": "a", "chosen": "b", "rejected": "c"}
    long = {"prompt": "a", "chosen": "b", "rejected": "c" * 90}
    made = prepare(tmp_path, long, short, pairs=True, source=None, max_length=30)
    assert (made.documents, made.dropped_documents) == (2, 2)
    with pytest.raises(ValueError, match="pairs are never cut"):
        prepare(tmp_path / "cut", short, pairs=True, max_length=30, overflow="cut_turns")


def test_labelled_answers_are_followed_by_the_answer_before(tmp_path):
    """The first row's by the last one. Turns before the last are no targets."""
    found = (
        {"prompt": "a", "completion": "good", "label": True},
        {"prompt": [ASKED, answer("what?"), ASKED], "completion": "bad", "label": False},
        {"messages": [ASKED, answer("fine")], "label": True},
        {"prompt": "a", "completion": "none", "label": None},
    )
    made = prepare(tmp_path, *found, labels=True, on_bad_row="skip")
    assert (made.content, made.documents, made.skipped_rows) == ("labelled", 6, 1)
    assert verify_split(tmp_path / "out/train") == []
    shown = documents(tmp_path)
    answers = [targets for _, targets in shown]
    assert answers == [[f"{a}<|im_end|>"] for a in ("good", "fine", "bad", "good", "fine", "bad")]
    for (text, _), (other, _) in zip(shown[::2], shown[1::2], strict=True):
        begin = "<|im_start|>assistant\n"
        assert text.rpartition(begin)[0] == other.rpartition(begin)[0]
    source = FlatTokens(str(tmp_path / "out"), "train", 1, 4_000, seed=None)
    batch = source.batch(0)
    assert source.labelled and not source.pairs
    rows, places = np.nonzero(batch.labels)
    labels = {int(batch.segment_ids[row, at]) for row, at in zip(rows, places, strict=True)}
    assert labels == {1, 5} and not batch.positions[rows, places].any()
    text = prepare(tmp_path / "text", *found[:1], labels=True, source=None)
    assert text.documents == 2  # the only row's other answer is its own
    with pytest.raises(ValueError, match="'label' is None, neither true nor false"):
        prepare(tmp_path / "bad", found[3], labels=True)


LONG_CHATS = "{% if messages | length > 4 %}!{% endif %}" + UNMARKED


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        *refusals(__file__, "conversations"),
        ({"messages": TURNS}, {"source": None}, "not one prompt and one response, .* --template"),
        ({"messages": TURNS[2:]}, {"source": TEMPLATES["gemma"]}, "Roles must alternate"),
        ({"messages": TURNS}, {"source": LONG_CHATS}, "does not write message 5 .*--template"),
    ],
)
def test_rows_that_cannot_be_used_say_why(tmp_path, row, settings, message):
    with pytest.raises(ValueError, match=f"line 1, .*{message}.*--on_bad_row=skip"):
        prepare(tmp_path, row, **settings)
    good = {"prompt": "a", "response": "b", "chosen": "c", "rejected": "d"}
    made = prepare(tmp_path, row, good, on_bad_row="skip", **settings)
    assert made.skipped_rows == 1


def test_a_row_for_which_the_template_takes_too_much_is_a_bad_row(tmp_path):
    source = "{% if messages[0].content == 'much' %}{{ 'a'.center(999999999) }}{% endif %}" + MARKED
    good, much = ({"prompt": text, "response": "b"} for text in ("a", "much"))
    with pytest.raises(ValueError, match=r"line 2, .*than 512 MB of memory.*--on_bad_row=skip"):
        prepare(tmp_path, good, much, good, source=source)
    made = prepare(tmp_path, good, much, good, source=source, on_bad_row="skip")
    assert (made.documents, made.skipped_rows) == (2, 1)


def test_killed_and_started_again_the_bytes_are_the_same(tmp_path):
    # More than a block, so that a second run has something to go on from.
    chats = [{"prompt": "x" * (n % 97), "response": "y" * (n * 31 % 999)} for n in range(2_500)]
    settings = {"source": None, "file_length": 64 * 1024, "max_length": 900}

    class Killed(Exception):
        pass

    def killed(counts, fraction):
        raise Killed

    prepare(tmp_path / "whole", *chats, **settings)
    source = rows(tmp_path / "whole", *chats)
    target = (source, ByteTokenizer(), None, tmp_path / "again", "train")
    more = {name: settings[name] for name in ("file_length", "max_length")}
    with pytest.raises(Killed):
        prepare_chats(*target, progress=killed, **more)
    assert not list((tmp_path / "again").rglob("metadata.json"))
    prepare_chats(*target, **more)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "whole/out")


def test_another_template_is_another_data_set(tmp_path):
    prepare(tmp_path, {"messages": TURNS})
    with pytest.raises(FileExistsError, match="holds another chat template"):
        prepare(tmp_path, {"messages": TURNS}, source=UNMARKED)
    with pytest.raises(FileExistsError, match="is finished, with source max_length None, not 9"):
        prepare(tmp_path, {"messages": TURNS}, max_length=9)


ENDS = ("</s>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>")
MARKERS = ("<|user|>", "<|observation|>", "<|assistant|>")
NOW = datetime(2024, 3, 5)
CALLING = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [{"name": "look"}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three.\n"},
    {"role": "user", "content": "And you?"},
    {"role": "assistant", "content": "Four."},
]
# Like GLM 4.5's, it leaves out the thoughts of earlier answers.
THINKING = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
    "{% if m.role == 'assistant' %}<think>{{ m.thought if loop.last }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def tokenizer():
    special = ("<s>", *ENDS, *MARKERS)
    return train_byte_level_bpe(["a"], 256 + len(special), special_tokens=special)


def targets(tokenizer, source, chat):
    """Each document's text and its targets, special tokens by name."""
    documents = Templated(template(source), NOW, tokenizer.tokenizer_json)
    found = documents.of_row([chat_of(chat)])
    known = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json)

    def text(ids):
        return known.decode(ids.tolist(), skip_special_tokens=False)

    shown = []
    for document in found:
        edges = np.flatnonzero(np.diff(document.is_target, prepend=False, append=False))
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        assert all(tokenizer.decode([document.ids[end - 1]]) == "" for _, end in spans)  # special
        shown.append((text(document.ids), [text(document.ids[a:b]) for a, b in spans]))
    return shown


def test_the_marker_of_the_next_turn_ends_an_answer(tokenizer):
    ((text, said),) = targets(tokenizer, TEMPLATES["glm"], CALLING)
    assert said == ["\nLet me look.<|observation|>", "\nThree.\n<|user|>", "\nFour.<|user|>"]
    assert text == template(TEMPLATES["glm"]).render(CALLING).text + "<|user|>"
    ((text, said),) = targets(tokenizer, TEMPLATES["glm"], CALLING[:2])
    assert said == ["\nLet me look.<|observation|>"] and text.endswith(said[0])
    ((text, said),) = targets(tokenizer, TEMPLATES["glm"], CALLING[:3])
    assert said == ["\nLet me look.<|observation|>"] and text.endswith("<|observation|>\n3")


def test_it_does_where_each_answer_is_a_document(tokenizer):
    chat = [message | {"thought": "?"} for message in CALLING]
    found = targets(tokenizer, THINKING, chat)
    assert [said for _, said in found] == [
        ["\n<think>?</think>Let me look.<|observation|>"],
        ["\n<think>?</think>Three.\n<|user|>"],
        ["\n<think>?</think>Four.<|user|>"],
    ]
    for (text, _), turn in zip(found, (1, 3, 5), strict=True):
        assert text.startswith(template(THINKING).render(chat[: turn + 1]).text)


@pytest.mark.parametrize("name", template_names())
def test_bundled_templates_end_their_answers(name, tokenizer, tmp_path):
    write_chat_template(tmp_path, ChatTemplate({"default": ""}, TOKENS))
    ours = load_template(str(tmp_path), name)
    source = ours.sources["default"]
    ((_, said),) = targets(tokenizer, source, [CALLING[0], CALLING[5], CALLING[4], CALLING[5]])
    assert len(said) == 2 and all(text.endswith(ENDS) for text in said)
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
def test_answers_without_an_end_are_reported(tmp_path, tokenizer, source, told, capsys):
    taken = rows(tmp_path, {"prompt": "Hi", "response": "yes"})
    prepare_chats(taken, tokenizer, template(source), tmp_path / "out", "train")
    assert ("WARNING: answers end with no special token" in capsys.readouterr().err) is told


def test_the_command_joins_prompts_and_responses_without_a_template(tmp_path):
    rows(tmp_path, {"messages": [ASKED, answer("The bridges.")]})
    command = ["-m", "data_tools.prepare_chats", f"--dataset={tmp_path / 'rows.jsonl'}"]
    command += ["--tokenizer=bytes", "--workers=0", f"--out={tmp_path / 'out'}", "--template="]
    joined = run_forked(*command)
    assert joined.returncode == 0, joined.stderr


@pytest.mark.slow
def test_the_command(tmp_path):
    write_tokenizer_folder(tmp_path / "tokenizer", begins=True)
    rows(tmp_path, *[{"messages": [ASKED, answer(f"The {n} bridges.")]} for n in range(50)], "x")
    command = [sys.executable, "-m", "data_tools.prepare_chats", "--workers=2"]
    command += [f"--dataset={tmp_path / 'rows.jsonl'}", f"--tokenizer={tmp_path / 'tokenizer'}"]
    command += [f"--out={tmp_path / 'out'}", "--validation_fraction=0.2", "--on_bad_row=skip"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    warning, skipped = done.stderr.splitlines()
    assert warning.startswith("WARNING: answers end with no special token")
    assert skipped.startswith("skipped: ") and "line 51" in skipped
    assert "targets" in done.stdout and "dropped" in done.stdout
    source, held_out = (
        FlatTokens(str(tmp_path / "out"), split, 1, 512) for split in ("train", "validation")
    )
    assert source.documents + held_out.documents == 50
    decode = load_tokenizer(str(tmp_path / "out")).decode
    batch = source.batch(0)
    texts = decode(batch.targets[batch.loss_mask].tolist())
    assert texts.count(" bridges.") == texts.count(" The ") > 5 and "Hi" not in texts
