"""The texts that a finished run writes."""

import json

import fiddle as fdl
import pytest
from small_tokenizer import END, write_tokenizer_folder

from data_tools.hf_stream.source import HFStream
from data_tools.prepare_chats.conversations import ConversationField
from data_tools.prepare_chats.prepare import prepare_chats
from data_tools.prepare_chats.template import load_template
from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.files import Files
from data_tools.tokenizer import ByteTokenizer, load_tokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.data.chats.chat import BeyondLimits, ChatTemplate, put_chat_template
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.synthetic import Synthetic
from lmlib.data.text import TextCodec, codec_of_bytes
from runner import Options, fit
from runner.config import configs
from runner.errors import ConfigError
from runner.training.samples import asked

TEXTS = ["one two three", "four five", "six"] * 40


class WithoutBeginning(Synthetic):
    """Made-up ids, taken for bytes; no token begins a document."""

    def text_codec(self) -> TextCodec:
        return codec_of_bytes(bos_id=None)


class Interrupted(WithoutBeginning):
    """Ends the process in its first sampling, as a kill does."""

    def text_codec(self) -> TextCodec:
        raise KeyboardInterrupt


def tiny(prompts, data):
    small = ("model.layers=1", "model.embed=16", "model.mlp=16", "mesh.fsdp=1")
    cfg = configs.load("experiments/llama_84m", ["tiny"], ("steps=1", *small))
    cfg.samples.prompts, cfg.validation = prompts, None
    cfg.data = data
    return cfg


def flat_tokens(folder, tokenizer):
    pretokenize(TEXTS, tokenizer, folder, "train")
    return fdl.Config(FlatTokens, path=str(folder), split="train", batch_size=8, sequence_length=64)


def mixture(source):
    return fdl.Config(Mixture, sources={"all": source}, stages=[fdl.Config(Stage, {"all": 1.0})])


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_byte_level_bpe(TEXTS, 280)])
@pytest.mark.parametrize("kind", ["flat", "mixed", "streamed"])
def test_every_source_with_a_tokenizer_reads_and_writes_text(kind, tokenizer, tmp_path):
    if kind == "streamed":
        (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
        if tokenizer.tokenizer_json:
            (tmp_path / "tokenizer.json").write_text(tokenizer.tokenizer_json)
        name = str(tmp_path / "tokenizer.json") if tokenizer.tokenizer_json else "bytes"
        source = HFStream(str(tmp_path / "texts.jsonl"), name, 8, 64)
    else:
        cfg = flat_tokens(tmp_path / "data", tokenizer)
        source = fdl.build(cfg if kind == "flat" else mixture(cfg))
    codec = source.text_codec()
    ids = codec.encode("five six")
    assert ids == [tokenizer.bos_id, *tokenizer.encode_batch(["five six"])[0].tolist()]
    assert codec.decode(ids) == "five six"


def test_prompts_of_conversations_are_asked_through_their_template(tmp_path):
    tokenizer = str(tmp_path / "tokenizer")
    write_tokenizer_folder(tmp_path / "tokenizer", begins=True)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "The river?", "response": "It runs."}')
    prepare_chats(
        Files([str(tmp_path / "chats.jsonl")], field=ConversationField()),
        load_tokenizer(tokenizer),
        load_template(tokenizer),
        tmp_path / "data",
        "train",
    )
    source = FlatTokens(str(tmp_path / "data"), "train", 1, 64)
    codec = source.text_codec()
    (ids,), stop_ids = asked(source, codec, ["The mill?"])
    assert codec.decode(ids) == "<user> The mill?\n<assistant>"
    assert stop_ids == codec.encode_marked(END) and len(stop_ids) == 1
    put_chat_template(tmp_path / "data", ChatTemplate({"default": "{{ 'a'.center(10 ** 9) }}"}, {}))
    with pytest.raises(BeyondLimits, match="took more than 512 MB of memory"):
        asked(source, codec, ["The mill?"])


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_continues_its_prompts(tmp_path, mixed):
    data = flat_tokens(tmp_path / "data", ByteTokenizer())
    cfg = tiny(("one two",), mixture(data) if mixed else data)
    (text,) = fit(cfg, tmp_path / "run").summary.samples
    assert text.startswith("one two") and len(text) > len("one two")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["samples"] == [text]


@pytest.mark.slow
def test_prompts_are_continued_while_training_goes_on(tmp_path):
    cfg = tiny(("one two", "six"), flat_tokens(tmp_path / "data", ByteTokenizer()))
    cfg.steps, cfg.samples.every = 5, 2
    result = fit(cfg, tmp_path / "run")
    pages = sorted((tmp_path / "run" / "samples").iterdir())
    assert [page.name for page in pages] == ["00000002.txt", "00000004.txt", "00000005.txt"]
    for page in pages:
        first, _, second = page.read_text().partition("\n\nsix")
        assert first.startswith("one two") and second
    samples = result.summary.samples
    assert pages[-1].read_text() == "\n\n".join(samples) + "\n"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["samples"] == [*samples]
    files = (tmp_path / "run" / "tensorboard").iterdir()
    assert any(b"samples/text_summary" in file.read_bytes() for file in files)


def test_sampling_without_prompts_is_refused(tmp_path):
    cfg = tiny((), flat_tokens(tmp_path / "data", ByteTokenizer()))
    cfg.samples.every = 2
    with pytest.raises(ConfigError, match=r"samples\.every is 2, but there are no prompts"):
        fit(cfg, tmp_path / "run")


@pytest.mark.landing
def test_a_run_that_ends_while_it_samples_is_not_finished(tmp_path):
    cfg = tiny(("a",), fdl.Config(Interrupted, vocab_size=512, batch_size=8, sequence_length=64))
    with pytest.raises(KeyboardInterrupt):
        fit(cfg, tmp_path)
    assert not (tmp_path / "result.json").exists()
    cfg.data = fdl.Config(WithoutBeginning, vocab_size=512, batch_size=8, sequence_length=64)
    fit(cfg, tmp_path, Options(allowed_changes=["data"]))
    samples = json.loads((tmp_path / "result.json").read_text())["samples"]
    assert len(samples) == 1 and samples[0].startswith("a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            WithoutBeginning,
            "ValueError: prompt 0 is empty; every prompt needs at least one token",
        ),
        (Synthetic, "ConfigError: Synthetic knows no tokenizer"),
    ],
)
def test_a_run_is_finished_without_its_samples(tmp_path, capsys, kind, reason):
    data = fdl.Config(kind, vocab_size=512, batch_size=8, sequence_length=64)
    cfg = tiny(("",), data)
    summary = fit(cfg, tmp_path).summary
    assert f"WARNING: the prompts are not continued: {reason}" in capsys.readouterr().err
    assert summary.samples == ()
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 1
    assert fit(cfg, tmp_path).summary == summary
    assert "finished all its 1 steps before" in capsys.readouterr().err
