"""A model in Hugging Face's format, trained further on your data.

    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=train \
        --tokenizer=Qwen/Qwen3-0.6B --out=data/c4_qwen3
    python -m data_tools.pretokenize --dataset=allenai/c4 --name=en --split=validation \
        --tokenizer=Qwen/Qwen3-0.6B --out=data/c4_qwen3
    python -m runner --fdl_config=experiments/from_hf --workdir=/tmp/from_hf \
        --fdl.folder=Qwen/Qwen3-0.6B --fdl.tokens=data/c4_qwen3

The architecture and the initial weights come from `folder`. Each step has 524,288 tokens: set
`steps`, `optimizer.peak_lr` and other settings for your data. Once the run has a checkpoint, only
the folder's config.json is still needed; RUN/config.json does not need the folder at all.
"""

from collections.abc import Sequence

import fiddle as fdl

from experiments.base.pretraining import few_steps as tiny  # noqa: F401, a fiddler
from experiments.base.pretraining import pretraining
from lmlib.experiment import Experiment
from lmlib.hf.families import FAMILIES, described
from lmlib.hf.hub import local_folder_of
from lmlib.losses.multi_token import MultiToken
from lmlib.models.families.hugging_face.family import Family


def config(
    folder: str, tokens: str = "data/c4", families: Sequence[Family] = FAMILIES
) -> fdl.Config[Experiment]:
    """Trains the model of `folder` further, with the heads of multi-token prediction that it has.

    Args:
      folder: a Hugging Face folder, or a name on the Hub.
      tokens: a data set with the splits train and validation, made with the folder's tokenizer.
      families: the known families; commands pass theirs, including families of --trust_module.
    """
    found = described(local_folder_of(folder, weights=False), families)
    cfg = pretraining(
        fdl.Partial(found.family.build, **found.arguments),
        tokens=tokens,
        steps=2_000,
        sequence_length=2_048,
        peak_lr=3e-5,
    )
    if depths := found.arguments.get("multi_token_depths"):
        fdl.update_callable(cfg.objective, MultiToken)
        cfg.objective.weights = (0.3 / depths,) * depths
    cfg.init_from = folder
    cfg.optimizer.schedule.warmup = 0.05
    return cfg
