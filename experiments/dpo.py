"""DPO of any model, 500 steps on your pairs: a run's model, or one of Hugging Face's.

Other losses are fiddlers: --fiddler=orpo, for example.

    python -m data_tools.prepare_chats --pairs --dataset=preferences.jsonl --tokenizer=TOKENIZER \
        --out=data/preferences --validation_fraction=0.02
    python -m runner --fdl_config=experiments/dpo --workdir=/tmp/dpo \
        --fdl.base=RUN_OR_FOLDER --fdl.tokens=data/preferences

Adapters train, as in experiments/lora.py. The reference is the base model. If the base has
adapters, these train further, and the reference is the base with its adapters merged.
docs/preferences.md describes the losses and the format of preferences.jsonl.
"""

import fiddle as fdl

from experiments import lora
from experiments.lora import tiny as tiny
from lmlib.adapters.lora import lora as with_lora
from lmlib.experiment import Experiment
from lmlib.losses.dpo import DPO
from lmlib.losses.preferences.bradley_terry import BradleyTerry
from lmlib.losses.preferences.cpo import CPO
from lmlib.losses.preferences.ipo import IPO
from lmlib.losses.preferences.kto import KTO
from lmlib.losses.preferences.orpo import ORPO
from lmlib.losses.preferences.simpo import SimPO
from lmlib.models.reward import reward_model


def config(
    base: fdl.Config[Experiment], tokens: str = "data/preferences"
) -> fdl.Config[Experiment]:
    """Trains adapters on preference pairs.

    Args:
      base: experiment of the model; on the command line a run, or a Hugging Face folder or name.
      tokens: a data set of pairs with the splits train and validation.
    """
    cfg = lora.config(base, tokens)
    has_adapters = fdl.get_callable(base.model) is with_lora
    cfg.objective = fdl.Config(DPO, reference_from=base.init_from if has_adapters else None)
    cfg.optimizer.peak_lr = 2e-5
    return cfg


def ipo(cfg: fdl.Config[Experiment]) -> None:
    """A squared loss of the margin per token, with a reference."""
    cfg.objective = fdl.Config(IPO, reference_from=cfg.objective.reference_from)


def kto(cfg: fdl.Config[Experiment]) -> None:
    """Single answers with labels, with a reference; the data is made with --labels."""
    cfg.objective = fdl.Config(KTO, reference_from=cfg.objective.reference_from)


def reward(cfg: fdl.Config[Experiment]) -> None:
    """A reward model of the base: adapters and a score that compares texts."""
    cfg.model.of = fdl.Partial(reward_model, of=cfg.model.of)
    cfg.trainable.besides = ("score",)
    cfg.objective = fdl.Config(BradleyTerry)


def cpo(cfg: fdl.Config[Experiment]) -> None:
    """DPO without a reference, plus the cross-entropy of the chosen responses."""
    cfg.objective = fdl.Config(CPO)


def simpo(cfg: fdl.Config[Experiment]) -> None:
    """The margin of mean log-probabilities, without a reference."""
    cfg.objective = fdl.Config(SimPO)


def orpo(cfg: fdl.Config[Experiment]) -> None:
    """Fine-tuning on the chosen texts and an odds ratio, without a reference."""
    cfg.objective = fdl.Config(ORPO)
