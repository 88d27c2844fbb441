"""A mixture of experts whose router has a loss, a statistic, and a bias that no gradient changes
(Wang et al. 2024, arXiv:2408.15664). Nothing of lmlib is edited."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lmlib.models.matmul import matmul
from lmlib.models.part import ActivationNames, AuxOutputs, Part
from lmlib.models.weights import fan_in, fill, product_flops, weight, zeros
from lmlib.parallel.layout import spec

EXPERTS, RATE = 4, 0.01
WHOLE = {"experts": None, "choice": None}


class Experts(Part):
    """Two of four experts for each token; all are computed."""

    names = ActivationNames(saved=("router",), scopes=("router", "mlp"))

    router: Float[Array, "embed choice"] = weight(fan_in("embed"), rules=WHOLE, dtype="float32")
    bias: Float[Array, "choice"] = weight(zeros, rules=WHOLE, dtype="float32", gradient=False)
    up: Float[Array, "experts embed mlp"] = weight(fan_in("embed"), rules=WHOLE)
    down: Float[Array, "experts mlp embed"] = weight(fan_in("mlp"), rules=WHOLE)

    def __init__(self, embed, mlp, residual_scale, *, key):
        fill(self, key, embed=embed, mlp=mlp, experts=EXPERTS, choice=EXPERTS)

    def __call__(self, x_BSE, context):
        with jax.named_scope("router"):
            scores_BSX = matmul("bse,ex->bsx", x_BSE.astype(jnp.float32), self.router)
            share_BSX = checkpoint_name(jax.nn.softmax(scores_BSX), "router")
            _, choices_BS2 = jax.lax.top_k(share_BSX + self.bias, 2)
            chosen_BSX = jnp.sum(jax.nn.one_hot(choices_BS2, EXPERTS), axis=-2)
        with jax.named_scope("mlp"):
            h_BSXF = jax.nn.silu(matmul("bse,xef->bsxf", x_BSE, self.up))
            h_BSXF *= (share_BSX * chosen_BSX).astype(x_BSE.dtype)[..., None]
            out = spec(context.compute.residual)
            y_BSE = matmul("bsxf,xfe->bse", h_BSXF, self.down, out_sharding=out)
        tallies_X = context.total(chosen_BSX)
        return y_BSE, AuxOutputs(
            losses={"router_z": context.total(jax.nn.logsumexp(scores_BSX, axis=-1) ** 2)},
            statistics={"first_choice": context.total(jnp.max(share_BSX, axis=-1))},
            tallies=tallies_X,
        )

    def updated(self, tallies_X):
        mean = jnp.mean(tallies_X)
        moved_X = self.bias + RATE * (mean - tallies_X) / mean
        return eqx.tree_at(lambda experts: experts.bias, self, moved_X)

    def flops_per_token(self, sequence_length, causal):
        return product_flops(self) - 3.0 * (self.up.size + self.down.size)  # two of four
