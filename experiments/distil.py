"""A student of the quickstart, 400 steps of 4,096 tokens; 2.5e13 FLOPs, 2 minutes on 2 CPU cores.

    python -m runner --fdl_config=experiments/quickstart --fiddler=plain --workdir=/tmp/plain
    python -m runner --fdl_config=experiments/distil --workdir=/tmp/distil

If the teacher is too large to run next to the student, or has several students, first store its
predictions, 32 ids for each token:

    python -m runner.cache_teacher_logits --from=/tmp/plain --fdl_config=experiments/distil \\
        --fiddler=stored
    python -m runner --fdl_config=experiments/distil --fiddler=stored --workdir=/tmp/stored

For another teacher: --fdl.teacher=RUN, or a Hugging Face folder. The data must have been made with
its tokenizer.
"""

import copy

import fiddle as fdl

from experiments import quickstart
from lmlib.experiment import Experiment
from lmlib.losses.distillation import Distillation
from lmlib.losses.next_token import NextToken


def config(teacher: fdl.Config[Experiment] | None = None) -> fdl.Config[Experiment]:
    """Trains a student of the quickstart's size on the teacher's predictions.

    Args:
      teacher: its model is the teacher; on the command line a run, or a Hugging Face folder or
        name. `None`: the plain quickstart's model in /tmp/plain.
    """
    cfg = quickstart.config()
    quickstart.plain(cfg)
    cfg.objective = fdl.Config(
        Distillation,
        teacher=copy.deepcopy(cfg.model if teacher is None else teacher.model),
        teacher_from="/tmp/plain" if teacher is None else teacher.init_from,
        temperature=1.0,
        weight=0.9,
    )
    cfg.steps = 400
    cfg.evaluation.every = cfg.checkpoints.every = 100
    cfg.samples.every = None
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The quickstart's smallest size, with an untrained teacher."""
    quickstart.tiny(cfg)
    cfg.objective.teacher = copy.deepcopy(cfg.model)
    cfg.objective.teacher_from = None


def stored(cfg: fdl.Config[Experiment]) -> None:
    """Reads predictions stored by `python -m runner.cache_teacher_logits`, without computing the
    teacher."""
    cfg.objective = fdl.Config(Distillation, weight=0.9)
    cfg.data.teacher, cfg.validation.teacher = "/tmp/taught/train", "/tmp/taught/validation"


def alone(cfg: fdl.Config[Experiment]) -> None:
    """Trains the same student without a teacher, for comparison."""
    cfg.objective = fdl.Config(NextToken)
