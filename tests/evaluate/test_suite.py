"""The suite of our own: models whose scores are known, and a loop over its pieces."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib.compute import Compute
from lmlib.data.text import codec_of_bytes
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.suite.suite import (
    TEXTS,
    RandomIds,
    Suite,
    SuiteEvaluator,
    in_context_slope,
    pieces,
)
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import single_document_context
from lmlib.models.model import Model, TrunkOutput
from lmlib.models.part import ActivationNames
from lmlib.models.weights import creator
from lmlib.parallel.mesh import make_mesh

FLOAT32 = Compute(dtype="float32")
BEGIN, V = 256, 258
CODEC = codec_of_bytes(BEGIN)


class Copier(Model):
    """Says what followed the last time that its document had this token; `sure` of it or not."""

    sure: float = eqx.field(static=True)
    vocab = V
    logit_cap = None
    names = ActivationNames()

    def unembedding_EV(self):
        return self.sure * jnp.eye(V)

    def trunk(self, tokens_BS, context, cache=None):
        def earlier(one_BS):
            return one_BS[:, :, None] == one_BS[:, None, :]

        place_S = jnp.arange(tokens_BS.shape[1])
        same_BST = earlier(tokens_BS) & earlier(context.segment_ids_BS)
        same_BST &= place_S[:, None] > place_S
        last_BS = jnp.max(jnp.where(same_BST, place_S, -2), axis=-1)
        one_hot_BTV = (tokens_BS[:, :, None] == jnp.arange(V)).astype(jnp.float32)
        after_BST = (last_BS[:, :, None] + 1 == place_S).astype(jnp.float32)
        return TrunkOutput(jnp.einsum("bst,btv->bsv", after_BST, one_hot_BTV))

    def features(self, x_BSE, context):
        return x_BSE

    def flops_per_token(self, sequence_length, causal):
        return 0.0

    def weight_groups(self):
        return ()


def scores(model, mesh=None, codec=CODEC, **suite):
    suite = Suite(**{"longest": 64, **suite})
    scorer = Scorer(mesh or make_mesh(), FLOAT32)
    evaluator = SuiteEvaluator(suite, scorer, V, codec, suite.longest)
    found = evaluator(model)
    assert set(found) == set(suite.metrics(suite.longest, codec))
    return found


def test_a_model_that_copies_is_perfect_and_one_that_knows_nothing_is_uniform():
    found = scores(Copier(60.0))
    for task, sizes in {"copying": (8, 32), "induction": (4, 16)}.items():
        for by in ("", *(f"/{size}" for size in sizes)):
            assert found[f"suite/{task}_accuracy{by}"] == 1.0
            assert found[f"suite/{task}_loss{by}"] == pytest.approx(0, abs=1e-6)
    found = scores(Copier(0.0))
    for name, value in found.items():
        if "_loss" in name:
            assert value == pytest.approx(math.log(V), rel=1e-6), name
        elif "_accuracy" in name:  # it says the lowest id, which it may be asked for
            assert value <= 0.05, name
        elif "bits_per_byte" in name:  # bytes are its tokens
            assert value == pytest.approx(math.log2(V), rel=1e-6), name
    assert found["suite/in_context_slope"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("filler", [[], [1, 2, 3], list(range(300))])
def test_a_fact_stands_at_its_depth_and_again_at_the_end(filler):
    longest, answer = 100, 8
    made = pieces(RandomIds(range(1_000, 2_000), 0), [BEGIN], filler, longest)
    recalled = [piece for piece in made if piece.measure.startswith("recall/")]
    assert len(recalled) == 12
    for piece in recalled:
        assert len(piece.ids) == longest + 1 and piece.ids[0] == BEGIN
        assert piece.first == longest - answer  # the input before the first that counts
        fact = piece.ids[-12:]
        starts = [at for at in range(90) if piece.ids[at : at + 12] == fact]
        assert len(starts) == 2 and starts[1] == longest + 1 - 12
        depth = int(piece.measure.partition("/")[2])
        assert starts[0] == 1 + (longest + 1 - 1 - 24) * depth // 100
    assert len({tuple(piece.ids[-12:]) for piece in recalled}) == 12


def test_the_slope_is_late_less_early():
    whole_NS, short_NT = np.full((3, 64), 9.0), np.full((3, 4), 5.0)
    whole_NS[:, 60:] = [[1.0], [2.0], [3.0]]
    assert in_context_slope(whole_NS, short_NT) == -3.0


def test_random_ids_follow_from_the_seed_and_have_no_special_token():
    first, same, other = (RandomIds(range(V), seed)(40, 1, 2) for seed in (0, 0, 1))
    assert first == same != other
    assert len(set(first)) == 40
    assert {*RandomIds([3, 5, 9], 0)(7, 0)} == {3, 5, 9}
    made = pieces(RandomIds(range(256), 0), [BEGIN], [], 64)
    ids = {token for piece in made for token in piece.ids}
    assert BEGIN in ids and max(ids) == BEGIN


def test_without_a_tokenizer_there_are_no_texts():
    suite = Suite(longest=64)
    assert "suite/copying_accuracy/8" in suite.metrics(64, None)
    assert not any("bits" in name or "slope" in name for name in suite.metrics(64, None))
    assert suite.metrics(4, None) == ()
    assert (suite.length(32), suite.length(128), suite.length(None)) == (32, 64, 64)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}])
def test_every_number_equals_a_loop_over_single_pieces(mesh):
    mesh = make_mesh(**mesh)

    def make():
        return llama(vocab=V, embed=32, layers=2, heads=4, mlp=64, key=jax.random.key(3))

    with jax.set_mesh(mesh):
        model = creator(make, mesh)()
    found = scores(model, mesh)

    plain = make()
    logits = jax.jit(
        lambda tokens_BS: plain(tokens_BS, single_document_context(tokens_BS, FLOAT32))
    )
    cut = [CODEC.encode(TEXTS["prose"])[start : start + 65] for start in range(0, 2500, 64)]

    def nats_of(ids):
        padded_BS = np.zeros((1, 64), np.int32)  # causal: later tokens do not matter
        padded_BS[0, : len(ids) - 1] = ids[:-1]
        logits_SV = np.asarray(logits(jnp.asarray(padded_BS))[0, : len(ids) - 1], np.float64)
        log_sums_S = np.log(np.exp(logits_SV).sum(axis=-1))
        targets_S = np.array(ids[1:])
        right_S = logits_SV.argmax(axis=-1) == targets_S
        return log_sums_S - logits_SV[np.arange(len(targets_S)), targets_S], right_S

    late, early = [], []
    for text in TEXTS.values():
        ids = CODEC.encode(text)
        for start in range(0, len(ids) - 64, 64):
            late.append(nats_of(ids[start : start + 65])[0][-4:])
            early.append(nats_of(ids[start + 56 : start + 65])[0][-4:])
    slope = np.mean(late) - np.mean(early)
    assert found["suite/in_context_slope"] == pytest.approx(slope, abs=1e-6)

    prose = sum(nats_of(ids)[0].sum() for ids in cut if len(ids) > 1)
    bits = prose / math.log(2) / len(TEXTS["prose"].encode())
    assert found["suite/bits_per_byte/prose"] == pytest.approx(bits, rel=1e-5)
    by_size = {}
    for piece in pieces(RandomIds(range(256), 0), [BEGIN], CODEC.encode(TEXTS["prose"]), 64):
        scored = [each_S[piece.first :] for each_S in nats_of(piece.ids)]
        by_size.setdefault(piece.measure, []).append(scored)
    for measure, each in by_size.items():
        task, _, size = measure.partition("/")
        loss, accuracy = (np.concatenate(one).mean() for one in zip(*each, strict=True))
        assert found[f"suite/{task}_loss/{size}"] == pytest.approx(loss, rel=1e-5)
        assert found[f"suite/{task}_accuracy/{size}"] == pytest.approx(accuracy)
