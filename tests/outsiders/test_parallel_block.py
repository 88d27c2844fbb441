"""A layer whose attention and mlp read the same norm and are added together (Chowdhery et al. 2022,
arXiv:2204.02311, §2), of Llama's parts. Nothing of lmlib is edited."""

import functools

import jax
import pytest
from outsider_runs import EIGHT, SIZES, check_outsider, experiment

from lmlib.models.decoder import Decoder
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary
from lmlib.models.stack import Segment
from lmlib.models.weights import fold
from lmlib.parallel.layout import share

pytestmark = pytest.mark.several_devices
LAYERS, HEADS, HEAD_DIM, MLP = 2, 4, 8, 16


class Together(Part):
    norm: RMSNorm
    attention: Attention
    mlp: GatedMLP

    def __init__(self, key):
        embed = SIZES["embed"]
        self.norm = RMSNorm(embed=embed, key=key)
        rotary = Rotary(HEAD_DIM)
        self.attention = Attention(
            embed, HEADS, HEADS, HEAD_DIM, rotary, key=fold(key, "attention")
        )
        self.mlp = GatedMLP(embed, MLP, key=fold(key, "mlp"))

    def __call__(self, x_BSE, context, cache=None):
        h_BSE = share(self.norm(x_BSE), "batch seq embed")
        attended_BSE, cache = self.attention(h_BSE, context, cache)
        y_BSE, reports = self.mlp(h_BSE, context)
        return x_BSE + attended_BSE + y_BSE, reports, cache

    def empty_cache(self, rows, length, dtype):
        return self.attention.empty_cache(rows, length, dtype)


def parallel(key):
    norm = RMSNorm(embed=SIZES["embed"], key=key)
    return Decoder(**SIZES, segments=[Segment([Together], LAYERS)], norm=norm, key=key)


@pytest.mark.slow  # by default test_experts.py trains a layer from outside
def test_it_trains_as_on_one_device_and_resumes_bit_for_bit(tmp_path):
    check_outsider(experiment(parallel, EIGHT), experiment(parallel, {}), tmp_path)


def test_its_flops_are_six_for_each_parameter_and_twelve_for_each_key():
    model = jax.eval_shape(functools.partial(parallel, key=jax.random.key(0)))
    embed = SIZES["embed"]
    weights = LAYERS * (4 * embed * HEADS * HEAD_DIM + 3 * embed * MLP) + SIZES["vocab"] * embed
    attention = LAYERS * 12 * HEADS * HEAD_DIM * 16
    assert model.flops_per_token(16, causal=False) == 6 * weights + attention
