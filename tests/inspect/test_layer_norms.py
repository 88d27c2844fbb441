"""Norms of layers are measured while a run goes on, and cost it nothing else."""

import fiddle as fdl
import pytest
from small_experiment import small

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import PeriodicCallback
from lmlib.inspect.layer_norms import LayerNorms
from lmlib.parallel.mesh import make_mesh
from runner import fit


def with_norms(cfg, every):
    norms = fdl.Config(
        LayerNorms, data=cfg.data, mesh=cfg.mesh, compute=cfg.compute, objective=cfg.objective
    )
    cfg.actions = [fdl.Config(PeriodicCallback, every, norms)]
    return cfg


@pytest.mark.slow
def test_norms_describe_the_model_and_training_is_the_same(tmp_path):
    found = fit(with_norms(small("steps=4"), 2), tmp_path / "run")
    plain = fit(small("steps=4"), tmp_path / "plain")
    assert [line["loss"] for line in found.metrics] == [line["loss"] for line in plain.metrics]
    names = [{name for name in line if "/" in name} for line in found.metrics]
    assert names[0] == names[2] == set() and names[1] == names[3] != set()
    line = found.metrics[3]
    parts = [name.partition("/")[2] for name in names[3] if name.startswith("weight_norm/")]
    weights = sum(line[f"weight_norm/{part}"] ** 2 for part in parts) ** 0.5
    # The step measures the weights before its update, the action after it.
    assert weights == pytest.approx(line["parameter_norm"], rel=0.02)
    assert all(line[f"grad_norm/{part}"] > 0 for part in parts)


class Stream(Synthetic):
    """One that goes on from where it was."""

    def state(self, step):
        return {}

    def restore(self, step, states): ...


def test_a_stream_is_refused():
    with pytest.raises(ValueError, match="cannot read Stream, a stream"):
        LayerNorms(Stream(512, 8, 64), make_mesh(fsdp=1), Compute())
