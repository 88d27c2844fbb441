"""Which settings of JAX belong to a run, and which to one of its processes."""

import fiddle as fdl
import jax
import numpy as np
import pytest
from small_experiment import small

from runner.jax_settings.numbers import changes, settings_of_numbers, settings_of_the_run


def test_what_changes_numbers_or_programs_is_compared_and_what_a_process_may_have_is_not():
    of_numbers, of_the_run = settings_of_numbers(), settings_of_the_run()
    assert of_numbers.items() <= of_the_run.items()
    assert of_numbers["JAX_DEFAULT_PRNG_IMPL"] == "threefry2x32"
    assert {"JAX_DEBUG_NANS", "JAX_ERROR_CHECKING_BEHAVIOR_NAN", "JAX_USE_SHARDY_PARTITIONER"} <= (
        of_the_run.keys() - of_numbers.keys()
    )
    assert of_the_run.keys().isdisjoint(
        {
            "JAX_COMPILATION_CACHE_DIR",
            "JAX_CUDA_VISIBLE_DEVICES",
            "JAX_DUMP_IR_TO",
            "JAX_LOG_COMPILES",
            "JAX_NUM_CPU_DEVICES",
            "JAX_PLATFORMS",
            "JAX_TRACEBACK_FILTERING",
            "JAX_TRANSFER_GUARD",
        }
    )


@pytest.mark.landing
@pytest.mark.parametrize(
    "setting", [jax.default_prng_impl("rbg"), jax.threefry_partitionable(False)]
)
def test_a_setting_that_is_told_has_changed_the_first_weights(setting):
    def table():
        state = fdl.build(small()).initial_state()
        return np.asarray(state.model.table_VE)

    before, settings = table(), settings_of_numbers()
    np.testing.assert_array_equal(table(), before)
    assert changes(settings, settings_of_numbers()) == ""
    with setting:
        assert not np.array_equal(table(), before)
        assert " was " in changes(settings, settings_of_numbers())


def test_the_variable_of_cublas_is_among_them(monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    before = settings_of_numbers()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert changes(before, settings_of_numbers()) == "NVIDIA_TF32_OVERRIDE was unset and is 0"


def test_a_setting_that_one_version_of_jax_lacks_is_not_compared():
    now = settings_of_numbers()
    assert changes({"JAX_OF_ANOTHER_VERSION": "true"}, now) == ""
