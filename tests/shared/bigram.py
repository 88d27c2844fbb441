"""The smallest model there is: the logits depend only on the token before."""

import jax
from jaxtyping import Array, Float

from lmlib.models.model import Model, TrunkOutput, WeightGroup
from lmlib.models.part import ActivationNames
from lmlib.models.parts.embedding import embedded
from lmlib.models.weights import fan_in, initial_values, normal, weight


class Bigram(Model):
    table_VE: Float[Array, "vocab embed"] = weight(normal(1.0))
    head_EV: Float[Array, "embed vocab"] = weight(fan_in("embed"))

    def __init__(self, vocab, embed, *, key):
        sizes = {"vocab": vocab, "embed": embed}
        self.table_VE = initial_values(self, "table_VE", key, **sizes)
        self.head_EV = initial_values(self, "head_EV", jax.random.fold_in(key, 1), **sizes)

    def trunk(self, tokens_BS, context, cache=None):
        compute = context.compute
        return TrunkOutput(embedded(self.table_VE, tokens_BS, compute.dtype, compute.residual))

    def features(self, x_BSE, context):
        return x_BSE

    names = ActivationNames(scopes=("embed",))
    logit_cap = None
    vocab = property(lambda self: self.table_VE.shape[0])

    def unembedding_EV(self):
        return self.head_EV

    def flops_per_token(self, sequence_length, causal):
        return 6.0 * self.head_EV.size

    def weight_groups(self):
        return WeightGroup("embedding", self.table_VE), WeightGroup("unembedding", self.head_EV)

    def check(self, sequence_length, compute):
        pass
