"""Tokenizers as objects of transformers: the ids are those of the model. Needs lmlib[eval]."""

import dataclasses
from pathlib import Path

import pytest
from run_on_bytes import write_run_on_bytes
from small_tokenizer import BEGIN, END, TEXTS, write_tokenizer_folder

from lmlib import hf
from lmlib.data.chats.chat import ChatTemplate
from lmlib.data.text import codec_of_file
from lmlib.generate import New
from lmlib.parallel.mesh import make_mesh
from runner.errors import ConfigError
from runner.inference.answer import Answer
from runner.inference.hugging_face_tokenizer import hugging_face_tokenizer
from runner.inference.loaded import Loaded, load
from runner.weights.texts import tokenizer_of

transformers = pytest.importorskip("transformers", reason="needs lmlib[eval]")
GOLDEN = Path(__file__).parents[2] / "hf" / "golden"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def on_bytes(tmp_path_factory) -> Loaded:
    workdir, _ = write_run_on_bytes(tmp_path_factory.mktemp("bytes"))
    return load(str(workdir), mesh=make_mesh())


def test_bytes_are_ids(on_bytes):
    tokenizer = hugging_face_tokenizer(on_bytes)
    every = bytes(range(256))
    for text in [*TEXTS, "", "\x00 \n\t", "<0>"]:
        assert tokenizer.encode(text) == on_bytes.codec.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.decode(list(every)) == every.decode(errors="replace")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)


@pytest.mark.parametrize("begins", [True, False])
def test_a_tokenizer_of_data_begins_texts_as_the_data(on_bytes, tmp_path, begins):
    write_tokenizer_folder(tmp_path, begins=not begins)  # what the file itself does is not asked
    file = tmp_path / "tokenizer.json"
    loaded = dataclasses.replace(
        on_bytes,
        codec=codec_of_file(file, 0 if begins else None),
        tokenizer_file=file,
        document_end=0,
    )
    tokenizer = hugging_face_tokenizer(loaded)
    for text in TEXTS:
        assert tokenizer.encode(text) == loaded.codec.encode(text)
    assert tokenizer.eos_token == END and tokenizer.bos_token == (END if begins else None)
    assert BEGIN not in tokenizer.decode(tokenizer.encode("a"))


@pytest.mark.parametrize("stop", [END, f"s{END}", f"{BEGIN}{END}", "the "])
def test_stop_strings_end_an_answer_where_they_do_in_transformers(tmp_path, stop):
    torch = pytest.importorskip("torch", reason="needs lmlib[parity]")
    write_tokenizer_folder(tmp_path, begins=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    codec = codec_of_file(tmp_path / "tokenizer.json", None)
    ids = codec.encode_marked("".join(f"{text}the s{END}{BEGIN}{END}" for text in TEXTS))
    criterion = transformers.StopStringCriteria(theirs, [stop])
    ends = (bool(criterion(torch.tensor([ids[:n]]), None)) for n in range(1, len(ids) + 1))
    answer = Answer(codec, [], len(ids), (), (stop,))
    answer.push(New(ids, [0.0] * len(ids)))
    assert len(answer.tokens) == 1 + list(ends).index(True)


def test_chats_are_written_by_the_template_of_the_model(on_bytes, tmp_path):
    write_tokenizer_folder(tmp_path, begins=True)
    template = ChatTemplate(
        {"default": "{{ bos_token }}{{ messages[0].content }}"}, {"bos_token": BEGIN}
    )
    file, chat = tmp_path / "tokenizer.json", [{"role": "user", "content": "a"}]
    of_data = dataclasses.replace(
        on_bytes, codec=codec_of_file(file, None), tokenizer_file=file, chat_template=template
    )
    of_folder = dataclasses.replace(
        of_data, tokenizer_folder=tmp_path, tokenizer=tokenizer_of(tmp_path, "it")
    )
    for loaded in (of_data, of_folder):
        tokenizer = hugging_face_tokenizer(loaded)
        assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{BEGIN}a"


def test_what_is_exported_with_a_tokenizer_alone_has_its_special_tokens(tmp_path):
    write_tokenizer_folder(tmp_path, begins=True)
    ids = {"bos_token_id": 1, "eos_token_id": 0}
    model = hf.load(GOLDEN / "llama")
    hf.save(model, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", settings=ids)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BEGIN, END)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)


def test_no_tokenizer_is_a_mistake(on_bytes):
    with pytest.raises(ConfigError, match=r"no tokenizer of .* is known: give --tokenizer"):
        hugging_face_tokenizer(dataclasses.replace(on_bytes, codec=None, tokenizer=None))
