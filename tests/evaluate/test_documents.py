"""Each document is evaluated by itself: against float64 NumPy, packed or not, on every mesh."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib.compute import Compute
from lmlib.evaluate.documents import Document, evaluate_documents
from lmlib.evaluate.ratio import Ratio
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.windows import Packing, windows
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import single_document_context
from lmlib.models.weights import creator
from lmlib.parallel.mesh import make_mesh

V, S = 32, 16
FLOAT32 = Compute(dtype="float32")
make = functools.partial(llama, vocab=V, embed=16, layers=1, heads=4, mlp=16, key=jax.random.key(0))
random = np.random.default_rng(0)
DOCUMENTS = [
    Document(random.integers(0, V, length), 3 * length + 1, 2 * length + 1)
    for length in (5, 0, 1, 2, 16, 17, 18, 40, 3, 9, 33)
]


def on(mesh):
    mesh = make_mesh(**mesh)
    with jax.set_mesh(mesh):
        return mesh, creator(make, mesh)()


@functools.cache
def made():
    return jax.jit(make)()


@functools.cache
def nats_of(overlap):
    """Returns (position in its window, nats) of each target of each document, by the definition of
    windows, from the logits of one window at a time."""
    model = made()
    logits = jax.jit(
        lambda tokens_BS: model(tokens_BS, single_document_context(tokens_BS, FLOAT32))
    )
    found = []
    for document in DOCUMENTS:
        pairs, start, done = [], 0, 0
        while done < len(document.ids) - 1:
            stop = min(start + S, len(document.ids) - 1)
            padded = np.zeros((1, S), np.int32)
            padded[0, : stop - start] = document.ids[start:stop]
            logits_SV = np.asarray(logits(jnp.asarray(padded))[0], np.float64)
            for place in range(done, stop):
                z = logits_SV[place - start]
                nats = np.log(np.exp(z).sum()) - z[document.ids[place + 1]]
                pairs.append((place - start, nats))
            start, done = start + S - overlap, stop
        found.append(pairs)
    return found


def ratio(y_D, x_D):
    y_D, x_D = (np.array(each, np.float64)[np.array(x_D) > 0] for each in (y_D, x_D))
    R, n = y_D.sum() / x_D.sum(), len(y_D)
    return R, math.sqrt(n / (n - 1) * ((y_D - R * x_D) ** 2).sum()) / x_D.sum() if n > 1 else None


def assert_same(estimate, expected, unit=1.0):
    value, error = expected
    assert estimate.value == pytest.approx(value / unit, rel=1e-5)
    assert (estimate.standard_error is None) == (error is None)
    if error is not None:
        assert estimate.standard_error == pytest.approx(error / unit, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "packed", "overlap"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, True, 5),
        ({"data": 2, "fsdp": 2, "tensor": 2}, False, 0),
        ({}, True, 5),
        ({}, False, 5),
        ({"fsdp": 8}, True, 0),
    ],
)
def test_documents_against_numpy(mesh, packed, overlap):
    mesh, model = on(mesh)
    packing = Packing(rows=8, sequence_length=S, packed=packed)
    told = []
    found = evaluate_documents(
        model, DOCUMENTS, Scorer(mesh, FLOAT32), packing, overlap, lambda *done: told.append(done)
    )
    nats = nats_of(overlap)
    sums, counts = [sum(n for _, n in each) for each in nats], [len(each) for each in nats]
    assert (found.documents, found.targets) == (11, sum(counts))
    assert told[-1] == (11, sum(counts))
    assert_same(found.loss, ratio(sums, counts))
    value, error = ratio(sums, counts)
    assert_same(found.perplexity, (math.exp(value), math.exp(value) * error))
    in_bytes = [document.bytes for document in DOCUMENTS]
    assert_same(found.bits_per_byte, ratio(sums, in_bytes), math.log(2))
    in_characters = [document.characters for document in DOCUMENTS]
    assert_same(found.bits_per_character, ratio(sums, in_characters), math.log(2))
    assert [(each.first, each.last) for each in found.by_position] == [
        (0, 1),
        (2, 3),
        (4, 7),
        (8, 15),
    ]
    for each in found.by_position:
        inside = [[n for at, n in one if each.first <= at <= each.last] for one in nats]
        assert each.targets == sum(map(len, inside))
        assert_same(each.loss, ratio([sum(one) for one in inside], [len(one) for one in inside]))


@pytest.mark.parametrize("length", [0, 1, 2, S, S + 1, S + 2, 3 * S + 1, 50])
@pytest.mark.parametrize("overlap", [0, 1, S - 1])
def test_windows_predict_every_token_but_the_first_once(length, overlap):
    ids = np.arange(length)
    pieces = list(windows(0, ids, S, overlap))
    predicted = [piece.ids[1 + piece.first :] for piece in pieces]
    assert np.concatenate([[0][:length], *predicted]).tolist() == ids.tolist()
    assert all(piece.inputs <= S for piece in pieces)
    assert all(piece.first == overlap for piece in pieces[1:])
    assert all(piece.first < piece.inputs for piece in pieces), "a window has context alone"


@pytest.mark.parametrize("packed", [True, False])
def test_each_window_lies_in_one_row_apart_from_the_others(packed):
    cut = [each for n, d in enumerate(DOCUMENTS) for each in windows(n, d.ids, S, 3)]
    seen = []
    for batch, placed in Packing(3, S, packed).batches(cut):
        covered = np.zeros(batch.tokens.shape, int)
        for window, row, start in placed:
            here = row, slice(start, start + window.inputs)
            covered[here] += 1
            assert batch.tokens[here].tolist() == window.ids[:-1].tolist()
            assert batch.targets[here].tolist() == window.ids[1:].tolist()
            assert batch.positions[here].tolist() == list(range(window.inputs))
            assert len(set(batch.segment_ids[here].tolist())) == 1
            assert batch.loss_mask[here].tolist() == [
                at >= window.first for at in range(window.inputs)
            ]
            assert packed or start == 0
            seen.append(window)
        assert covered.max() == 1 and (covered == (batch.segment_ids > 0)).all()
    assert len(seen) == len(cut)


def test_a_ratio_far_from_zero_keeps_its_error():
    y_D, x_D = 1000 + random.random(500), np.full(500, 1000.0)
    sums = Ratio()
    for y, x in zip(y_D, x_D, strict=True):
        sums.add(y, x)
    assert_same(sums.estimate(), ratio(y_D, x_D))
    assert Ratio().documents == 0


def test_one_document_has_no_standard_error():
    sums = Ratio()
    sums.add(3.0, 2.0)
    assert (sums.estimate().value, sums.estimate().standard_error) == (1.5, None)


@pytest.mark.parametrize(
    ("documents", "overlap", "told"),
    [
        ([], 0, "there are no documents"),
        ([[3], []], 0, "none of 2 documents has two tokens"),
        ([[3, V]], 0, f"token id {V}, but the model's vocabulary ends at {V - 1}"),
        ([[1, 2]], S, f"overlap must be at least 0 and below {S}, got {S}"),
    ],
)
def test_invalid_documents_are_refused(documents, overlap, told):
    mesh = make_mesh()
    given = [Document(np.array(ids, np.int64)) for ids in documents]
    with pytest.raises(ValueError, match=told):
        evaluate_documents(made(), given, Scorer(mesh, FLOAT32), Packing(1, S), overlap)
