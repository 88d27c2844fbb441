"""A run of several real processes on one machine, through the real command line."""

import pytest
from compiled_programs import XLA_FLAGS
from forked_processes import ROOT, paths_of
from started import Started, flags_of, free_address
from states import SYSTEM, without_times

from lmlib.metrics.log import read_metrics

STEPS = 30
LLAMA = (
    "--fdl_config=experiments/llama_84m",
    "--fiddler=tiny",
    "--fdl.model.embed=32",
    "--fdl.model.layers=1",
    "--fdl.compute.dtype=float32",
    "--fdl.data.sequence_length=128",  # steps that a kill can come between
    "--fdl.validation.sequence_length=16",
    "--fdl.mesh.tensor=2",
    f"--fdl.steps={STEPS}",
    "--fdl.checkpoints.every=5",
    "--fdl.evaluation.every=15",
)

EXACT = ("step", "valid_tokens", "tokens")


class SeveralProcesses(Started):
    """The processes of a run, begun."""

    def __init__(
        self,
        count,
        workdir,
        outputs,
        *,
        devices=8,
        only=(),
        flags=(),
        own=None,
        roots=None,
        folders=None,
        environments=None,
        fresh=False,
        experiment=LLAMA,
    ):
        """Starts `count` processes, or `only` some of them, with `devices` in total.

        `own`, `roots`, `folders` and `environments` have flags, code folder, working folder and
        variables of single processes by number. `fresh` starts them with `fresh_process`.
        """
        outputs.mkdir(parents=True)
        super().__init__([outputs / str(process) for process in range(count)])
        self.address = free_address()
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // count} {XLA_FLAGS}",
        }
        for process in only or range(count):
            root = (roots or {}).get(process, ROOT)
            variables = {"PYTHONPATH": paths_of(root), **(environments or {}).get(process, {})}
            self.start(
                process,
                *("-m", "runner", *experiment, f"--workdir={workdir}"),
                *flags_of(self.address, count, process),
                *(*flags, *(own or {}).get(process, ())),
                fresh=fresh or root != ROOT,
                cwd=(folders or {}).get(process, root),
                environment=environment | variables,
            )

    def wait_for_lines(self, workdir, count):
        """Waits until metrics.jsonl has that many."""
        self.reach(lambda: len(read_metrics(workdir)) >= count, f"step {count}")

    def finished(self):
        assert set(self.exit_codes()) == {0}, self.everything()
        return self


def assert_same_curve(workdir, other):
    lines, others = read_metrics(workdir), read_metrics(other)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, expected in zip(lines, others, strict=True):
        assert_same_line(line, expected)


def assert_same_line(line, expected):
    """The counts exactly, the rest to rounding; times are only there."""
    assert line.keys() - {*SYSTEM} == expected.keys() - {*SYSTEM}
    line, expected = without_times([line, expected])
    for name in line:
        tolerance = 0 if name in EXACT else 2e-4
        assert line[name] == pytest.approx(expected[name], rel=tolerance, abs=0), name
