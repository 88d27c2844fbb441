"""CompleteP beside its own form: multipliers apart from weights, rates of the paper's table 1."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from outsider_runs import experiment
from user_model import Learned

from lmlib.adapters.lora import lora
from lmlib.models.families.gemma import gemma2, gemma3
from lmlib.models.families.gpt2 import gpt2
from lmlib.models.families.llama import llama
from lmlib.models.multi_token import multi_token
from lmlib.optim.adamw import adamw
from lmlib.optim.matrices.muon import muon
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.optim.schedules import warmup_constant
from lmlib.optim.transfer import CompleteP
from lmlib.parallel.selection import named_weights

LLAMA = functools.partial(llama, vocab=128, embed=128, layers=4, heads=8, mlp=256)
BASE = {"embed": 32, "heads": 2, "mlp": 64, "layers": 1}
M = 4  # times as wide, and as deep

# For weights in layers, by the ends of their paths, and for others: the paper's initial variance
# in units of its base's; the multiplier in front; the learning rate; the epsilon. Table 1, α = 1.
# The multiplier of a block's output is in front of the matrices that write. The multiplier of
# logits is in front of the unembedding, or of a tied model's last norm.
IN = {"variance": 1 / M, "multiplier": 1, "rate": 1 / M, "epsilon": 1 / M**2}
OUT = IN | {"multiplier": 1 / M}
VECTOR = {"variance": 1, "multiplier": 1, "rate": 1, "epsilon": 1 / M**2}
WRITTEN = VECTOR | {"multiplier": 1 / M}
TABLE = VECTOR | {"epsilon": 1 / M}
HEAD = TABLE | {"multiplier": 1 / M}
PAPER = {
    "attention.query": IN, "attention.key": IN, "attention.value": IN, "attention.output": OUT,
    "mlp.gate": IN, "mlp.up": IN, "mlp.down": OUT,
    "attention_norm.scale": VECTOR, "mlp_norm.scale": VECTOR, "attention_norm.bias": VECTOR,
    "mlp_norm.bias": VECTOR, "query_bias": VECTOR, "key_bias": VECTOR, "value_bias": VECTOR,
    "up_bias": VECTOR, "output_bias": WRITTEN, "down_bias": WRITTEN,
    "unembedding": HEAD, "embedding": TABLE, "positions.table": TABLE,
    "positions.table_PE": TABLE, "tokens_VE": TABLE,
}  # fmt: skip


def of_paper(path, tied):
    if path.startswith("norm."):
        return HEAD if tied else TABLE
    return next(row for end, row in PAPER.items() if path.endswith(end))


def by_path(model):
    return dict(zip(named_weights(model), jax.tree.leaves(model), strict=True))


CASES = {
    "llama": (LLAMA, BASE, False),
    "llama, tied": (functools.partial(LLAMA, tied=True), BASE, True),
    "gpt2": (
        functools.partial(gpt2, vocab=128, embed=128, layers=4, heads=8, positions=16),
        {"embed": 32, "heads": 2, "layers": 1},
        True,
    ),
    "a user's own": (
        functools.partial(Learned, vocab=128, embed=128, layers=4, heads=8, positions=16),
        {"embed": 32, "heads": 2, "layers": 1},
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_first_values_are_those_of_the_base_times_what_the_paper_says(name):
    make, base, tied = CASES[name]

    @jax.jit
    def both(key):
        return CompleteP(base).scaled(make).begun(make(key=key)), make(**base, key=key)

    begun, first = map(by_path, jax.device_get(both(jax.random.key(0))))
    for path, array in begun.items():
        row = of_paper(path, tied)
        size = math.sqrt(np.mean(np.square(first[path], dtype=np.float64)))
        expected = size * math.sqrt(row["variance"]) * row["multiplier"]
        found = math.sqrt(np.mean(np.square(array, dtype=np.float64)))
        assert found == pytest.approx(expected, rel=0.1), path


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_paper_s_adam_on_what_stands_behind_multipliers(name):
    make, base, tied = CASES[name]
    """Two steps in float64, of gradients that epsilon, clipping and decay all act on."""
    rate, b1, b2, epsilon, decay, clip = 1e-2, 0.9, 0.95, 0.3, 0.1, 0.5
    made = adamw(
        2, rate, warmup_constant, b1, b2, epsilon, decay, clip,
        scaled=CompleteP(base).scaled(make),
    )  # fmt: skip
    model = jax.eval_shape(lambda: make(key=jax.random.key(0)))
    shapes, tree = by_path(model), jax.tree.structure(model)
    draw = np.random.default_rng(0)
    weights = {path: draw.normal(size=one.shape) for path, one in shapes.items()}
    found = jax.tree.unflatten(tree, [jnp.float32(each) for each in weights.values()])
    state = made.transformation.init(found)
    update = jax.jit(made.transformation.update)
    first = {path: np.zeros(one.shape) for path, one in shapes.items()}
    second = {path: np.zeros(one.shape) for path, one in shapes.items()}
    decays = {path: one.declaration.decays for path, one in named_weights(model).items()}
    rows = {path: of_paper(path, tied) for path in shapes}
    behind = {path: each / rows[path]["multiplier"] for path, each in weights.items()}
    for step in (1, 2):
        gradients = {path: draw.normal(size=one.shape) for path, one in shapes.items()}
        given = jax.tree.unflatten(tree, [jnp.float32(each) for each in gradients.values()])
        updates, state = update(given, state, found)
        found = optax.apply_updates(found, updates)
        gradients = {path: each * rows[path]["multiplier"] for path, each in gradients.items()}
        norm = math.sqrt(sum(np.sum(each**2) for each in gradients.values()))
        for path, gradient in gradients.items():
            row, clipped = rows[path], gradient * min(1, clip / norm)
            first[path] = b1 * first[path] + (1 - b1) * clipped
            second[path] = b2 * second[path] + (1 - b2) * clipped**2
            root = np.sqrt(second[path] / (1 - b2**step)) + epsilon * row["epsilon"]
            own_rate = rate * row["rate"]
            own_decay = decay / row["rate"] if decays[path] else 0  # the paper's λ · m
            along = first[path] / (1 - b1**step) / root + own_decay * behind[path]
            behind[path] = behind[path] - own_rate * along
    for path, array in by_path(found).items():
        moved = behind[path] * rows[path]["multiplier"] - weights[path]
        np.testing.assert_allclose(array - np.float32(weights[path]), moved, rtol=2e-3, atol=1e-6)


def test_a_model_that_is_its_base_is_left_alone():
    make = functools.partial(LLAMA, **BASE)
    factors = CompleteP(BASE).scaled(make).factors
    assert {tuple(each) for each in factors.values()} == {(1.0,) * 5}


def test_a_model_smaller_than_its_base_is_the_other_way_round():
    large, small = LLAMA, functools.partial(LLAMA, **BASE)
    sizes = {"embed": 128, "heads": 8, "mlp": 256, "layers": 4}
    up, down = CompleteP(BASE).scaled(large).factors, CompleteP(sizes).scaled(small).factors
    for path, factors in up.items():
        assert np.multiply(factors, down[path]) == pytest.approx(1), path


def test_orthogonal_updates_change_outputs_alike_at_every_width_and_depth():
    """The norm of √(larger side) times an orthogonal matrix, times the factor, is √(outputs /
    inputs) in units of the base's. Matrices that write are also divided by the depth."""

    def norm(rows, columns):
        return math.sqrt(max(rows, columns))

    scaled = CompleteP(BASE).scaled(functools.partial(LLAMA, mlp=1024))
    of = named_weights(jax.eval_shape(functools.partial(LLAMA, mlp=1024), key=jax.random.key(0)))
    query = scaled.of_orthogonal(of["stack.patterns.0.0.attention.query"])
    assert query * norm(128, 128) / norm(32, 32) == pytest.approx(1)
    up = scaled.of_orthogonal(of["stack.patterns.0.0.mlp.up"])
    assert up * norm(128, 1024) / norm(32, 64) == pytest.approx(math.sqrt(16 / 4))
    down = scaled.of_orthogonal(of["stack.patterns.0.0.mlp.down"])
    assert down * norm(1024, 128) / norm(64, 32) == pytest.approx(math.sqrt(4 / 16) / 4)
    by_head = scaled.of_orthogonal(of["stack.patterns.0.0.attention.query"], ["heads"])
    assert by_head * norm(128, 16) / norm(32, 16) == pytest.approx(math.sqrt(1 / 4))


