"""A source of the user's own that gives other rows than it promises is refused in words."""

import re

import equinox as eqx
import fiddle as fdl
import numpy as np
import pytest
from small_experiment import small

from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.mixture import Mixture, Stage
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.synthetic import Synthetic
from lmlib.experiment.sources import check_rows
from runner import fit
from runner.errors import ConfigError

V, B, S = 32, 4, 16


class Own(Synthetic):
    """A source whose batches `change` makes of good ones."""

    def __init__(self, change, **settings):
        super().__init__(V, B, S, **settings)
        self.change = change

    def batch(self, step, rows=slice(None)):
        return self.change(super().batch(step, rows))


def with_field(name, change):
    """Changes a field to a value that `Batch` does not accept while the tests run its checks."""
    return lambda batch: eqx.tree_at(
        lambda b: getattr(b, name), batch, change(getattr(batch, name))
    )


def set_first(value):
    def change(array):
        array = array.copy()
        array[0, 0] = value
        return array

    return change


def one_segment(batch):
    return with_field("segment_ids", np.ones_like)(batch)


WRONG = [
    (lambda batch: "text", "must be a lmlib.data.batch.Batch, got str"),
    (with_field("tokens", lambda x: x.astype(np.int64)), "tokens must be int32 of shape (3, 16)"),
    (
        with_field("targets", lambda x: x[:, 1:]),
        "targets must be int32 of shape (3, 16)",
    ),
    (with_field("loss_mask", lambda x: x.astype(np.int8)), "loss_mask must be bool"),
    (
        with_field("tokens", set_first(V)),
        "tokens has the id 32, but the model's",
    ),
    (with_field("tokens", set_first(-1)), "tokens has the id -1"),
    (with_field("positions", set_first(-3)), "positions has -3: it must be at least 0"),
    (with_field("teacher_ids", set_first(V)), "teacher_ids has the id 32"),
    (with_field("teacher_ids", lambda x: x[..., 1:]), "teacher_ids must be int32 of shape (3, 16"),
]


@pytest.mark.parametrize(("change", "told"), WRONG, ids=[told for _, told in WRONG])
def test_rows_that_do_not_fit_are_named(change, told):
    check_rows("data", Own(lambda batch: batch, teacher_k=2), V, needs_pairs=True)
    with pytest.raises(ValueError, match=r"^data.batch\(0, slice\(0, 3\)\)[ .]" + re.escape(told)):
        check_rows("data", Own(change, teacher_k=2), V, needs_pairs=False)


class BeyondTheVocabulary(Synthetic):
    def batch(self, step, rows=slice(None)):
        return with_field("tokens", set_first(512))(super().batch(step, rows))


def test_rows_that_were_not_asked_for_are_noticed():
    class Whole(Synthetic):
        def batch(self, step, rows=slice(None)):
            return super().batch(step)

    with pytest.raises(ValueError, match=r"tokens must be int32 of shape \(3, 16\), got .*\(4, 16"):
        check_rows("data", Whole(V, B, S), V, needs_pairs=False)


def test_documents_that_are_no_pairs_are_refused_where_pairs_are_compared():
    source = Own(one_segment)
    check_rows("data", source, V, needs_pairs=False)
    with pytest.raises(ValueError, match="holds no pair of answers: a pair is two segments"):
        check_rows("data", source, V, needs_pairs=True)


def test_a_run_refuses_them_before_it_begins(tmp_path):
    cfg = small("steps=1")
    settings = {"vocab_size": 512, "batch_size": B, "sequence_length": S}
    sources = {"own": fdl.Config(BeyondTheVocabulary, **settings)}
    cfg.data = fdl.Config(Mixture, sources, [fdl.Config(Stage, {"own": 1})])
    with pytest.raises(ConfigError, match=r"^data\.sources\['own'\]\.batch.* has the id 512"):
        fit(cfg, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_validation_of_another_tokenizer_is_refused(tmp_path, write_documents):
    cfg = small("steps=1")
    for name in ("data", "validation"):
        tokenizer = TokenizerIdentity(f"of {name}", None)
        write_documents(tmp_path / name, [[1] * 40], tokenizer=tokenizer)
        setattr(cfg, name, fdl.Config(FlatTokens, str(tmp_path / name), "train", B, S))
    with pytest.raises(ConfigError, match=r"made by 'of data', but validation by 'of validation'"):
        fit(cfg, tmp_path / "run")
