"""Reads and writes PEFT's adapter_config.json (https://github.com/huggingface/peft)."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmlib.hf.folder import read_json
from lmlib.models.families.hugging_face.settings import FolderError, Settings

FILE = "adapter_config.json"

# Accepted values; null is accepted for each key. Settings that first change the base's weights,
# such as PiSSA, are not supported.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "revision": ("main",),
    "bias": ("none", "lora_only", "all"),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "loftq_config": ({},),
    **dict.fromkeys(
        ("use_qalora", "lora_bias"),
        (False,),
    ),
    **dict.fromkeys(
        (
            "layers_to_transform", "layer_replication", "trainable_token_indices",
            "megatron_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
            "monteclora_config", "arrow_config", "kasa_config", "use_bdlora",
            "alora_invocation_tokens",
        ),
        (),
    ),
}  # fmt: skip
# Keys of rank_pattern and alpha_pattern that are used as regular expressions: names of modules or
# their suffixes, or full names after "^". PEFT itself writes `.*\.` and `\.`.
_KEY = re.compile(r"\^?(\.\*\\\.)?\w+(\\?\.\w+)*")
# Keys without an effect of their own. PEFT sets fan_in_fan_out by the class of a module.
_WITHOUT_EFFECT = (
    "auto_mapping", "peft_version", "inference_mode", "fan_in_fan_out", "layers_pattern",
    "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """The content of an adapter_config.json.

    A name means the module of that name ("model.layers.0.mlp.up"), or all modules whose names end
    with it ("up").
    """

    # rank, alpha, rank_stabilized, dropout, magnitude: as in `lmlib.adapters.with_adapters`.
    rank: int
    alpha: float
    rank_stabilized: bool = False
    dropout: float = 0.0
    magnitude: bool = False
    base: str | None = None  # the base model's folder, or its name on the Hub; `None`: unspecified
    # the adapted modules; `None`: the modules that have tensors
    targets: tuple[str, ...] | None = None
    # the adapted parameters (of experts), by their names or suffixes
    parameters: tuple[str, ...] = ()
    # modules that are not adapted; `None`: the modules without tensors
    excluded: tuple[str, ...] | None = ()
    # ranks, alphas: other ranks and alphas, by PEFT's patterns of modules; the first match counts
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alphas: Mapping[str, float] = dataclasses.field(default_factory=dict)
    saved: tuple[str, ...] = ()  # modules whose weights are saved in full (`lmlib.hf.peft.whole`).
    # True if biases of adapted modules are saved; ignored when a folder is read, where the tensors
    # decide
    biases: bool = False
    tied: bool = False  # True if a saved table embeds and unembeds

    def rank_of(self, module: str) -> int:
        return next((r for each, r in self.ranks.items() if _matches(each, module)), self.rank)

    def alpha_of(self, module: str) -> float:
        return next((a for each, a in self.alphas.items() if _matches(each, module)), self.alpha)

    def content(self, transposed: bool) -> dict[str, Any]:
        """Returns adapter_config.json; `transposed` if the base's matrices have inputs as rows."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": _number(self.alpha),
            "use_rslora": self.rank_stabilized,
            "lora_dropout": self.dropout,
            **({"use_dora": True} if self.magnitude else {}),
            "target_modules": list(self.targets or ()),
            **({"target_parameters": list(self.parameters)} if self.parameters else {}),
            "rank_pattern": dict(self.ranks),
            "alpha_pattern": {name: _number(alpha) for name, alpha in self.alphas.items()},
            "modules_to_save": list(self.saved) or None,
            "bias": "lora_only" if self.biases else "none",
            **({"ensure_weight_tying": True} if self.tied else {}),
            "fan_in_fan_out": transposed,
            "inference_mode": True,
        }


def holds_adapters(folder: Path) -> bool:
    """True if `folder` is in PEFT's format."""
    return (folder / FILE).is_file()


def means(name: str, module: str) -> bool:
    """True if `name` means `module`."""
    return f".{module}".endswith(f".{name}")


def _matches(key: str, module: str) -> bool:
    """True if a key of rank_pattern or alpha_pattern matches `module`, as in PEFT.

    PEFT's rule is `get_pattern_key` in peft/utils/other.py; "^q_proj" matches no suffix.
    """
    return _compiled(rf"(.*\.)?({key})$").match(module) is not None


_compiled = functools.lru_cache(maxsize=4096)(re.compile)  # `re` keeps 512; large models have more


def read_config(folder: Path) -> PeftConfig:
    """Reads `folder`/adapter_config.json.

    Raises FolderError if the file is missing, or has an unknown key or value.
    """
    where = str(folder / FILE)
    content = read_json(folder / FILE)
    settings = Settings(content, where)
    for key, values in _ONLY.items():
        settings.only(key, *values, None)
    settings.ignore(*_WITHOUT_EFFECT)
    excludes = bool(content.get("exclude_modules"))
    found = PeftConfig(
        rank=settings.take("r", 8),
        alpha=settings.take("lora_alpha", 8.0, float),
        rank_stabilized=bool(settings.take("use_rslora", False, bool, null=True)),
        dropout=settings.take("lora_dropout", 0.0, float, zero=True),
        magnitude=bool(settings.take("use_dora", False, bool, null=True)),
        base=settings.take("base_model_name_or_path", None, str) or None,
        targets=_modules(content, "target_modules", where),
        parameters=_listed(content, "target_parameters", where),
        excluded=_modules(content, "exclude_modules", where) if excludes else (),
        ranks=_by_module(settings, "rank_pattern", int),
        alphas=_by_module(settings, "alpha_pattern", float),
        saved=_listed(content, "modules_to_save", where),
    )
    settings.ignore("target_modules", "target_parameters", "exclude_modules", "modules_to_save")
    settings.done()
    if not 0 <= found.dropout < 1:
        raise FolderError(f"{where}: lora_dropout = {found.dropout} is not in [0, 1)")
    return found


def _modules(content: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | None:
    """Returns names, or `None` for a string: patterns of untrusted folders are not run."""
    value = content.get(key)
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise FolderError(f"{where}: {key} = {value!r:.80} is not a list of names")
    return tuple(value)


def _listed(content: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    if isinstance(content.get(key), str):
        raise FolderError(f"{where}: {key} is a text, and has to be a list of names")
    return _modules(content, key, where) or ()


def _by_module(settings: Settings, key: str, kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    content = settings.take(key, {}, dict)
    patterns = Settings(content, f"{settings.where}: {key}", ())
    for name in content:
        if not _KEY.fullmatch(name):
            raise FolderError(
                f"{settings.where}: {key} has the pattern {name!r:.200}, but only names of "
                'modules, or their ends, are supported, with "^" before a whole name'
            )
        found[name] = patterns.take(name, kind=kind)
    return found


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
