"""A student of the quickstart's, 400 steps of 4,096 tokens; 2.5e13 FLOPs, 2 minutes on 2 CPU cores.

    python -m runner --fdl_config=experiments/quickstart --workdir=/tmp/quickstart
    python -m runner --fdl_config=experiments/distil --workdir=/tmp/distil

Where the teacher is too large to compute beside the student, or teaches several, what it says is
stored first, 32 ids for each token:

    python -m runner.teach --from=/tmp/quickstart --fdl_config=experiments/distil --fiddler=stored
    python -m runner --fdl_config=experiments/distil --fiddler=stored --workdir=/tmp/stored

Another teacher: --fdl.teacher=RUN, or a folder of Hugging Face's. Its tokenizer must have made the
data.
"""

import copy

import fiddle as fdl

from experiments import quickstart
from lmlib.experiment import Experiment
from lmlib.losses.distillation import Distillation
from lmlib.losses.next_token import NextToken


def config(teacher: fdl.Config[Experiment] | None = None) -> fdl.Config[Experiment]:
    """Args:
    teacher: whose model teaches; on the command line a run, or a folder of Hugging Face's or its
        name. `None`: that of the quickstart, in /tmp/quickstart.
    """
    cfg = quickstart.config()
    cfg.objective = fdl.Config(
        Distillation,
        teacher=copy.deepcopy(cfg.model if teacher is None else teacher.model),
        teacher_from="/tmp/quickstart" if teacher is None else teacher.init_from,
        temperature=1.0,
        weight=0.9,
    )
    cfg.steps = 400
    cfg.evaluation.every = cfg.checkpoints.every = 100
    cfg.samples.every = None
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The quickstart's smallest size, with a teacher that knows nothing."""
    quickstart.tiny(cfg)
    cfg.objective.teacher = copy.deepcopy(cfg.model)
    cfg.objective.teacher_from = None


def stored(cfg: fdl.Config[Experiment]) -> None:
    """From what `python -m runner.teach` stored: the teacher is not computed any more."""
    cfg.objective = fdl.Config(Distillation, weight=0.9)
    cfg.data.teacher, cfg.validation.teacher = "/tmp/taught/train", "/tmp/taught/validation"


def alone(cfg: fdl.Config[Experiment]) -> None:
    """The same student without a teacher, to compare with."""
    cfg.objective = fdl.Config(NextToken)