@pytest.mark.slow
def test_muon_takes_each_weight_by_its_own_rule():
    """Its first update, of matrices √(larger side) times an orthogonal one, of others Adam's."""
    scaled = CompleteP(BASE).scaled(LLAMA)
    model = jax.eval_shape(lambda: LLAMA(key=jax.random.key(0)))
    shapes, draw = by_path(model), np.random.default_rng(0)
    drawn = [jnp.float32(draw.normal(size=each.shape)) for each in shapes.values()]
    gradients = jax.tree.unflatten(jax.tree.structure(model), drawn)

    def updates(**more):
        made = muon(2, 1e-2, warmup_constant, clip_norm=None, weight_decay=0.0, **more)
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        state = made.transformation.init(zeros)
        return by_path(made.transformation.update(gradients, state, zeros)[0])

    plain, ruled = updates(), updates(scaled=scaled)
    for path, update in ruled.items():
        row = of_paper(path, tied=False)
        of_adam = row["rate"] * row["multiplier"]
        expected = {IN["rate"]: M**-0.5, OUT["rate"] / M: M**-1.5}
        factor = expected[of_adam] if len(shapes[path].shape) > 2 else of_adam
        np.testing.assert_allclose(update, plain[path] * factor, rtol=2e-3, atol=1e-6)


