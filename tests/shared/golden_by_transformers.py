"""Golden folders, made by transformers; needs lmlib[parity]."""

import copy
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import changed_keys
import torch
import transformers
from hugging_face_families import ADAMW, GOLDEN, KEPT, tokens
from safetensors.torch import load_file, save_file


def random_model(kind: str, keys: dict[str, Any]) -> Any:
    """Makes a model with random weights. No bias is 0 and no scale is 1, so each has an effect."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *kept_buffers(model).items()]:
            is_rate = name.endswith("A_log")
            weight.mul_(4 if weight.ndim > 1 and not is_rate else 1)
            weight.add_(0.1 * torch.randn_like(weight))
            weight.sub_(5 if is_rate else 0)  # so that states remember many tokens
    return model.float().eval()


def kept_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Those that a folder holds: state without gradient."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def loaded(folder: Path, dtype: str) -> Any:
    """The model that transformers makes of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def logits_of_prompt(model: Any, vocab: int) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(tokens(vocab)[0])).logits[0, KEPT].contiguous()


def layers_of(folder: Path, ids: list[int]) -> dict[str, Any]:
    """Returns the residual stream [L + 1, S, E] and the attention weights [L, H, S, T]."""
    with torch.no_grad():
        output = loaded(folder, "float32")(
            torch.tensor([ids]), output_hidden_states=True, output_attentions=True
        )
    return {
        "activations": torch.cat(output.hidden_states).numpy(),
        "attention": torch.cat(output.attentions).numpy(),
    }


def as_saved(model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns values of parameters and buffers under the names in a folder."""
    holder = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        state = dict(holder.named_parameters()) | kept_buffers(holder)
        for name, value in values.items():
            state[name].copy_(value)
        save(holder, Path(folder))
        return load_file(Path(folder) / "model.safetensors")


def save(model: Any, folder: Path) -> None:
    """Writes a folder, with the names and shapes of the published one.

    transformers 5.23 cuts OLMo Hybrid's filters of queries, keys and values into thirds of equal
    size, and gives its norms the names that OLMo-core uses. It writes the MLPs of Kimi Linear's
    dense layers as if they were experts.
    """
    model.save_pretrained(folder)
    if model.config.model_type not in ("olmo_hybrid", "kimi_linear"):
        return
    held = load_file(folder / "model.safetensors")
    if model.config.model_type == "kimi_linear":
        held = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", n): x for n, x in held.items()}
    else:
        names = {"attention_layer_norm": "input", "feedforward_layer_norm": "post_attention"}
        held = {
            re.sub("|".join(names), lambda at: f"{names[at[0]]}_layernorm", n): x
            for n, x in held.items()
        }
        _cut_filters(held, model.config.layer_types)
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def _cut_filters(held: dict[str, torch.Tensor], kinds: list[str]) -> None:
    """Cuts OLMo Hybrid's filters where queries, keys and values end."""
    for number, kind in enumerate(kinds):
        if kind == "linear_attention":
            names = [f"model.layers.{number}.linear_attn.{name}_conv1d.weight" for name in "qkv"]
            sizes = [len(held[name.replace("conv1d", "proj")]) for name in names]
            filters = torch.cat([held[name] for name in names]).split(sizes)
            held.update({name: each.clone() for name, each in zip(names, filters, strict=True)})


def write(folder: Path, kind: str, keys: dict[str, Any]) -> None:
    """Writes a golden folder: a random model, its logits, gradients, and weights after a step."""
    vocab = keys["vocab_size"]
    model = random_model(kind, keys)
    save(model, folder)
    logits = logits_of_prompt(model, vocab)
    in_bfloat16 = logits_of_prompt(loaded(folder, "bfloat16"), vocab)
    expected = {"logits": logits, "logits_bfloat16": in_bfloat16, "loss": write_step(folder, model)}
    save_file(expected, folder / "expected.safetensors")


def write_step(folder: Path, model: Any) -> torch.Tensor:
    """Writes the gradients and the weights after a step, and returns the loss.

    In float64: AdamW's first step is large where a gradient is as small as its rounding.
    """
    batch = tokens(model.config.vocab_size)[1]
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the others cannot multiply in float64
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        output = model(torch.tensor(batch[:, :-1])).logits
        loss = torch.nn.functional.cross_entropy(
            output.flatten(0, 1), torch.tensor(batch[:, 1:]).flatten()
        )
        loss.backward()
    names = dict(model.named_parameters())
    of_buffers = {name: torch.zeros_like(each) for name, each in kept_buffers(model).items()}
    of_names = {name: weight.grad for name, weight in names.items()}
    gradients = as_saved(model, of_names | of_buffers)
    decays = {
        name: weight.ndim > 1 and not name.endswith(("bias", "A_log"))
        for name, weight in names.items()
    }
    decaying, others = (
        [weight for name, weight in names.items() if decays[name] is which]
        for which in (True, False)
    )
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, **ADAMW).step()
    for kind, values in {"gradients": gradients, "after": as_saved(model, names)}.items():
        narrow = {name: each.float() for name, each in values.items()}
        save_file(narrow, folder / f"{kind}.safetensors")
    return loss.detach().float()


def logits_of_content(folder: Path, content: dict[str, Any]) -> Any:
    """Returns the logits with this config.json; `None` if transformers cannot compute them."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", attn_implementation="eager", output_loading_info=True
        )
        if any(told.values()):  # weights that are missing, left over or of another shape
            return None
        return logits_of_prompt(model.eval(), model.config.vocab_size).numpy()
    except Exception:  # of any part of it
        return None


def outcomes_of_changed_keys(name: str) -> dict[str, Any]:
    """Returns the entry of one golden folder in `changed_keys.OUTCOMES`."""
    whole, found = changed_keys.content_of(name), dict[str, Any]()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        shutil.copy(GOLDEN / name / "model.safetensors", folder)
        usual = logits_of_content(folder, whole)
        for case, path, content in changed_keys.cases_of(name):
            logits = logits_of_content(folder, content)
            if logits is None:
                found[case] = "refuses"
            elif (logits == usual).all():
                found[case] = "same"
            else:
                found[case] = {"as": _meant(folder, whole, path, content, logits)}
    return found


def _meant(
    folder: Path, whole: dict[str, Any], path: tuple[str, ...], content: dict[str, Any], logits: Any
) -> Any:
    """The value of the key at `path` that gives these logits."""
    stated: Any = transformers.AutoConfig.from_pretrained(folder).to_dict()
    usual: Any = whole
    for key in path:
        stated = stated.get(key) if isinstance(stated, dict) else None
        usual = usual[key]
    plain = {bool: (False, True), float: (0.0,)}.get(type(usual), ())
    for value in (stated, *plain):
        if value is not None:
            other = logits_of_content(folder, changed_keys.with_value(whole, path, value))
            if other is not None and (other == logits).all():
                return value
    return None
