"""Engines of small models, random requests, and what the engines answer."""

import functools
import random
from typing import NamedTuple

import jax

from lmlib import Compute
from lmlib.generate import Sampling
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.gemma import gemma2
from lmlib.models.families.hybrid.qwen3_next import qwen3_next
from lmlib.models.families.llama import llama
from lmlib.serve.engine import Answer, Engine
from lmlib.serve.requests import Request

V, LENGTH, SLOTS = 64, 420, 4
FLOAT32 = Compute(dtype="float32")


def small_llama(key):
    return llama(V, 32, 2, 4, 48, kv_heads=2, key=key)


def windowed(key):
    """Two layers, of which one sees the last 150 tokens."""
    return gemma2(V, 16, 2, 4, 24, kv_heads=2, head_dim=8, window=150, key=key)


def mixture(key):
    return mixtral(
        experts=4, top=2, vocab=V, embed=16, layers=2, heads=4, mlp=24, kv_heads=2, key=key
    )


def hybrid(key):
    return qwen3_next(
        V, 16, 2, 2, 24, expert_mlp=8, kv_heads=2, head_dim=8, experts=4, top=2, shared_mlp=8,
        attention_layers=(1,), linear_heads=2, linear_kv_heads=2, linear_key_dim=4,
        linear_value_dim=4, key=key,
    )  # fmt: skip


@functools.cache
def made(make, mesh=None):
    """The model of a function of a key, on a mesh."""
    from lmlib.parallel.layout import shardings
    from lmlib.state import abstract_model

    model = make(jax.random.key(0))
    of_model = functools.partial(make, jax.random.key(0))
    return (
        model if mesh is None else jax.device_put(model, shardings(abstract_model(of_model, mesh)))
    )


def engine_of(make, mesh=None, **others):
    settings = {"slots": SLOTS, "length": LENGTH, "prefix_rows": 3, "compute": FLOAT32} | others
    return Engine(made(make, mesh), mesh, **settings)


class Heard(NamedTuple):
    """All that an answer said."""

    prompt: list
    tokens: list
    ended: list
    reused: list


class Asked:
    """A request to an engine, which begins in a turn, and may be cancelled in a later one."""

    def __init__(self, request, begins=0, cancelled_after=None):
        self.request, self.begins, self.cancelled_after = request, begins, cancelled_after
        self.heard = Heard([], [], [], [])
        self.answer = Answer(request, self._hear)
        self.turns = []  # in which tokens came

    def _hear(self, update):
        assert not self.heard.ended, "an answer ends once"
        self.heard.prompt.extend(update.prompt)
        self.heard.tokens.extend(update.tokens)
        self.heard.reused.extend([update.reused] if update.reused else [])
        self.heard.ended.extend([update.ended] if update.ended else [])


def answers(engine, asked):
    """Runs requests, in the order of their turns as far as there are slots, to their ends."""
    waiting = sorted(asked, key=lambda each: each.begins)
    live, turn = [], 0
    while waiting or live:
        while waiting and waiting[0].begins <= turn and engine.free:
            live.append(waiting.pop(0))
            engine.begin(live[-1].answer)
        for each in live:
            if each.cancelled_after is not None and turn >= each.begins + each.cancelled_after:
                each.answer.cancelled = True
        before = {each: len(each.heard.tokens) for each in live}
        engine.turn(others_wait=bool(waiting))
        for each in live:
            if len(each.heard.tokens) > before[each]:
                each.turns.append(turn)
        live = [each for each in live if not each.heard.ended]
        turn += 1
    assert engine.free and not engine.running and not engine.prefilling
    return [each.heard for each in asked]


def answer_of(engine, request):
    (heard,) = answers(engine, [Asked(request)])
    return heard


SYSTEM = tuple(random.Random(7).choices(range(V), k=290))  # a beginning that prompts share


def random_sampling(rng):
    return Sampling(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([None, None, 5]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
    )


def random_request(rng, **others):
    own = rng.choices(range(V), k=rng.choice([1, 2, 5, 17, 60, 128]))
    shared = SYSTEM[: rng.choice([0, 0, 100, 260, 290])]
    settings = {
        "prompt": (*shared, *own)[: LENGTH - 20],
        "max_tokens": rng.choice([0, 1, 3, 8, 20]),
        "sampling": random_sampling(rng),
        "seed": rng.randrange(2**32),
        "sample": rng.choice([0, 0, 1]),
        "stop_ids": tuple(rng.choices(range(V), k=rng.choice([0, 0, 3]))),
        "top": rng.choice([0, 0, 4]),
        "score_prompt": rng.random() < 0.2,
    }
    return Request(**settings | others)


def random_mixture(rng):
    return [
        Asked(random_request(rng), rng.randrange(8), rng.choice([None, None, None, 1, 4]))
        for _ in range(rng.randint(2, 7))
    ]
