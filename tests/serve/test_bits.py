"""An answer has the same bits, whatever else the engine computes."""

import random

import pytest
from served import (
    answer_of,
    answers,
    engine_of,
    hybrid,
    mixture,
    random_mixture,
    small_llama,
    windowed,
)

from lmlib import make_mesh

MODELS = {"llama": small_llama, "windowed": windowed, "mixture": mixture, "hybrid": hybrid}


def check(make, mixtures, mesh=None, rows=None, **others):
    """The same requests in mixtures, and one by one in an engine that never has another.

    Cancelled answers are beginnings of complete ones.
    """
    engine = engine_of(make, mesh, **others)
    alone = engine_of(make, mesh, **others | {"prefix_rows": 0})
    for each in (engine, alone):
        each.rows = rows or each.rows
    cancelled = reused = 0
    for number in range(mixtures):
        asked = random_mixture(random.Random(number))
        for each, heard in zip(asked, answers(engine, asked), strict=True):
            expected = answer_of(alone, each.request)
            if heard.ended == ["cancelled"]:
                cancelled += 1
                assert heard.tokens == expected.tokens[: len(heard.tokens)]
                assert heard.prompt in ([], expected.prompt)
            else:
                assert heard[:3] == expected[:3], (number, each.request)
            reused += sum(heard.reused)
    assert cancelled > mixtures / 10 and reused > 100 * mixtures, "or mixtures are too simple"


def test_answers_are_the_same_in_mixtures_as_alone():
    check(small_llama, 8)


@pytest.mark.landing
def test_answers_are_the_same_in_several_calls_of_few_rows():
    """As where larger calls have other bits."""
    check(small_llama, 20, rows=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_answers_of_other_models_are_the_same(name, int8):
    check(MODELS[name], 200, int8=int8)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_same_on_a_mesh(name):
    check(MODELS[name], 200, make_mesh(tensor=2))
