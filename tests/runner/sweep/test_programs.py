"""Steps that compile to one program are compiled once in a process."""

import fiddle as fdl
import pytest
from small_experiment import small

from runner.sweep.training import Programs


@pytest.mark.slow
def test_equal_programs_are_compiled_once_and_the_oldest_forgotten():
    programs = Programs(most=2)

    def compiled(*overrides):
        experiment = fdl.build(small(*overrides))
        step = experiment.trace_step().lower()
        return programs(step, experiment.mesh, step.compile)

    first = compiled("optimizer.peak_lr=1e-3", "steps=10")
    assert compiled("optimizer.peak_lr=1e-2", "steps=20", "seed=4") is first
    other = compiled("optimizer.b1=0.8")
    assert other is not first
    assert compiled() is first
    third = compiled("optimizer.b1=0.7")
    assert compiled("steps=7") is first
    assert compiled("optimizer.b1=0.7") is third
    assert compiled("optimizer.b1=0.8") is not other  # the oldest of three
