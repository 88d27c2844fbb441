"""Fast GPT-2 on FineWeb, 3,500 steps of 524,288 tokens; 1.6e18 FLOPs, 1.1 H100-hours at 40 % MFU.

    python -m data_tools.pretokenize --dataset=HuggingFaceFW/fineweb --name=sample-10BT \
        --split=train --validation_fraction=0.001 --tokenizer=openai-community/gpt2 \
        --out=data/fineweb_gpt2
    python -m runner --fdl_config=experiments/speedrun_124m --workdir=/tmp/speedrun_124m

GPT-2's sizes (124M parameters in matrix products) with the parts of public speedruns, whose goal is
a validation loss of 3.28 (Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt).
Their records with such parts and Muon took 3,200 to 5,100 steps of the same size. This experiment
has not been run at full size. On one GPU: --fdl.microbatches=8. Elsewhere: --fiddler=tiny for
seconds, --fiddler=thousandth for minutes.
"""

import fiddle as fdl

from experiments import quickstart
from experiments.base.pretraining import fast as fast
from experiments.base.pretraining import pretraining, tiny_with
from lmlib.experiment import Experiment
from lmlib.models.families.speedrun import speedrun
from lmlib.optim.matrices.muon import muon
from lmlib.optim.schedules import warmup_stable_decay

tiny = tiny_with(window=32)


def config() -> fdl.Config[Experiment]:
    model = fdl.Partial(
        speedrun, vocab=50_304, embed=768, layers=12, heads=6, mlp=3_072, value_embeddings=2,
    )  # fmt: skip
    cfg = pretraining(
        model,
        tokens="data/fineweb_gpt2",
        steps=3_500,
        batch_size=512,
        sequence_length=1_024,
        validation_batches=20,
    )
    cfg.optimizer = fdl.Partial(
        muon,
        peak_lr=3e-3,
        schedule=fdl.Partial(warmup_stable_decay, warmup=0.02, decay=0.5, end=0.0),
        weight_decay=0.05,
    )
    cfg.data.begin_with_documents = True
    return cfg


def thousandth(cfg: fdl.Config[Experiment]) -> None:
    """A thousandth of the tokens (Python's sources), a hundredth of the model: minutes on CPUs."""
    small, model = quickstart.config(), cfg.model
    cfg.data, cfg.validation = small.data, small.validation
    cfg.data.batch_size, cfg.data.sequence_length, cfg.steps = 8, 128, 1_700
    cfg.evaluation, cfg.compute, cfg.samples = small.evaluation, small.compute, small.samples
    model.vocab = cfg.data.path.vocab_size
    model.embed, model.layers, model.heads, model.mlp = 128, 4, 2, 512
