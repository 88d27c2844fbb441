"""Comparisons with others compare the same work, and see when they do not."""

import ast
import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from compiled_programs import XLA_FLAGS
from forked_processes import PATHS, run_forked

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def peers():
    """The modules beside the script, which finds them in its own folder."""
    sys.path.insert(0, str(BENCHMARKS))
    from step_peers import jax_step, lmlib_step, measure, work

    yield jax_step, lmlib_step, measure, work
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def reference(peers):
    """lmlib's losses at the smallest size."""
    _, lmlib_step, measure, work = peers
    tiny = work.Work(work.SIZES["tiny"], "float32", measure.STEPS)
    return tiny, lmlib_step.LmlibStep(tiny).run(range(measure.STEPS))


def run(*arguments, script="train_step.py"):
    return run_forked(BENCHMARKS / script, *arguments, environment={"JAX_PLATFORMS": "cpu"})


@pytest.mark.slow
def test_lmlib_and_its_peers_make_the_same_losses():
    ran = run("--sizes=tiny_recomputed", "--peers=jax,pytorch_eager", "--precisions=float32")
    assert ran.returncode == 0, ran.stderr
    for name in ("lmlib", "jax"):
        rows = re.findall(rf"^{name} .* (\S+)$", ran.stdout, re.MULTILINE)
        assert len(rows) == 1 and float(rows[0]) <= 1e-4
    pytorch = r"^pytorch_eager " if importlib.util.find_spec("torch") else "PyTorch: not installed"
    assert re.search(pytorch, ran.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"learning_rate": 0.99e-3},
        {"weight_decay": 0.0},
        {"clip_norm": 0.05},
    ],
)
def test_other_numbers_are_noticed(peers, reference, change):
    jax_step, _, measure, _ = peers
    work, expected = reference
    adamw = dataclasses.replace(work.size.adamw, **change)
    other = dataclasses.replace(work, size=dataclasses.replace(work.size, adamw=adamw))
    losses = jax_step.BareJaxStep(other).run(range(measure.STEPS))
    problem = measure.other_work("jax", losses, expected, "float32")
    noticed = problem and problem.startswith("jax does not do lmlib's work: in float32, its loss")
    assert noticed if change else problem is None


def test_a_loss_that_is_not_a_number_is_noticed(peers):
    measure = peers[2]
    problem = measure.other_work("jax", [2.0, float("nan")], [2.0, 2.0], "bfloat16")
    assert "at step 1 is nan" in problem
    assert math.isnan(measure.largest_difference([2.0, float("nan"), 4.0], [2.0, 2.0, 2.0]))


