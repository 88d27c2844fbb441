"""The flags that a run sets for XLA."""

import os
import subprocess
import sys

import fiddle as fdl
import pytest

from runner.config.configs import load
from runner.jax_settings.determinism import check_determinism
from runner.jax_settings.xla_flags import (
    DETERMINISTIC,
    GRAPHS,
    IN_ORDER_ON_CPU,
    OVERLAP_ON_GPU,
    WITHOUT_GRAPHS,
    flags_of_the_run,
    keep_cpus_in_order,
    launch_kernels_one_by_one,
    make_deterministic,
    may_wait_for_ever,
    set_gpu_flags,
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, DETERMINISTIC),
        ("--xla_a=1", f"--xla_a=1 {DETERMINISTIC}"),
        ("--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
    ],
)
def test_it_is_added_and_overrides_nothing(before, after):
    environment = {} if before is None else {"XLA_FLAGS": before}
    make_deterministic(environment)
    assert environment["XLA_FLAGS"] == after


def test_kernels_are_launched_one_by_one_unless_the_user_wants_graphs():
    users = "--xla_gpu_enable_command_buffer=FUSION"
    for given, used in (("", WITHOUT_GRAPHS), (users, users)):
        environment = {"XLA_FLAGS": given}
        launch_kernels_one_by_one(environment)
        set_gpu_flags(environment)
        assert [flag for flag in environment["XLA_FLAGS"].split() if "buffer" in flag] == [used]


def test_overlap_leaves_what_the_user_set():
    off = "--xla_gpu_enable_pipelined_all_gather=false"
    environment = {"XLA_FLAGS": off, "LIBTPU_INIT_ARGS": "--xla_tpu_mine=1"}
    set_gpu_flags(environment)
    given = environment["XLA_FLAGS"].split()
    assert given[0] == off
    added = {flag for flag in OVERLAP_ON_GPU if "all_gather" not in flag}
    assert set(given[1:]) == {*added, GRAPHS}
    assert environment["LIBTPU_INIT_ARGS"] == "--xla_tpu_mine=1"
    again = dict(environment)
    set_gpu_flags(again)
    assert again == environment


@pytest.mark.parametrize(
    ("environment", "several_processes", "added"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, False, False),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, False, True),
        ({"JAX_NUM_CPU_DEVICES": "2"}, False, True),
        ({"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true"}, True, False),
    ],
)
def test_cpu_devices_are_kept_in_order_where_they_are_several(
    environment, several_processes, added
):
    before = environment.get("XLA_FLAGS", "").split()
    after = dict(environment)
    keep_cpus_in_order(several_processes, after)
    assert after.get("XLA_FLAGS", "").split() == [*before, *[IN_ORDER_ON_CPU][: int(added)]]


@pytest.mark.several_devices
def test_devices_without_order_are_noticed():
    """The tests have eight."""
    assert may_wait_for_ever({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    assert not may_wait_for_ever({"XLA_FLAGS": IN_ORDER_ON_CPU})


@pytest.mark.landing
@pytest.mark.parametrize(
    ("flags", "are_known"),
    [
        ((DETERMINISTIC, IN_ORDER_ON_CPU, *OVERLAP_ON_GPU), True),
        (("--xla_gpu_no_such_flag=true",), False),
    ],
)
def test_xla_knows_them(flags, are_known):
    """It ends the process at a flag that it does not know."""
    ended = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "XLA_FLAGS": " ".join(flags)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode == 0) == are_known, ended.stderr


def test_flags_that_must_be_the_same_for_all_processes():
    """Not where one of them writes what it compiles, or how many devices it simulates."""
    own = [
        "--xla_dump_to=/tmp/of_process_3",
        "--xla_gpu_dump_autotune_results_to=/tmp/of_process_3",
        "--xla_gpu_load_autotune_results_from=/tmp/of_process_3",
        "--xla_gpu_force_compilation_parallelism=4",
        "--xla_force_host_platform_device_count=2",
    ]
    flags = ["--xla_b=1", "--xla_cpu_enable_fast_math", *own, "--xla_a=x", "--xla_b=2"]
    environment = {"XLA_FLAGS": " ".join(flags), "LIBTPU_INIT_ARGS": "--port=1 --xla_tpu_a=1"}
    assert flags_of_the_run(environment) == {
        "XLA_FLAGS": {"--xla_a": "x", "--xla_b": "2", "--xla_cpu_enable_fast_math": "true"},
        "LIBTPU_INIT_ARGS": {"--xla_tpu_a": "1"},
    }
    assert not any(flags_of_the_run({}).values())


@pytest.mark.parametrize("source", ["data", "validation"])
@pytest.mark.parametrize(
    ("attention", "whole_rows", "flags", "platform", "refused"),
    [
        ("cudnn", False, DETERMINISTIC, "gpu", True),
        ("auto", True, DETERMINISTIC, "gpu", True),
        ("auto", True, "--xla_gpu_exclude_nondeterministic_ops", "gpu", True),
        ("auto", False, DETERMINISTIC, "gpu", False),
        ("triton", True, DETERMINISTIC, "gpu", False),
        ("auto", True, "--xla_gpu_deterministic_ops=false", "gpu", False),
        ("auto", True, DETERMINISTIC, "cpu", False),
    ],
)
def test_attention_that_cannot_give_the_same_bits_is_refused(
    source, attention, whole_rows, flags, platform, refused
):
    cfg = load("experiments/llama_84m", ["tiny"])
    cfg.compute.attention = attention
    experiment = fdl.build(cfg)
    getattr(experiment, source).whole_rows = whole_rows
    given = {"XLA_FLAGS": flags}, platform
    if not refused:
        check_determinism(experiment, *given)
        return
    with pytest.raises(ValueError, match=r"add --fdl\.compute\.attention=triton"):
        check_determinism(experiment, *given)
