"""Mistakes in the declaration of a weight or a part are refused by `Experiment.check`: the error
names the user's weight or class, and says what to change."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float
from outsider_runs import SIZES, experiment

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.part import ActivationNames, Part, check_part
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.stack import Segment
from lmlib.models.weights import fan_in, initial_values, weight, zeros
from lmlib.parallel.layout import spec

pytestmark = pytest.mark.several_devices

EMBED = SIZES["embed"]


OVER_EMBED = fan_in("embed")


def matrix(axes="embed mlp", initial=OVER_EMBED, **declared):
    return Float[Array, axes], weight(initial, **declared)


def setting(value):
    return type(value), eqx.field(), lambda: value


def mixer(base=Part, matrix=None, call=None, **attributes):
    """A mixer with one field `w`: its annotation, its declaration and, maybe, what makes it."""
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
    "a rule in part": (matrix("embed own", rules={"own": ("tensor", "x")}), rf"{W}: .*names 'x'"),
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
    "a string": (setting("silu"), r"attention\.w is 'silu', .*eqx\.field\(static=True\)"),
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


def test_what_is_declared_well_is_not_refused():
    refused(functools.partial(decoder, mixer(matrix=matrix("embed own", rules={"own": "tensor"}))))