@pytest.mark.slow
def test_generation_is_measured_beside_peers_that_make_the_same_tokens():
    ran = run("--sizes=tiny", "--rows=1", "--turns=1", script="generate.py")
    assert ran.returncode == 0, ran.stderr
    (row,) = re.findall(r"^lmlib .*$", ran.stdout, re.MULTILINE)
    prefill, _, decoding, _, share = (float(each.replace(",", "")) for each in row.split()[1:])
    assert prefill > 0 and decoding > 0 and share > 0
    here = importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")
    peer = r"^transformers_compiled " if here else "transformers: not installed"
    assert re.search(peer, ran.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_compared_with_an_undisturbed_one():
    experiment = "--fdl_config=experiments/llama_84m", "--fiddler=tiny", "--fiddler=synthetic"
    ran = run("--steps=20", "--", *experiment, script="same_bits.py")
    assert ran.returncode == 0, ran.stderr
    lines = r"^killed after step 1\d .* no bit$", r"^without the flag .* no bit$"
    assert all(re.search(line, ran.stdout, re.MULTILINE) for line in lines)


@pytest.mark.slow
def test_serving_is_measured_beside_loops_that_make_the_same_tokens():
    few = "--served=tiny", "--at_once=1,4", "--rounds=1"
    ran = run(*few, "--beside=generate", script="serving.py")
    assert ran.returncode == 0, ran.stderr
    here = importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")
    for name in ("engine", "loop", *(["generate"] if here else [])):
        (row,) = re.findall(rf"^{name} .*$", ran.stdout, re.MULTILINE)
        assert all(float(each.replace(",", "")) > 0 for each in row.split()[1:])
    waits = re.findall(r"^\d+ +(\d\.\d+)$", ran.stdout, re.MULTILINE)
    assert len(waits) == 3 and all(float(each) > 0 for each in waits)


@pytest.mark.slow
def test_a_mixture_is_measured_beside_peers_of_its_losses_and_a_hybrid_alone():
    ran = run("--sizes=tiny_mixture,tiny_hybrid", "--precisions=float32")
    assert ran.returncode == 0, ran.stderr
    assert "each token through 2 of 4 experts" in ran.stdout
    mixture, _, hybrid = ran.stdout.partition("\ntiny_hybrid: 0.1 M parameters")
    assert re.search(r"^lmlib .* 0.0e\+00$", hybrid, re.MULTILINE) and "pytorch" not in hybrid
    last = dict(re.findall(r"^(\w+) .*\d\.\d{3} .* (\S+)$", mixture, re.MULTILINE))
    assert last["lmlib"] == "0.0e+00" and last["dense"] == "work"  # "other work"
    here = importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")
    peers = ("pytorch_eager", "transformers", "transformers_grouped") if here else ()
    assert all(float(last[name]) <= 1e-4 for name in peers)


@pytest.mark.slow
def test_recurrent_layers_are_measured_beside_layers_of_as_many_parameters():
    few = "--size=tiny", "--parts=layers,decoding", "--lengths=64", "--contexts=64", "--turns=1"
    ran = run(*few, script="hybrids.py")
    assert ran.returncode == 0, ran.stderr
    names = "Gated DeltaNet", "Mamba-2", "attention"
    here = importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")
    peers = [f"{name}, transformers" for name in names[:2]] if here else []
    for name, tables in [*((name, 2) for name in names), *((name, 1) for name in peers)]:
        rows = re.findall(rf"^{name}  +([\d,]+)$", ran.stdout, re.MULTILINE)
        assert len(rows) == tables and all(float(each.replace(",", "")) > 0 for each in rows)


@pytest.mark.slow
def test_quality_is_compared_at_the_same_cpu_seconds():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    few = "--fiddler=tiny", "--steps=4", "--seeds=2", "--rates=2e-3,4e-3"
    given = {"PYTHONPATH": PATHS, "XLA_FLAGS": XLA_FLAGS}
    ran = subprocess.run(  # PyTorch compiles in threads, which a fork does not have
        [sys.executable, BENCHMARKS / "quality.py", *few],
        env=os.environ | given,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall(r"^seed 0: GPT", ran.stderr, re.MULTILINE)) == 2  # one for each rate
    ours, theirs = (
        [float(each) for each in re.search(rf"^{name} +(.*) +\S+$", ran.stdout, re.M)[1].split()]
        for name in ("lmlib", "GPT")
    )
    assert theirs[2] >= ours[2] > 0  # CPU-seconds
    assert all(0 < bits < 9 for bits in (*ours[:2], *theirs[:2]))  # 512 tokens are 9 bits
    error = r"^lmlib - GPT: [+-]\d\.\d+ ± \d\.\d+ bits per byte$"
    assert re.search(error, ran.stdout, re.MULTILINE)


def test_every_fault_of_the_campaign_can_be_put_in():
    """benchmarks/mutations.toml, whose faults are in files that change."""
    faults = tomllib.loads((BENCHMARKS / "mutations.toml").read_text(encoding="utf-8"))
    for file, fault in ((file, each) for file, listed in faults.items() for each in listed):
        before, after = fault["before"], fault["after"]
        text = (BENCHMARKS.parent / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{file} must have {before!r} once"
        if file.endswith(".py"):
            assert ast.dump(ast.parse(text.replace(before, after))) != ast.dump(ast.parse(text))
        tests = fault["tests"].split()
        assert all((BENCHMARKS.parent / each).exists() for each in tests), fault["what"]
    packages = {file.partition("/")[0] for file in faults}
    assert packages == {"lmlib", "data_tools", "runner", "experiments"}
