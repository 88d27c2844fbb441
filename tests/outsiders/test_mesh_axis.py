"""Experts along an axis of the mesh that lmlib does not know, and along one that splits batches.
All experts are computed, each on its own devices, and mixed. Nothing of lmlib is edited."""

import functools

import jax
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float
from outsider_runs import SIZES, check_outsider, experiment

from lmlib.models.families.llama import llama
from lmlib.models.matmul import matmul
from lmlib.models.part import NO_AUX, Part
from lmlib.models.weights import fan_in, fill, weight
from lmlib.parallel.axes import LayoutError
from lmlib.parallel.layout import reshard

pytestmark = pytest.mark.several_devices


def experts(along, tokens):
    """A class of experts along a mesh axis; `tokens` splits the batch that they are given."""
    rules = {"experts": along, "choice": None}

    class Experts(Part):
        router: Float[Array, "embed choice"] = weight(fan_in("embed"), rules=rules)
        up: Float[Array, "experts embed mlp"] = weight(fan_in("embed"), rules=rules)
        down: Float[Array, "experts mlp embed"] = weight(fan_in("mlp"), rules=rules)

        def __init__(self, embed, mlp, residual_scale, *, key):
            fill(self, key, embed=embed, mlp=mlp, experts=4, choice=4)

        def __call__(self, x_BSE, context):
            # The shares get the layout of the experts.
            share_BSX = jax.nn.softmax(matmul("bse,ex->bsx", x_BSE, self.router))
            whole = jax.sharding.get_abstract_mesh().empty
            if not whole:
                layout = jax.typeof(x_BSE).sharding.spec
                x_BSE = jax.sharding.reshard(x_BSE, layout.update(partitions=(tokens, None, None)))
                share_BSX = jax.sharding.reshard(share_BSX, PartitionSpec(tokens, None, along))
            h_BSXF = jax.nn.silu(matmul("bse,xef->bsxf", x_BSE, self.up)) * share_BSX[..., None]
            out = None if whole else PartitionSpec(tokens, None, None)
            y_BSE = matmul("bsxf,xfe->bse", h_BSXF, self.down, out_sharding=out)
            return reshard(y_BSE, context.compute.residual), NO_AUX

    return Experts


UNKNOWN = experts("own", ("data", "fsdp", "expert"))
OVER_FSDP = experts("fsdp", ("data", "expert"))


def run_of(feed_forward, **mesh):
    model = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16, feed_forward=feed_forward)
    return experiment(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feed_forward", "mesh"),
    [
        (UNKNOWN, {"fsdp": 2, "tensor": 2, "others": {"own": 2}}),
        # The test below asks for the layout of these by default.
        (OVER_FSDP, {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
    ids=["an axis of its own", "over fsdp"],
)
def test_experts_train_as_on_one_device_and_resume_bit_for_bit(feed_forward, mesh, tmp_path):
    one = {"others": {axis: 1 for axis in mesh.get("others", {})}}
    check_outsider(run_of(feed_forward, **mesh), run_of(feed_forward, **one), tmp_path)


def test_weights_computed_over_fsdp_are_stored_over_fsdp():
    ((block,),) = run_of(OVER_FSDP, fsdp=2, tensor=2).abstract_state().model.stack.patterns
    assert block.mlp.up.sharding.spec == PartitionSpec(None, "fsdp", "expert", "tensor")
    assert block.mlp.router.sharding.spec == PartitionSpec(None, ("fsdp", "expert"), None)


def test_two_axes_of_a_weight_along_one_of_the_mesh_are_refused():
    run = run_of(experts("tensor", "data"), tensor=2)
    with pytest.raises(
        LayoutError, match=r"stack.patterns.0.0.mlp.up: axes 'experts' and 'mlp' .* 'tensor'"
    ):
        run.check()
