"""A run that starts with the compiled step of another one, through the real command line."""

import json
from pathlib import Path

import pytest
from forked_processes import Ended, run_forked
from small_runs import EXPERIMENT

from runner.command_line.exit_status import MISTAKE


def run(workdir: Path, *flags: str) -> Ended:
    return run_forked("-m", "runner", *EXPERIMENT, "--fdl.steps=3", f"--workdir={workdir}", *flags)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run, and its compiled step."""
    folder = tmp_path_factory.mktemp("compiled")
    # JAX keeps its program in a cache now, from where it could not be saved again.
    assert run(folder / "first").returncode == 0
    done = run(folder / "saving", f"--save_compiled={folder / 'step'}")
    assert done.returncode == 0, done.stderr
    assert "compiled the step in" in done.stderr
    assert f"wrote the compiled step to {folder / 'step'}" in done.stderr
    return folder


def losses(workdir: Path) -> list[float]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_another_process_takes_it_and_trains_to_the_same_bits(saved):
    done = run(saved / "second", f"--compiled={saved / 'step'}")
    assert done.returncode == 0, done.stderr
    assert f"took the compiled step out of {saved / 'step'}" in done.stderr
    assert "compiled the step in" not in done.stderr
    assert losses(saved / "second") == losses(saved / "first")
    assert len(losses(saved / "first")) == 3


@pytest.mark.slow
def test_a_run_of_another_length_and_rate_takes_it_too(saved, tmp_path):
    flags = ("--fdl.optimizer.peak_lr=1e-4", "--fdl.optimizer.weight_decay=0.0", "--fdl.steps=4")
    done = run(tmp_path / "compiled", *flags, "--fdl.seed=1", f"--compiled={saved / 'step'}")
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "anew", *flags, "--fdl.seed=1").returncode == 0
    assert losses(tmp_path / "compiled") == losses(tmp_path / "anew")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--fdl.optimizer.b1=0.8", "--fdl.model.embed=32"),
            "was compiled for another run: the arguments differ; the program differs; the config "
            "differs in model.embed, optimizer.b1",
        ),
        (("--fdl.mesh.fsdp=4",), "devices 8 of kind cpu, here 4"),
    ],
)
def test_that_of_another_config_is_refused(saved, tmp_path, flags, told):
    refused = run(tmp_path / "refused", f"--compiled={saved / 'step'}", *flags)
    assert refused.returncode == MISTAKE
    assert told in refused.stderr
    assert "compile anew: leave it out" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_a_damaged_file_is_refused_before_it_is_unpickled(saved, tmp_path):
    content = bytearray((saved / "step").read_bytes())
    content[-1000] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    refused = run(tmp_path / "run", f"--compiled={tmp_path / 'damaged'}")
    assert refused.returncode == MISTAKE
    assert f"--compiled={tmp_path / 'damaged'} is damaged" in refused.stderr


@pytest.mark.slow
def test_another_file_is_refused(tmp_path):
    (tmp_path / "text").write_text("text")
    refused = run(tmp_path / "run", f"--compiled={tmp_path / 'text'}")
    assert refused.returncode == MISTAKE
    assert "is no compiled step" in refused.stderr
    missing = run(tmp_path / "run", f"--compiled={tmp_path / 'missing'}")
    assert missing.returncode == MISTAKE
    assert "missing: No such file" in missing.stderr
