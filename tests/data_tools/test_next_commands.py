"""What the commands that prepare data propose to do next."""

import shlex

import pytest
from own_texts import write_own_texts

from data_tools.held_out import Fractions, Part
from data_tools.pretokenize.report import next_command


def seen(texts):
    fractions = Fractions()
    for text in texts:
        fractions.see(text, len(text))
    return fractions.smallest()


@pytest.mark.parametrize("documents", [5, 30, 3_000])
def test_a_fraction_that_is_proposed_holds_out_something_and_not_most(documents):
    texts = [f"document {i}" for i in range(documents)]
    fraction = seen(texts)
    assert fraction is not None
    held_out = [text for text in texts if Part(fraction, held_out=True).has(text)]
    assert 0.01 * documents <= len(held_out) <= 0.5 * documents
    assert fraction <= 0.02 or documents < 1_000


def test_a_single_text_cannot_be_parted():
    assert seen(["one document"]) is None


def test_training_is_proposed_once_both_splits_are_there(tmp_path):
    folder = tmp_path / "my data"
    assert next_command(str(folder)) is None
    write_own_texts(folder)
    command = next_command(str(folder))
    assert command is not None
    assert shlex.split(command)[1:] == [
        *("-m", "runner", "--fdl_config=experiments/own_text", f"--fdl.tokens={folder}"),
        f"--workdir={folder}_run",
    ]
