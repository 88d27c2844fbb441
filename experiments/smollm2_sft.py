"""SmolLM2 135M on chats, 1,000 steps of 131,072 tokens; 1.6e17 FLOPs, 6.8 H100-minutes at 40 % MFU.

    python -m data_tools.prepare_chats --dataset=chats.jsonl --validation_fraction=0.02 \
        --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct --out=data/chats --max_length=2048
    python -m runner --fdl_config=experiments/smollm2_sft --workdir=/tmp/smollm2_sft

All weights train, on the assistant's messages. The model is as in experiments/smollm2_135m.py; its
initial weights come from a Hugging Face folder or a name on the Hub: --init_from=FOLDER.
docs/finetuning.md describes the format of chats.jsonl.
"""

import fiddle as fdl

from experiments import smollm2_135m
from lmlib.experiment import Experiment


def config() -> fdl.Config[Experiment]:
    cfg = smollm2_135m.config()
    cfg.init_from = "HuggingFaceTB/SmolLM2-135M-Instruct"
    for part in (cfg.data, cfg.validation):
        part.path, part.batch_size, part.sequence_length = "data/chats", 64, 2_048
    cfg.optimizer.peak_lr, cfg.optimizer.weight_decay = 1e-4, 0.0
    cfg.steps = 1_000
    cfg.evaluation.every = cfg.checkpoints.every = cfg.samples.every = 200
    cfg.samples.prompts = ("What is the capital of France?", "Write two lines about a river.")
    return cfg


def tiny(cfg: fdl.Config[Experiment]) -> None:
    """The same experiment at a size for tests: new weights, synthetic data, seconds on a laptop."""
    smollm2_135m.tiny(cfg)
    cfg.init_from, cfg.samples.prompts, cfg.samples.every = None, (), None
