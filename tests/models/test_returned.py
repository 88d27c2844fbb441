"""Mistakes in a user's part are refused by name. `Experiment.check` finds wrong declarations, and
tracing finds wrong returned values. Nothing is unpacked along the batch or broadcast."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float
from outsider_runs import SIZES, experiment

from lmlib import NextToken
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.losses.objective import LossSums
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.part import ActivationNames, AuxOutputs, Part, check_part
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.stack import Segment
from lmlib.models.weights import fan_in, initial_values, weight, zeros
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.parallel.axes import PartError
from lmlib.parallel.layout import reshard, sharding, spec
from lmlib.parallel.mesh import make_mesh

EMBED = SIZES["embed"]


def runs(attention=None, mlp=None, layer=Block, model=None, **settings):
    """That a step of a model with these functions as parts is refused when it is traced."""
    source = Synthetic(vocab_size=64, batch_size=2, sequence_length=8)  # two rows: unpacks to two

    def made_by(call):
        class Mine(Part):
            def __call__(self, *arguments):
                return call(*arguments)

        return Mine()

    def one(key):
        mixer = made_by(attention or (lambda x, context, cache: (as_it_lies(x, context), cache)))
        feed = GatedMLP(EMBED, 16, key=key) if mlp is None else made_by(mlp)
        return layer(mixer, feed, RMSNorm(embed=EMBED, key=key))

    make = model or functools.partial(Decoder, **SIZES, segments=[Segment([one], 1)])
    run = experiment(make, {"fsdp": 1}, **settings)
    object.__setattr__(run, "data", source)
    return run


def as_it_lies(x_BSE, context):
    return reshard(x_BSE, context.compute.residual)


def aux(losses=None, statistics=None):
    def call(x_BSE, context):
        return as_it_lies(x_BSE, context), AuxOutputs(losses or {}, statistics or {})

    return call


class ThreeRows(Block):
    def __call__(self, x_BSE, context, cache=None):
        return super().__call__(x_BSE, context, cache)[0]


class Sums(NextToken):
    def sums(self, *arguments, **others):
        sums = super().sums(*arguments, **others)
        return sums.loss_sum, sums.reported


class Nothing(NextToken):
    def sums(self, model, reference_model, batch, compute, key=None):
        return LossSums(super().sums(model, reference_model, batch, compute, key).loss_sum, {})


class NoTrunk(Decoder):
    def trunk(self, tokens_BS, context, cache=None):
        return super().trunk(tokens_BS, context, cache).x_BSE


def optimizer(update):
    def make(steps):
        transformation = optax.GradientTransformation(lambda weights: (), update)
        return Optimizer(transformation, optax.constant_schedule(0.1), as_declared)

    return make


CASES = {
    "mixer, an array": (
        {"attention": lambda x, context, cache: x},
        r"Mine must return a tuple \(y_BSE, cache\), got an array float32\[2, 8, 32\]",
    ),
    "mixer, broadcast": (
        {"attention": lambda x, context, cache: (x[:, :1], cache)},
        r"shape and dtype of its input, an array float32\[2, 8, 32\], got an array float32\[2, 1",
    ),
    "mixer, dtype": (
        {"attention": lambda x, context, cache: (x.astype("bfloat16"), cache)},
        r"got an array bfloat16\[2, 8, 32\]",
    ),
    "mixer, its input": (
        {"attention": lambda x, context, cache: (x, cache)},
        r"layout of the residual stream.*return `reshard\(y_BSE, context.compute.residual\)`",
    ),
    "mlp, an array": (
        {"mlp": lambda x, context: x},
        r"Mine must return a tuple \(y_BSE, reports\), got an array",
    ),
    "mlp, no reports": (
        {"mlp": lambda x, context: (as_it_lies(x, context), None)},
        "must return aux, a .*got None",
    ),
    "mlp, a statistic of each row": (
        {"mlp": aux(statistics={"mean": jnp.ones(2)})},
        r"JAX scalar as statistics\['mean'\], got an array float32\[2\]",
    ),
    "layer": ({"layer": ThreeRows}, r"ThreeRows must return a tuple \(y_BSE, reports, cache\)"),
    "trunk": (
        {"model": functools.partial(NoTrunk, **SIZES, segments=[])},
        "NoTrunk.trunk must return a lmlib.models.model.TrunkOutput",
    ),
    "sums": ({"objective": Sums()}, "Sums.sums must return LossSums, got a tuple"),
    "sums, nothing": ({"objective": Nothing()}, "Nothing has the metric 'loss', but its sums"),
    "optimizer, updates alone": (
        {"optimizer": optimizer(lambda updates, state, weights: updates)},
        r"must return a tuple \(updates, state\), got a Decoder",
    ),
    "optimizer, broadcast": (
        {"optimizer": optimizer(lambda g, state, weights: (jax.tree.map(jnp.mean, g), state))},
        r"state of the shapes that it was given: \['updates'\]\.embedding has \(\) instead of",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_invalid_results_are_refused_by_name(case):
    parts, message = CASES[case]
    if case == "trunk":
        full = runs().model.keywords["segments"]
        parts = {"model": functools.partial(NoTrunk, **SIZES, segments=full)}
    with pytest.raises(PartError, match=message):
        runs(**parts).trace_step()


def test_an_optimizer_is_one_of_lmlibs():
    with pytest.raises(ValueError, match=r"must return a lmlib.optim.Optimizer.*from_optax"):
        runs(optimizer=lambda steps: optax.sgd(0.1)).check()


class Longer(Synthetic):
    """Gives more tokens than it promises, which would be cut off."""

    def batch(self, step, rows=slice(None)):
        return Synthetic(64, self.batch_size, self.sequence_length + 8).batch(step, rows)


def test_a_source_gives_the_rows_that_it_promises():
    longer = Longer(vocab_size=64, batch_size=2, sequence_length=8)
    with pytest.raises(ValueError, match=r"Longer.batch\(3\) must give tokens of 2 rows of 8"):
        place(longer, 3, sharding("batch seq", make_mesh(fsdp=1)))


def test_parts_that_return_what_they_should_are_traced():
    assert runs(mlp=aux({"z": jnp.ones(())})).trace_step()


pytestmark = pytest.mark.several_devices


OVER_EMBED = fan_in("embed")


def matrix(axes="embed mlp", initial=OVER_EMBED, **declared):
    return Float[Array, axes], weight(initial, **declared)


def setting(value):
    return type(value), eqx.field(), lambda: value


def mixer(base=Part, matrix=None, call=None, **attributes):
    """A mixer with one field `w`: its annotation, its declaration and, optionally, its maker."""
    annotation, declared, *made = matrix or (Float[Array, "embed mlp"], weight(fan_in("embed")))

    def usual(self, x_BSE, context, cache=None):
        y_BSE = jnp.zeros_like(x_BSE, out_sharding=spec(context.compute.residual))
        return y_BSE, cache

    class Mine(base):
        w: annotation = declared

        def __init__(self, *, key):
            sizes = {"embed": EMBED, "mlp": 16, "own": 16}
            self.w = made[0]() if made else initial_values(self, "w", key, **sizes)

        __call__ = call or usual

    for name, value in attributes.items():
        setattr(Mine, name, value)
    return Mine


def decoder(part, mlp=GatedMLP, key=None):
    def layer(key):
        feed = mlp(EMBED, 16, key=key) if mlp is GatedMLP else mlp(key=key)
        return Block(part(key=key), feed, RMSNorm(embed=EMBED, key=key))

    return Decoder(**SIZES, segments=[Segment([layer], 2)], key=key)


def refused(make):
    experiment(make, {"fsdp": 2, "tensor": 2}).check()


W = r"stack\.patterns\.0\.0\.attention\.w"
OF_WEIGHTS = {
    "two equal axes": (matrix("embed embed"), rf"{W}: two axes .* named 'embed'.*embed_out"),
    "a rule the mesh lacks": (
        matrix("embed own", rules={"own": "nowhere"}),
        rf"{W}: the rule of axis 'own' names 'nowhere', which the mesh lacks \(it has data,",
    ),
    "a rule twice": (
        matrix("embed own", rules={"own": ("tensor", "tensor")}),
        rf"{W}: the rule of axis 'own' names 'tensor' twice",
    ),
    "fan_in of no axis": (matrix(initial=fan_in("emdeb")), r"Mine\.w begins with fan_in\('emdeb'"),
    "a deviation": (
        matrix(initial=lambda part: 0.02),
        r"Mine\.w: initial values must be zeros.*got 0\.02",
    ),
    "dtype": (matrix(dtype="flaot32"), rf"{W}: its dtype must be .*got 'flaot32'"),
    "rate": (matrix(learning_rate=-0.1), rf"{W}: its learning_rate must be .*got -0\.1"),
    "integers": ((*matrix(), lambda: jnp.zeros((EMBED, 16), int)), rf"{W} must be float32, got in"),
    "fewer axes": (
        (*matrix("embed mlp choice", zeros), lambda: jnp.zeros((EMBED, 16))),
        r"attention\.w has shape \(32, 16\) but names the axes embed mlp choice",
    ),
    "a float": (setting(2.0), r"attention\.w is 2\.0, .*eqx\.field\(static=True\)"),
    "a function": (setting(jax.nn.silu), r"attention\.w is .*silu.*eqx\.field\(static=True\)"),
}


@pytest.mark.parametrize("case", OF_WEIGHTS)
def test_a_weight_that_is_declared_wrongly_is_named(case):
    declared, message = OF_WEIGHTS[case]
    with pytest.raises(ValueError, match=message):
        refused(functools.partial(decoder, mixer(matrix=declared)))


NO_PART = r"Mine is not a lmlib\.models\.part\.Part: make it a subclass"


def test_a_layer_that_is_not_a_part_is_named():
    def make(key):
        layer = Segment([lambda key: mixer(eqx.Module)(key=key)], 1)
        return Decoder(**SIZES, segments=[layer], key=key)

    with pytest.raises(ValueError, match=NO_PART):
        refused(make)


def test_a_mixer_that_is_not_a_part_is_named():
    """Asked directly, since annotations, which the tests check, refuse it in a block."""
    with pytest.raises(ValueError, match=NO_PART):
        check_part(mixer(eqx.Module)(key=jax.random.key(0)), "x_BSE", "context", "cache")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"names": ("hidden",)}, r"Mine\.names must be .*Names.*got \('hidden',\)"),
        (
            {"names": ActivationNames(saved="hidden")},
            r"Mine\.names must be .*two tuples.*saved='hidden'",
        ),
        ({"call": lambda self, x_BSE, context: (x_BSE, None)}, r"Mine is called with \(x_BSE, con"),
    ],
    ids=["tuple", "string", "arguments"],
)
def test_a_part_that_is_declared_wrongly_is_named(attributes, message):
    with pytest.raises(ValueError, match=message):
        refused(functools.partial(decoder, mixer(**attributes)))


def test_valid_declarations_are_accepted():
    refused(functools.partial(decoder, mixer(matrix=matrix("embed own", rules={"own": "tensor"}))))
