"""Models of runs and of Hugging Face's folders, loaded with their texts' codec."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_texts import BOS, EOS, write_ids
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT, succeeded
from run_on_bytes import write_run_on_bytes
from small_folder import assert_same_weights
from small_tokenizer import BEGIN, END, TEXTS, write_tokenizer_folder
from taught_model import write_taught_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from lmlib import Compute, hf
from lmlib.data.chats.chat import ChatTemplate
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.text import codec_of_file
from lmlib.generate import GREEDY, Generator, New, Sampling
from lmlib.parallel.mesh import make_mesh
from runner import convert
from runner.config import configs
from runner.errors import ConfigError
from runner.inference.answer import Answer
from runner.inference.hugging_face_tokenizer import hugging_face_tokenizer
from runner.inference.loaded import Loaded, load
from runner.weights.texts import tokenizer_of

LLAMA = ROOT / "tests" / "hf" / "golden" / "llama"
FLOAT32 = Compute(dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with a tokenizer that adds begin and end tokens."""
    folder = tmp_path_factory.mktemp("folder")
    shutil.copytree(LLAMA, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "</s>": 2, "<s>": 5}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    ends = [("<s>", 5), ("</s>", 2)]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    return folder


@pytest.mark.slow
@pytest.mark.several_devices
def test_a_folder_and_its_import_load_the_same(folder, tmp_path):
    convert.bring_in(str(folder), tmp_path / "run")
    mesh = make_mesh(fsdp=2)
    for reference in (str(folder), str(tmp_path / "run")):
        found = load(reference, mesh=mesh)
        assert_same_weights(found.model, hf.load(folder))
        assert found.codec.encode("b a b") == [5, 1, 0, 1]
        assert found.end_ids == (2, 3)
        assert found.longest == 512
        assert found.tokenizer.sha256 is not None
        assert (found.tokenizer_folder / "tokenizer.json").is_file()
    assert (found.step, found.name) == (0, f"{tmp_path / 'run'}@0")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on bytes, at step 3, and its model; its data is in `data`."""
    return write_run_on_bytes(tmp_path_factory.mktemp("bytes"))


@pytest.mark.landing
def test_a_run_is_loaded_without_its_mesh(run):
    workdir, model = run
    found = load(f"{workdir}@3")
    assert found.mesh.size == len(jax.devices())  # all, though the run's were 64
    assert_same_weights(found.model, model)
    assert found.codec.encode("hi") == [BOS, *b"hi"]
    assert (found.end_ids, found.longest, found.step) == ((EOS,), 24, 3)
    assert found.document_end == EOS


@pytest.mark.slow
def test_the_methods_of_a_loaded_run_agree_on_several_devices(run):
    found = load(Path(run[0]))
    text = "hé!"
    ids = found.ids(text)
    rows = jnp.array([ids] * found.mesh.size)
    whole = np.asarray(jax.jit(lambda model: model(rows))(found.model))
    np.testing.assert_allclose(found.logits(text), whole[0], rtol=0.1, atol=0.1)  # in bfloat16
    np.testing.assert_array_equal(found.logits(text), found.logits(ids))
    log_p = jax.nn.log_softmax(found.logits(text))
    losses = found.token_losses(text)
    assert "".join(token.text for token in losses) == text  # after BOS
    assert [token.id for token in losses] == ids[1:]
    nats = [-log_p[i, id] for i, id in enumerate(ids[1:])]
    np.testing.assert_allclose([token.nats for token in losses], nats, rtol=1e-5)
    assert found.activations(text).shape == (2, len(ids), 16)
    assert found.attention(text).shape == (1, 4, len(ids), len(ids))
    assert found.generate(text, max_tokens=4) == found.generate(ids, max_tokens=4)
    one, other = (
        Generator(found.model, mesh, FLOAT32, rows=8, length=64)([ids], 4, GREEDY)
        for mesh in (None, found.mesh)
    )
    assert one == other


ON_ONE_DEVICE = """
import sys
import jax
import jax.numpy as jnp
from lmlib.generate import Generator
from runner import load

run = load(sys.argv[1])
ids = run.ids("hi")
tokens_BS = jnp.array([ids])
assert jnp.allclose(run.model(tokens_BS)[0], run.logits("hi"), rtol=0.1, atol=0.1)
slope = jax.jit(jax.grad(lambda model: jnp.sum(model(tokens_BS)[0, -1])))(run.model)
assert jnp.any(slope.embedding != 0)
Generator(run.model, rows=1, length=8)([ids], 2)
"""


@pytest.mark.slow
def test_on_one_device_nothing_needs_a_mesh(run):
    """Not even code of the user's own, such as a gradient."""
    succeeded("-c", ON_ONE_DEVICE, run[0], environment={"XLA_FLAGS": XLA_FLAGS})


def test_a_text_needs_a_tokenizer():
    found = load(str(LLAMA))
    with pytest.raises(ConfigError, match="has no known tokenizer: give token ids"):
        found.logits("hi")
    assert found.logits([1, 2]).shape == (2, 62)


