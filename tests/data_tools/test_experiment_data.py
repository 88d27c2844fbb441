"""Data that does not fit the experiment stops it before anything compiles."""

import dataclasses

import pytest

from data_tools.pretokenize.texts import pretokenize
from data_tools.tokenizer import ByteTokenizer
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from experiments import llama_84m
from lmlib.data.flat_tokens import FlatTokens

TEXTS = ["some text to learn from", "and a little more"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    pretokenize(TEXTS, ByteTokenizer(), folder / "bytes", "train")
    pretokenize(TEXTS, train_byte_level_bpe(TEXTS, 280), folder / "bpe", "train")
    return folder


@pytest.fixture(scope="module")
def experiment():
    import fiddle as fdl

    cfg = llama_84m.config()
    llama_84m.tiny(cfg)
    cfg.model.vocab = 300
    cfg.data.vocab_size = cfg.validation.vocab_size = 300
    return fdl.build(cfg)


def test_data_that_does_not_fit(folder, experiment):
    data, other = (FlatTokens(str(folder / name), "train", 8, 16) for name in ("bytes", "bpe"))
    for fitting in (data, other):
        dataclasses.replace(experiment, data=fitting, validation=None).check()

    def small_model(**settings):
        return experiment.model(**settings, vocab=257)

    small = dataclasses.replace(experiment, model=small_model, data=data, validation=None)
    with pytest.raises(ValueError, match=r"ids up to 257, but the model's vocabulary ends at 256"):
        small.check()
    with pytest.raises(ValueError, match=r"made by 'bytes', but validation by 'byte-level BPE'"):
        dataclasses.replace(experiment, data=data, validation=other).check()
    data = FlatTokens(str(folder / "bytes"), "train", 8, 16, epochs=2)
    fitting = dataclasses.replace(experiment, data=data, validation=None, steps=data.batches)
    fitting.check()
    with pytest.raises(ValueError, match=f"data ends after {data.batches} batches, but steps is"):
        dataclasses.replace(fitting, steps=data.batches + 1).check()
