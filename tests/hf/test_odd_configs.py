"""Odd config.json files are read as by transformers (see tests/hf/test_parity.py), or refused."""

import json
import re

import jax
import pytest
from changed_keys import OUTCOMES, cases_of, content_of, with_value
from hugging_face_families import FAMILIES, GOLDEN
from odd_configs import NO_SIZES, READ, REFUSED, SIZES
from published_configs import ODDLY_KEYED

from lmlib.hf.families import described_by
from lmlib.models.differences import differences
from lmlib.models.families.hugging_face.multi_token_prediction import HEADS
from lmlib.models.families.hugging_face.settings import FolderError


def changed(name, keys):
    content = json.loads((GOLDEN / name / "config.json").read_text()) | keys
    return {key: each for key, each in content.items() if each is not ...}


@pytest.mark.parametrize("case", READ)
def test_odd_keys_mean_what_they_mean_to_transformers(case):
    name, odd, plain = READ[case]
    found, expected = (described_by(changed(name, keys), "config.json") for keys in (odd, plain))
    assert found.arguments == expected.arguments


@pytest.mark.parametrize(("name", "keys", "told"), REFUSED, ids=lambda each: str(each)[:60])
def test_other_odd_keys_are_refused_in_a_sentence(name, keys, told):
    with pytest.raises(FolderError, match=rf"^config\.json\b.*{re.escape(told)}") as error:
        described_by(changed(name, keys), "config.json").shapes  # noqa: B018
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_key_that_is_null_or_absent_makes_another_model_than_in_transformers(name):
    """It may be refused."""
    whole, outcomes = content_of(name), dict(OUTCOMES[name])
    for case, path, content in cases_of(name):
        outcome = outcomes.pop(case)
        if path == (HEADS,):  # a folder's tensors decide: tests/hf/test_multi_token.py
            continue
        meant = with_value(whole, path, outcome["as"]) if isinstance(outcome, dict) else whole
        try:
            found = described_by(content, "config.json")
            if outcome != "refuses":
                assert same(found, described_by(meant, "config.json")), case
        except FolderError as error:
            if case.endswith(": null") and outcome == "refuses":
                assert any(part in str(error) for part in path), case
    assert not outcomes


def same(found, expected):
    return found == expected or not list(differences(found.shapes, expected.shapes))


@pytest.mark.parametrize("value", NO_SIZES, ids=str)
def test_invalid_sizes_are_refused(value):
    for name, sizes in SIZES.items():
        for key in sizes:
            with pytest.raises(FolderError, match=rf"^config\.json: {key} = .* is (invalid|not)"):
                described_by(changed(name, {key: value}), "config.json")


@pytest.mark.parametrize("name", ODDLY_KEYED)
def test_published_files_with_keys_that_mean_nothing_are_read(name):
    count, content = ODDLY_KEYED[name]
    shapes = described_by(content, "config.json").shapes
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count
