"""Records losses, metrics and gradients of TRL's trainers for one batch, in float64.

pip install trl==1.16.0
python tests/losses/golden/update_preferences.py

A trainer is made without its constructor, which would need a tokenizer and a data set; its own
methods compute everything. `ROWS` is how our batches hold the documents.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.reward_trainer import DataCollatorForPreference as RewardCollator
from trl.trainer.utils import add_fused_lm_head

FOLDER = Path(__file__).parent / "preferences"
CONFIG = LlamaConfig(
    vocab_size=24, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, attn_implementation="eager",
)  # fmt: skip
ROWS = [[0, 1], [2], [3, 4], [5]]  # pairs in each row of a batch
LABELS = [True, False, True, True, False, True]

random = np.random.default_rng(0)
lengths = [(2, 3, 5), (4, 1, 2), (3, 6, 4), (1, 2, 2), (3, 4, 1), (2, 5, 5)]
examples = [
    [random.integers(1, 24, length).tolist() for length in each] for each in lengths
]  # prompt, chosen, rejected


def model(seed, kind=LlamaForCausalLM, **settings):
    torch.manual_seed(seed)
    config = LlamaConfig(**{**CONFIG.to_dict(), **settings})
    made = kind(config)
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.randn_like(each) * 0.5)
    return made.double()


def trainer(kind, **attributes):
    made = object.__new__(kind)
    made.accelerator = Accelerator(cpu=True)
    made._metrics = {"train": defaultdict(list)}
    made._total_train_tokens, made._tp_size = 0, 1
    made.aux_loss_enabled = made.precompute_ref_logps = False
    made.label_smoothing, made.beta = 0.0, 0.1
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def recorded(kind, policy, loss, metrics):
    """The loss, metrics and gradients by name."""
    policy.zero_grad()
    loss.backward()
    gradients = {name: each.grad for name, each in policy.named_parameters()}
    values = {"loss": loss.item()}
    values |= {name: each[-1] if isinstance(each, list) else each for name, each in metrics.items()}
    return values, gradients


def padded(name, responses):
    """A batch of CPO and ORPO: their collator, for tokenized rows."""
    prompts = [prompt for prompt, _, _ in examples]
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    rows = defaultdict(list)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = prompt + response
        room = longest - len(ids)
        rows["input_ids"].append(ids + [0] * room)
        rows["attention_mask"].append([1] * len(ids) + [0] * room)
        rows["labels"].append([-100] * len(prompt) + response + [-100] * room)
    return {f"{name}_{key}": torch.tensor(value) for key, value in rows.items()}


def contrastive(kind, **attributes):
    made = trainer(kind, is_encoder_decoder=False, padding_value=0, pad_token_id=0, **attributes)
    batch = padded("chosen", [c for _, c, _ in examples])
    batch |= padded("rejected", [r for _, _, r in examples])
    policy = model(0)
    return recorded(kind, policy, *made.get_batch_loss_metrics(policy, batch))


def direct(loss_type, **attributes):
    policy, reference = model(0), model(1)
    for each in (policy, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    made = trainer(
        DPOTrainer, model=policy, ref_model=reference, ld_alpha=None, use_weighting=False,
        f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0],
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), **attributes,
    )  # fmt: skip
    collate = DataCollatorForPreference(pad_token_id=0)
    keys = ("prompt_ids", "chosen_ids", "rejected_ids")
    batch = collate([dict(zip(keys, each, strict=True)) for each in examples])
    loss = made._compute_loss(policy, batch, return_outputs=False)
    return recorded(DPOTrainer, policy, loss, made._metrics["train"])


def unpaired(seeds, **attributes):
    policy, reference = map(model, seeds)
    for each in (policy, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    made = trainer(
        KTOTrainer, model=policy, ref_model=reference, calculate_KL=True, loss_type="kto",
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), **attributes,
    )  # fmt: skip
    rows = [
        {
            "prompt_ids": prompt,
            "completion_ids": chosen,
            "KL_completion_ids": examples[i - 1][1],
            "label": LABELS[i],
        }
        for i, (prompt, chosen, _) in enumerate(examples)
    ]
    batch = DataCollatorForUnpairedPreference(pad_token_id=0)(rows)
    loss = made._compute_loss(policy, batch, return_outputs=False)
    return recorded(KTOTrainer, policy, loss, made._metrics["train"])


def reward(**settings):
    policy = model(2, LlamaForSequenceClassification, num_labels=1)
    made = trainer(RewardTrainer, model=policy, args=SimpleNamespace(**settings))
    rows = [{"chosen_ids": p + c, "rejected_ids": p + r} for p, c, r in examples]
    loss = made.compute_loss(policy, RewardCollator(pad_token_id=0)(rows))
    return recorded(RewardTrainer, policy, loss, made._metrics["train"])


CASES = {
    "dpo": lambda: direct("sigmoid", beta=0.3),
    "dpo_robust": lambda: direct("robust", beta=0.3, label_smoothing=0.1),
    "ipo": lambda: direct("ipo", beta=0.3),
    "cpo": lambda: contrastive(CPOTrainer, loss_type="sigmoid", beta=0.3, cpo_alpha=0.7, alpha=0.0),
    "cpo_smooth": lambda: contrastive(
        CPOTrainer, loss_type="sigmoid", beta=0.3, label_smoothing=0.1, cpo_alpha=0.0, alpha=0.0
    ),
    "simpo": lambda: contrastive(
        CPOTrainer, loss_type="simpo", beta=2.0, simpo_gamma=0.7, cpo_alpha=0.0, alpha=0.0
    ),
    "orpo": lambda: contrastive(ORPOTrainer, beta=0.4),
    "kto": lambda: unpaired((1, 0), beta=0.3, desirable_weight=1.2, undesirable_weight=0.8),
    "kto_negative": lambda: unpaired(
        (0, 1), beta=0.3, desirable_weight=1.2, undesirable_weight=0.8
    ),
    "reward": lambda: reward(center_rewards_coefficient=None),
    "reward_centered": lambda: reward(center_rewards_coefficient=0.05),
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    values, gradients = {}, {}
    for name, case in CASES.items():
        values[name], of_case = case()
        gradients |= {f"{name}:{weight}": each for weight, each in of_case.items()}
    arrays = {name: each.float().numpy() for name, each in gradients.items()}
    save_file(arrays, FOLDER / "gradients.safetensors")
    of_models = [model(0), model(1), model(2, LlamaForSequenceClassification, num_labels=1)]
    for name, each in zip(("policy", "reference", "reward"), of_models, strict=True):
        each.float().save_pretrained(FOLDER / name)
    text = {"rows": ROWS, "labels": LABELS, "examples": examples, "values": values}
    (FOLDER / "values.json").write_text(json.dumps(text, indent=1) + "\n")
