"""Answers: their ends, on a terminal, in files that survive a kill, and the command."""

import fcntl
import io
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from chat_templates import TEMPLATES, TOKENS
from forked_processes import run_forked, succeeded
from run_on_bytes import write_run_on_bytes
from small_tokenizer import BEGIN, END, TEXTS, write_tokenizer_folder
from tokenizers import Tokenizer

import lmlib
from lmlib.data.chats.chat import ChatTemplate
from lmlib.data.text import codec_of_bytes, codec_of_file
from lmlib.generate import Generator, New, Sampling
from lmlib.storage.stored_json import LARGEST
from runner.errors import ConfigError
from runner.inference.answer import STOP, Answer, DecodingOptions
from runner.inference.answer_file import SETTINGS, AnswerFile
from runner.inference.prompts import Reader, digest_of, read_lines
from runner.inference.terminal import Terminal

BOS, EOS = 256, 257
CODEC = codec_of_bytes(bos_id=BOS)
READER = Reader("the model", 258, CODEC, ChatTemplate({"default": TEMPLATES["chatml"]}, TOKENS))
MANNER = DecodingOptions(CODEC, (EOS,), (), 6, Sampling(), samples=1, seed=0)


@pytest.fixture(scope="module")
def generator():
    """A generator with an untrained model, which writes random bytes."""
    model = lmlib.llama(vocab=258, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(0))
    return Generator(model, rows=4, length=128, chunk=128)


def answered(tokens: list[int], pieces: int, stop: tuple[str, ...] = (), most: int = 99) -> Answer:
    answer = Answer(CODEC, [BOS], most, (EOS,), stop)
    for first in range(0, len(tokens), pieces):
        new = tokens[first : first + pieces]
        answer.push(New(new, [-float(each) for each in new]))
    return answer


@pytest.mark.parametrize("pieces", [1, 2, 100])
def test_an_answer_ends_at_the_same_place_for_any_chunks(pieces):
    tokens = [*"é😀 end. More".encode(), EOS, 65, 66]
    whole = answered(tokens, pieces)
    assert (whole.text, whole.ended, whole.tokens) == ("é😀 end. More", "end", tokens[:-2])
    assert whole.logprobs == [-float(token) for token in tokens[:-2]]
    stopped = answered(tokens, pieces, stop=("d. ", "zz"))
    assert (stopped.text, stopped.ended) == ("é😀 en", "stop")
    assert bytes(stopped.tokens).decode() == "é😀 end. "
    long = answered(tokens, pieces, most=4, stop=("😀 end",))
    assert (long.text, long.ended, long.tokens) == ("é�", "length", tokens[:4])
    held = answered(tokens[:11], pieces, stop=(" end. M!",), most=11)
    assert (held.text, held.ended) == ("é😀 end.", "length")  # the start of a possible stop string


STOPS = ["<|end|>", "e<|end|>", "日<|end|>", "\n<|end|><|begin|>", "river ", "<|begin|>a"]


