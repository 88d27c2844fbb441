"""`python -m runner.plan`, through the command line."""

import json

import pytest
from aot import needs_gpu_compiler, needs_tpu_compiler
from compiled_programs import XLA_FLAGS
from forked_processes import run_forked, succeeded

from runner.command_line.exit_status import FINISHED

# The shipped data is absent, and the plan needs only its sizes.
SIZES = "vocab=512 embed=64 layers=2 heads=4 head_dim=16 kv_heads=2 mlp=128"
SMALL = (
    *("--fdl_config=experiments/llama_8b", *(f"--fdl.model.{size}" for size in SIZES.split())),
    *("--fdl.data.batch_size=8", "--fdl.data.sequence_length=64"),
)


# A user's machine: no variable says how many devices to simulate, or which to use.
UNTOLD = {"XLA_FLAGS": XLA_FLAGS, "JAX_PLATFORMS": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "devices"),
    [
        pytest.param("v5e:2x4", 8, marks=[needs_tpu_compiler, pytest.mark.slow]),
        pytest.param("h100:2x4", 8, marks=[needs_gpu_compiler, pytest.mark.slow]),
        ("cpu:2", 2),
    ],
)
def test_a_report_is_shown_written_and_kept(tmp_path, topology, devices):
    flags = (*SMALL, f"--topology={topology}", f"--json={tmp_path / 'report.json'}")
    environment = UNTOLD | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a kept program has no log
    done = succeeded("-m", "runner.plan", *flags, environment=environment)
    assert f"on {topology}, mesh fsdp {devices}\n" in done.stdout
    assert f"compiling the step for {topology}" in done.stderr

    report = json.loads((tmp_path / "report.json").read_text())
    parameters = 2 * 512 * 64 + 2 * (64 * 64 * 3 + 3 * 64 * 128 + 2 * 64) + 64
    assert report["parameters"] == parameters
    assert report["memory"]["parameters"] == 4 * parameters // devices
    assert {kept["name"] for kept in report["memory"]["saved"]} >= {"layer_input", "head_input"}
    assert {one["kind"] for one in report["collectives"]} >= {"all-gather"}
    assert report["flops"]["analytic"] > 0
    if topology.startswith("v5e"):  # the log counts both, and the gaps between temporaries once
        counted, fixed = report["memory"]["counted"], 8 * 2**20  # temporaries in fixed places
        of_log = counted["tpu_program"]
        assert counted["program"] < of_log < counted["program"] + counted["temporaries"] + fixed
        needed = counted["arguments"] + counted["outputs"] + of_log
        assert report["memory"]["needed"] == needed

    again = run_forked("-m", "runner.plan", *flags, environment=environment)
    assert again.returncode == FINISHED
    assert again.stdout == done.stdout
    assert "cached report" in again.stderr and "compiling" not in again.stderr


def test_without_a_topology_the_cost_of_the_run_is_shown():
    """An override may stand apart from its value, and an integer may be written as a float."""
    done = succeeded("-m", "runner.plan", *SMALL, "--fdl.steps", "3e3")
    weights = 512 * 64 + 2 * (64 * 64 * 3 + 3 * 64 * 128)  # that multiply
    totals = [3_000 * 512 * (6 * weights + attention * 2 * 4 * 16 * 64) for attention in (12, 6)]
    whole, causal = (f"{total:.1e}".replace("e+", "e") for total in totals)
    assert done.stdout.startswith(f"3,000 steps of 512 tokens; {whole} FLOPs, ")
    assert done.stdout.endswith(f"with causal attention these are {causal} FLOPs.\n")