GEMMA = {"vocab": 64, "embed": 64, "heads": 4, "mlp": 128, "head_dim": 16}
REFUSED = {
    "adapters": (functools.partial(lora, of=LLAMA), BASE, "adapters"),
    "heads": (functools.partial(multi_token, of=LLAMA), BASE, "no rule for heads of multi-token"),
    "a size that it has not": (LLAMA, {"embedding": 3}, "no model can be made.*embedding"),
    "a size that makes no model": (LLAMA, {"heads": 3}, "no model can be made.*heads = 3"),
    "heads that grow": (LLAMA, {"embed": 32}, "head_dim is 4 in the base.*16 in the model"),
    "another pattern": (
        functools.partial(gemma2, **GEMMA, layers=4, tied=False),
        {"layers": 1},
        "base of scaling has a weight|has none",
    ),
    "norms after what is written": (
        functools.partial(gemma2, **GEMMA, layers=4, tied=False),
        {"layers": 2},
        "norm what they write",
    ),
    "a tied model whose last norm starts at zero": (
        functools.partial(gemma3, **GEMMA, layers=6),
        {"embed": 32, "heads": 2},
        "untie it",
    ),
}


@pytest.mark.parametrize(("make", "base", "said"), REFUSED.values(), ids=REFUSED)
def test_parts_without_a_rule_are_refused_in_words(make, base, said):
    with pytest.raises(ValueError, match=said):
        CompleteP(base).scaled(make)


@pytest.mark.parametrize("base", [{}, {"embed": 0}, {"layers": True}])
def test_sizes_are_sizes(base):
    with pytest.raises(ValueError, match=r"scaling\.base"):
        CompleteP(base)


def scaled_run(optimizer, scaling=True, **mesh):
    make = functools.partial(llama, vocab=64, embed=32, layers=2, heads=4, mlp=64)
    base = CompleteP({"embed": 16, "heads": 2, "mlp": 32, "layers": 1}) if scaling else None
    return experiment(make, mesh, optimizer=optimizer, scaling=base)


def test_an_optimizer_without_the_rule_is_refused():
    def sgd(steps):
        return Optimizer(optax.sgd(0.1), lambda step: 0.1, as_declared)

    with pytest.raises(ValueError, match="scaling is set, which it takes as `scaled`"):
        scaled_run(sgd).check()


@pytest.mark.slow
def test_a_run_begins_scaled_with_the_same_bits_on_every_mesh():
    adam = functools.partial(adamw, peak_lr=1e-2)
    made = scaled_run(adam, fsdp=4, tensor=2)
    made.check()
    split = made.recipe.new_model(made.mesh)
    single = scaled_run(adam)
    whole = single.recipe.new_model(single.mesh)
    jax.tree.map(np.testing.assert_array_equal, split, whole)
    plain = by_path(scaled_run(adam, scaling=False).recipe.make())
    head, expected = by_path(whole)["unembedding"], plain["unembedding"] * math.sqrt(1 / 2)
    np.testing.assert_allclose(head, expected, rtol=1e-6)