@pytest.mark.parametrize("stop", STOPS)
def test_an_answer_ends_with_the_first_token_whose_text_has_the_stop_string(stop, tmp_path):
    """Names of special tokens count, as in transformers: by a loop that decodes every beginning."""
    write_tokenizer_folder(tmp_path, begins=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    codec = codec_of_file(tmp_path / "tokenizer.json", None)
    end, begin = map(tokenizer.token_to_id, (END, BEGIN))
    some = [
        [end],
        [begin],
        [end, begin],
        *map(codec.encode, [*TEXTS, "a", "e", "\n", "日", "river "]),
    ]
    draw = random.Random(0)
    ended = 0
    for _ in range(12):
        ids = [id for part in draw.choices(some, k=60) for id in part]
        answer = Answer(codec, codec.encode(TEXTS[0]), len(ids) + 1, (), (stop,))
        answer.push(New(ids, [0.0] * len(ids)))
        so_far = (tokenizer.decode(ids[:n], skip_special_tokens=False) for n in range(len(ids) + 1))
        found = next((n for n, text in enumerate(so_far) if stop in text), None)
        assert answer.tokens == ids[:found]
        assert (answer.ended == STOP) == (found is not None)
        if found is not None:
            ended += 1
            before = tokenizer.decode(answer.tokens, skip_special_tokens=False).partition(stop)[0]
            assert answer.text == before.replace(END, "").replace(BEGIN, "")
    assert ended  # or the test sees nothing


def terminal(generator, reader=READER, out=None, **manner):
    return Terminal(
        generator, reader, replace(MANNER, **manner), out or io.StringIO(), io.StringIO()
    )


def test_several_answers_are_shown_in_order(generator):
    shown = terminal(generator, samples=3)
    answers = shown.show(CODEC.encode("é"), 0, echo="é")
    texts = [f"--- {n} of 3\né{answer.text}\n" for n, answer in enumerate(answers, 1)]
    assert shown.out.getvalue() == "".join(texts)
    assert shown.told.getvalue().startswith("[18 tokens, ")


class Interrupting(io.StringIO):
    """Ctrl-C is pressed when it is written to for the third time."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def flush(self):
        self.times += 1
        if self.times == 3:
            raise KeyboardInterrupt


def test_a_chat_remembers_its_turns_and_survives_ctrl_c(generator):
    typed = iter(["Hello?", "", KeyboardInterrupt, "And?", "x" * 128, "Again", EOFError])

    def read() -> str:
        if not isinstance(text := next(typed), str):
            raise text
        return text

    asked = []

    class Seen(Reader):
        def of_chat(self, messages):
            asked.append([message["content"] for message in messages])
            return super().of_chat(messages)

    shown = terminal(generator, Seen(**vars(READER)), Interrupting())
    shown.converse(read, chat=True)
    said = asked[1][1]  # the text before the interrupt
    assert said and shown.out.getvalue().lstrip().startswith(f"{said}\n")
    assert asked[0] == ["Hello?"]
    assert asked[1][::2] == ["Hello?", "And?"]
    assert "leave no room for an answer" in shown.told.getvalue()
    assert "the chat begins anew" in shown.told.getvalue()
    assert asked[-1] == ["Again"]


GIVEN = [{"prompt": "é"}, {"tokens": [1, 2]}, {"prompt": "b", "text": "\ud800", "n": 1}]


def write_prompts(folder, lines=GIVEN):
    file = folder / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    return file


def answer(generator, folder, out, samples=2, settings=()):
    lines = read_lines(write_prompts(folder), READER)
    file = AnswerFile(out, {"seed": 0, "stop": ("a",), **dict(settings)})
    file.answer(lines, generator, replace(MANNER, samples=samples), together=2)


@pytest.mark.slow
def test_a_killed_answer_file_resumes_to_the_same_content(generator, tmp_path, capsys):
    whole = tmp_path / "whole.jsonl"
    answer(generator, tmp_path, whole)
    content = whole.read_bytes()
    said = [json.loads(line) for line in content.splitlines()]
    assert [(each["line"], each["sample"]) for each in said] == [
        (line, sample) for line in (1, 3, 5) for sample in (0, 1)
    ]
    assert [each["given"] for each in said[::2]] == GIVEN
    for each in said:
        assert len(each["tokens"]) == len(each["logprobs"]) <= 6
        assert each["text"] == CODEC.decode(each["tokens"])
        assert each["ended"] == ("end" if each["tokens"][-1] == EOS else "length")
    assert len({tuple(each["tokens"]) for each in said}) == 6
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    out = tmp_path / "out.jsonl"
    (tmp_path / f"out.jsonl{SETTINGS}").write_bytes(
        (tmp_path / f"whole.jsonl{SETTINGS}").read_bytes()
    )
    for end in (None, 0, 5, ends[1], ends[3], ends[3] + 9, ends[4], len(content)):
        out.unlink(missing_ok=True)
        if end is not None:
            out.write_bytes(content[:end])
        answer(generator, tmp_path, out)
        assert out.read_bytes() == content, end
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"seed was 0 and is 1; give these again, or another"):
        answer(generator, tmp_path, out, settings={"seed": 1})
    assert out.read_bytes() == content


def test_other_files_are_not_overwritten_by_answers(generator, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(ConfigError, match="has no settings file: give another --out"):
        answer(generator, tmp_path, out)
    out.unlink()
    AnswerFile(out, {"seed": 0, "stop": ["a"]}).answer([], generator, MANNER, together=2)
    out.write_text("mine\n")
    with pytest.raises(ConfigError, match="something else in line 1"):
        answer(generator, tmp_path, out)
    assert out.read_text() == "mine\n"
    with open(out, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another command is writing"):
            answer(generator, tmp_path, out)
    (tmp_path / f"out.jsonl{SETTINGS}").write_text("{}")
    with pytest.raises(ConfigError, match="is damaged"):
        answer(generator, tmp_path, out)


BROKEN = Path(__file__).with_name("broken_prompts.txt").read_text().splitlines()


@pytest.mark.parametrize("case", BROKEN)
def test_broken_lines_are_named(tmp_path, case):
    line, reason = case.split(" | ")
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n\n{line}\n' + "{\n" * 5)
    with pytest.raises(
        ConfigError, match=rf"^{file}: line 2: .*{reason}.*; line 4: .*; and 4 more$"
    ):
        read_lines(file, READER)


@pytest.mark.parametrize("byte", [b"a", b" "])
def test_a_line_that_is_too_long_is_not_read_to_its_end(tmp_path, byte):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + byte * (LARGEST + 1))
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)  # a hole: zeros that take no room
    with pytest.raises(ConfigError, match=r"line 2: it has more than 16,777,216 bytes$"):
        read_lines(file, READER)


def test_without_a_tokenizer_ids_are_read_and_shown(generator, tmp_path):
    reader = Reader("the model", 258, None, None)
    for ask in (reader.of_text, reader.of_chat):
        with pytest.raises(
            ConfigError, match=r"the model (has no known tokenizer|has no chat template)"
        ):
            ask("hello")
    shown = terminal(generator, reader, codec=reader.shown)
    (said,) = shown.show([1, 2], 0, echo="1 2 ")
    numbers = [token for token in said.tokens if token != EOS]
    assert shown.out.getvalue() == f"1 2 {''.join(f'{each} ' for each in numbers)}\n"
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [1, 2]}')
    AnswerFile(tmp_path / "out", {}).answer(read_lines(file, reader), generator, shown.manner, 1)
    assert json.loads((tmp_path / "out").read_text())["text"] is None


def test_prompts_must_be_text_in_a_regular_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    for content, told in ((b'{"prompt": "\xff"}\n', "line 1: 'utf-8'"), (b"\n \n", "has no lines")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=told):
            read_lines(file, READER)
    os.mkfifo(tmp_path / "fifo")
    for file in (Path("/dev/zero"), tmp_path / "fifo", tmp_path):
        with pytest.raises(ConfigError, match=f"^{file} is not a regular file: write the prompts"):
            digest_of(file)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return write_run_on_bytes(tmp_path_factory.mktemp("generate"))[0]


@pytest.mark.slow
def test_prompts_are_continued(workdir):
    arguments = (f"--from={workdir}", "--prompt=hé", "--prompt=b", "--max_tokens=5", "--samples=2")
    ended = succeeded("-m", "runner.generate", *arguments)
    assert ended.stdout.startswith("--- 1 of 2\nhé")
    assert [ended.stdout.count(each) for each in ("--- 2 of 2\nhé", "--- 2 of 2\nb")] == [1, 1]
    assert ended.stderr.count("; the first after ") == 2
    assert run_forked("-m", "runner.generate", *arguments).stdout == ended.stdout
    ids = run_forked("-m", "runner.generate", arguments[0], "--tokens=256,104", "--max_tokens=5")
    assert ids.stdout.startswith("h")


@pytest.mark.slow
def test_piped_text_is_continued(workdir):
    def answer(*flags: str, piped: str) -> str:
        command = ("-m", "runner.generate", f"--from={workdir}", "--max_tokens=5", *flags)
        ended = succeeded(*command, piped=piped)
        return ended.stdout

    assert answer(piped="hé\nb\n") == answer("--prompt=hé\nb", piped="unread")


@pytest.mark.slow
def test_a_draft_changes_no_answer_and_its_right_guesses_are_counted(workdir, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hé"}\n{"prompt": "b"}\n')

    def answers(name: str, *flags: str) -> tuple[str, str, list[dict]]:
        command = ("-m", "runner.generate", f"--from={workdir}", "--max_tokens=9", *flags)
        shown = succeeded(*command, "--prompt=hé", "--samples=2")
        file = tmp_path / name
        files = f"--prompts={tmp_path / 'prompts.jsonl'}", f"--out={file}"
        told = succeeded(*command, *files).stderr
        lines = [*map(json.loads, file.read_text().splitlines())]
        return shown.stdout, shown.stderr + told, [line["tokens"] for line in lines]

    text, _, tokens = answers("without")
    drafted_text, told, drafted_tokens = answers("with", f"--draft={workdir}", "--draft_tokens=2")
    assert (drafted_text, drafted_tokens) == (text, tokens)
    assert told.count(", 100% of ") == 2 and told.count(" guesses right") == 2