@pytest.mark.landing
def test_generate_takes_the_settings_of_sampling(run):
    found = load(f"{run[0]}@3", mesh=make_mesh())
    both = [
        found.generate("hi", temperature=0.7, top_p=0.1, max_tokens=12, seed=5),
        found.generate("hi", 12, Sampling(temperature=0.7, top_p=0.1), seed=5),
    ]
    assert both[0] == both[1] != found.generate("hi", 12, seed=5)
    greedy = found.generate("hi", 12, GREEDY)
    assert found.generate("hi", 12, Sampling(temperature=5.0), top_k=1) == greedy
    assert len(greedy) > 1
    assert found.generate("hi", 12, GREEDY, stop=greedy[1:]) == greedy[:1]
    with pytest.warns(UserWarning, match="trained on 24 tokens at most, and may get 33"):
        found.generate("hi", 30)  # after a begin token
    for wrong, message in (
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"temprature": 0.7}, "no setting 'temprature'. Did you mean temperature"),
        ({"max_token": 9}, "no setting 'max_token'. Did you mean max_tokens"),
        ({"sampling": 0.7}, "sampling must be a Sampling, got 0.7"),
        ({"max_tokens": "50"}, "max_tokens must be an integer, got '50'"),
        ({"max_tokens": 0}, r"max_tokens must be in \[1, 2,147,483,648\), got 0"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"stop": [1]}, r"stop must be a string, or a list of strings, got \[1\]"),
        ({"text": ["hi", "ho"]}, "must be a string or a list of token ids, got .'hi', 'ho'"),
        ({"text": 5}, "must be a string or a list of token ids, got 5"),
        ({"text": [1.5]}, "must be a string or a list of token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            found.generate(**{"text": "hi", **wrong})


@pytest.mark.landing
def test_generate_ends_where_the_chat_template_ends_answers(tmp_path):
    """The command does so. At this temperature all tokens are equally likely."""
    folder = write_taught_model(tmp_path / "model", longest=256)
    chats = dataclasses.replace(load(folder), end_ids=())
    plain = dataclasses.replace(chats, chat_template=None)
    settings = {"max_tokens": 200, "temperature": 1e3, "seed": 2}
    said, more = (each.generate("The", **settings) for each in (chats, plain))
    assert said and more.startswith(said) and len(more) > len(said)


def test_a_loaded_model_is_described_in_a_line(run, tmp_path):
    workdir = shutil.copytree(run[0], tmp_path / "run")
    (workdir / "metrics.jsonl").write_text(
        '{"step": 2, "loss": 3.5}\n{"step": 3, "loss": 2.5}\n{"step": 4, "loss": 1.5}\n'
    )
    found = load(workdir, mesh=make_mesh())
    count = sum(leaf.size for leaf in jax.tree.leaves(run[1]))
    expected = f"step 3, {count / 1000:.1f} k parameters, training loss 2.5000"
    assert repr(found) == f"Loaded({workdir}@3: {expected})"
    assert repr(load(LLAMA)).startswith(f"Loaded({LLAMA}: ")


def test_a_run_is_loaded_without_its_data(run):
    workdir, _ = run
    data = workdir.parent / "data"
    data.rename(workdir.parent / "gone")
    try:
        found = load(str(workdir), mesh=make_mesh())
    finally:
        (workdir.parent / "gone").rename(data)
    assert found.codec.encode("hi") == [*b"hi"]
    assert found.tokenizer.name == "bytes"
    assert found.end_ids == ()


def test_data_with_another_tokenizer_is_refused(run, tmp_path):
    workdir = shutil.copytree(run[0], tmp_path / "run")
    cfg = configs.load(str(workdir))
    cfg.data.path = cfg.validation.path = str(tmp_path / "data")
    configs.save(cfg, workdir)
    other = TokenizerIdentity("other", None)
    write_ids(tmp_path / "data", [[1, 2, 3]], vocab_size=258, tokenizer=other)
    for read in (load, lambda name: convert.bring_out(name, tmp_path / "out")):
        with pytest.raises(ConfigError, match="'bytes', but its data now has 'other'"):
            read(str(workdir))
    write_tokenizer_folder(tmp_path, begins=True)
    assert load(str(workdir), tokenizer=str(tmp_path), mesh=make_mesh()).codec is not None


transformers = pytest.importorskip("transformers", reason="needs lmlib[eval]")


@pytest.fixture(scope="module")
def on_bytes(tmp_path_factory) -> Loaded:
    workdir, _ = write_run_on_bytes(tmp_path_factory.mktemp("bytes"))
    return load(str(workdir), mesh=make_mesh())


@pytest.mark.slow
def test_bytes_are_ids(on_bytes):
    tokenizer = hugging_face_tokenizer(on_bytes)
    every = bytes(range(256))
    for text in [*TEXTS, "", "\x00 \n\t", "<0>"]:
        assert tokenizer.encode(text) == on_bytes.codec.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.decode(list(every)) == every.decode(errors="replace")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, False])
def test_a_tokenizer_of_data_begins_texts_like_the_data(on_bytes, tmp_path, begins):
    write_tokenizer_folder(tmp_path, begins=not begins)  # the file's own setting is ignored
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


@pytest.mark.slow
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


@pytest.mark.slow
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
