import functools

import jax
import pytest

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


@pytest.mark.parametrize(
    ("sizes", "mesh", "messages"),
    [
        (
            {"heads": 12, "kv_heads": 3, "head_dim": 8},
            {"tensor": 2},
            [
                "stack.patterns.0.0.attention.key, stack.patterns.0.0.attention.value: axis "
                "'kv_heads' of size 3",
                "over tensor=2",
                "use tensor of 1 or 3, or kv_heads a multiple of 2 or a divisor of 2",
            ],
        ),
        (
            {"embed": 36, "head_dim": 8},
            {"fsdp": 8},
            ["embedding", "axis 'embed' of size 36", "fsdp=8", "use fsdp of 1, 2, 3, 4, 6, 9, 12"],
        ),
        (
            {"embed": 36, "head_dim": 8},
            {"fsdp": 2, "expert": 4},
            ["over fsdp=2 x expert=4 (size 36 is no", "use fsdp x expert of 1, 2, 3, 4, 6, 9, 12"],
        ),
        (
            {"vocab": 101, "mlp": 51},
            {"tensor": 2},
            ["axis 'vocab' of size 101", "axis 'mlp' of size 51", "use tensor of 1 or 101"],
        ),
    ],
)
def test_a_misfit_names_parameter_axis_both_numbers_and_a_remedy(sizes, mesh, messages):
    with pytest.raises(LayoutError) as error:
        check_model(model(**sizes), make_mesh(**mesh))
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "mesh", "message"),
    [
        ((12, 32, 1), (2, 4), r"axis 'batch' of size 12 .*data=2 x fsdp=4 .*multiple of 8"),
        ((16, 32, 4), (2, 4), r"each of 4 microbatches: axis 'batch' of size 4"),
        ((16, 32, 3), (2, 4), r"16 sequences do not .* into 3 microbatches; .*1, 2, 4, 8 or 16"),
        ((8, 30, 1, SPLIT), (1, 1, 4), r"axis 'seq_parallel' of size 30 .*tensor=4"),
        ((12, 32, 1, TWO), (1, 2, 1, 1, 1, 2), r"12 sequences .* 2 rows of each of 4 .*e of 8"),
    ],
)
def test_a_batch_that_does_not_split_is_named(arguments, mesh, message):
    every = arguments if len(arguments) > 3 else (*arguments, Compute())
    with pytest.raises(LayoutError, match=message):
        check_batch(*every, make_mesh(*mesh))
    check_batch(8, 30, 1, Compute(), make_mesh(tensor=4))
    check_batch(16, 32, 2, TWO, make_mesh(stage=2, fsdp=2))
    check_batch(12, 32, 1, TWO, make_mesh(fsdp=4))


def test_stages_need_layers():
    check_model(model(layers=5, embed=32), make_mesh(stage=4, fsdp=2))
    with pytest.raises(LayoutError, match=r"stage=4 needs .*the model has 2: no stage"):
        check_model(model(), make_mesh(stage=4, fsdp=2))
