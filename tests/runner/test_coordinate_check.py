"""`python -m runner.coordinate_check`, through the command line."""

import json

import pytest
from compiled_programs import XLA_FLAGS
from forked_processes import run_forked

from lmlib.inspect.coordinates import LOOKED_AT
from runner.command_line.exit_status import FINISHED, MISTAKE

TRANSFER = "--fdl_config=experiments/transfer"
MISTAKES = {
    "no base": (["--fdl_config=experiments/llama_84m"], "needs cfg.scaling"),
    "a base of another size": ([TRANSFER, "--fdl.scaling.base={'embed': 64}"], "embed and layers"),
    "one width": ([TRANSFER, "--widths=64"], "two different sizes or more"),
    "no number": ([TRANSFER, "--depths=2,deep"], "--depths=2,deep"),
    "heads that do not fit": ([TRANSFER, "--widths=64,72"], "heads would be 4.5"),
    "another ending": ([TRANSFER, "--picture=check.pdf"], "its ending is .svg or .png"),
}


@pytest.mark.parametrize(("flags", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_in_a_line(flags, said):
    done = run_forked("-m", "runner.coordinate_check", *flags)
    assert done.returncode == MISTAKE
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_table_a_picture_and_all_changes_are_left(tmp_path):
    flags = [
        TRANSFER, "--fiddler=tiny", "--widths=32,64", "--depths=1,2", "--steps=2",
        "--fdl.data.batch_size=8",
        "--fdl.scaling.base={'embed': 64, 'heads': 4, 'mlp': 128, 'layers': 2}",
        f"--picture={tmp_path}/check.svg", f"--json={tmp_path}/check.json",
    ]  # fmt: skip
    environment = {"XLA_FLAGS": XLA_FLAGS}  # a device
    done = run_forked("-m", "runner.coordinate_check", *flags, environment=environment)
    assert done.returncode == FINISHED, done.stderr
    assert all(name in done.stdout for name in LOOKED_AT) and "after 2 steps" in done.stdout
    rows = json.loads((tmp_path / "check.json").read_text())
    assert len(rows) == 2 * 2 * 2 * 4 * 2  # by, rule, size, looked at, step
    assert (tmp_path / "check.svg").read_text().startswith("<svg")
