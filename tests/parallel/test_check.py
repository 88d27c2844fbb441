import functools

import jax
import pytest
from refusals import refusals

from lmlib.compute import Compute
from lmlib.models.families.llama import llama
from lmlib.parallel.axes import LayoutError
from lmlib.parallel.check import check_batch, check_model
from lmlib.parallel.mesh import make_mesh

pytestmark = pytest.mark.several_devices

SPLIT, TWO = Compute(sequence_parallel=True), Compute(pipeline_rows=2)


def model(**sizes):
    settings = {"vocab": 64, "embed": 32, "layers": 2, "heads": 8, "kv_heads": 2, "mlp": 48}
    return jax.eval_shape(functools.partial(llama, **(settings | sizes), key=jax.random.key(0)))


def test_valid_settings_pass():
    check_model(model(), make_mesh(fsdp=4, tensor=2))
    # Fewer key and value heads than places, which they divide, are repeated.
    check_model(model(), make_mesh(tensor=4))
    check_batch(16, 32, 2, SPLIT, make_mesh(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(("sizes", "mesh", "message"), refusals(__file__, "models"))
def test_a_misfit_names_parameter_axis_both_numbers_and_a_remedy(sizes, mesh, message):
    with pytest.raises(LayoutError, match=message):
        check_model(model(**sizes), make_mesh(**mesh))


@pytest.mark.parametrize(("arguments", "mesh", "message"), refusals(__file__, "batches"))
def test_a_batch_that_does_not_split_is_named(arguments, mesh, message):
    *numbers, settings = arguments
    with pytest.raises(LayoutError, match=message):
        check_batch(*numbers, Compute(**settings), make_mesh(*mesh))
    check_batch(8, 30, 1, Compute(), make_mesh(tensor=4))
    check_batch(16, 32, 2, TWO, make_mesh(stage=2, fsdp=2))
    check_batch(12, 32, 1, TWO, make_mesh(fsdp=4))


def test_stages_need_layers():
    check_model(model(layers=5, embed=32), make_mesh(stage=4, fsdp=2))
    with pytest.raises(LayoutError, match=r"stage=4 needs .*the model has 2: no stage"):
        check_model(model(), make_mesh(stage=4, fsdp=2))
