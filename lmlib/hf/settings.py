"""The keys of a config.json: each is used, known to be without effect, or refused."""

from collections.abc import Mapping
from typing import Any

from lmlib.hf.tensor_files import FolderError
from lmlib.models.rope_scaling import Dynamic, Linear, Llama3, Scaling, Yarn, yarn_amplitude

# What says nothing about the model's numbers on whole sequences. Dropout is the experiment's.
WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id",
        "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id", "dtype",
        "torch_dtype", "transformers_version", "use_cache", "cache_implementation",
        "initializer_range", "model_type", "name_or_path", "return_dict", "output_attentions",
        "output_hidden_states", "use_return_dict", "problem_type", "id2label", "label2id",
        "is_encoder_decoder", "chunk_size_feed_forward", "unsloth_version", "unsloth_fixed",
        "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "pretraining_tp", "task_specific_params", "max_length", "temperature", "top_p", "top_k",
        "do_sample", "tokenizer_class", "prefix", "finetuning_task", "num_labels",
        "gradient_checkpointing", "is_decoder", "is_llama_config", "transformers.js_config",
        "attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout", "resid_pdrop",
        "residual_dropout",
    }
)  # fmt: skip
_NOT_GIVEN = object()


class Settings:
    """Reads a config and remembers which keys were asked for."""

    def __init__(self, content: Mapping[str, Any], where: str):
        """`where`: the file, for messages."""
        self._content, self.where = dict(content), where
        self._left = set(content) - WITHOUT_EFFECT

    def take(self, key: str, default: Any = _NOT_GIVEN, kind: type = int) -> Any:
        """The value of `key`, or `default` where it is absent or null.

        Raises:
          FolderError: if it is neither there nor has a default, or is not of `kind`.
        """
        self._left.discard(key)
        value = self._content.get(key)
        if value is None:
            if default is _NOT_GIVEN:
                raise FolderError(f"{self.where} has no {key}")
            return default
        if kind is float and type(value) in (int, float):
            return float(value)
        if type(value) is not kind:
            raise FolderError(f"{self.where}: {key} = {value!r} is no {kind.__name__}")
        return value

    def nullable(self, key: str, absent: Any, kind: type = int) -> Any:
        """The value of `key`, `None` where it is null, `absent` where it is not there."""
        self._left.discard(key)
        return None if self._content.get(key, absent) is None else self.take(key, absent, kind)

    def only(self, key: str, *accepted: Any) -> Any:
        """The value of `key`, which must be absent, null or one of `accepted`.

        Raises:
          FolderError: naming key and value.
        """
        self._left.discard(key)
        value = self._content.get(key)
        if value is not None and value not in accepted:
            choices = " or ".join(repr(each) for each in accepted)
            raise FolderError(f"{self.where}: {key} = {value!r} is not supported, only {choices}")
        return value

    def ignore(self, *keys: str) -> None:
        """Of this family, these have no effect."""
        self._left.difference_update(keys)

    def done(self) -> None:
        """Raises FolderError if a key was not asked for."""
        if self._left:
            told = ", ".join(f"{key} = {self._content[key]!r}" for key in sorted(self._left))
            raise FolderError(
                f"{self.where}: {told}: unknown here, so the model could be another than the one "
                "that was trained; remove what has no effect"
            )

    def rope(
        self,
        theta: float = 10_000.0,
        scalings: tuple[type, ...] = (Linear, Dynamic, Llama3, Yarn),
    ) -> tuple[float, Scaling | None]:
        """Base and scaling of rotary positions, as old and new files write them: `rope_theta` and
        `rope_scaling`, or `rope_parameters`.

        Args:
          theta: where they do not say.
          scalings: that the family has.

        Raises:
          FolderError: for other kinds of scaling.
        """
        parameters = self.take("rope_parameters", None, dict)
        own = dict(self.take("rope_scaling", None, dict) or {}) | dict(parameters or {})
        theta = float(own.pop("rope_theta", self.take("rope_theta", theta, float)))
        scaling = self._scaling(own, theta, self.take("max_position_embeddings", 0))
        if scaling is not None and not isinstance(scaling, scalings):
            raise FolderError(f"{self.where}: this family has no {type(scaling).__name__} scaling")
        return theta, scaling

    def _scaling(self, own: dict[str, Any], theta: float, maximum: int) -> Scaling | None:
        kind = own.pop("rope_type", own.pop("type", "default"))
        own.pop("type", None)
        own.pop("partial_rotary_factor", None)  # read by the family
        made: Scaling | None = None
        try:
            if kind == "linear":
                made = Linear(float(own.pop("factor")))
            elif kind == "dynamic":
                if not maximum:
                    raise KeyError("max_position_embeddings")
                made = Dynamic(float(own.pop("factor")), maximum)
            elif kind == "llama3":
                made = Llama3(
                    float(own.pop("factor")),
                    float(own.pop("low_freq_factor")),
                    float(own.pop("high_freq_factor")),
                    int(own.pop("original_max_position_embeddings")),
                )
            elif kind == "yarn":
                made = _yarn(own, theta, maximum)
            elif kind != "default":
                raise FolderError(
                    f"{self.where}: rope type {kind!r} is not supported, only default, linear, "
                    "dynamic, llama3 and yarn"
                )
        except KeyError as error:
            raise FolderError(f"{self.where}: rope type {kind!r} lacks {error.args[0]}") from None
        if own:
            raise FolderError(f"{self.where}: rope type {kind!r} with {own} is not supported")
        return made


def _yarn(own: dict[str, Any], theta: float, maximum: int) -> Yarn:
    factor = float(own.pop("factor"))
    original = int(own.pop("original_max_position_embeddings", None) or maximum)
    amplitude, scale, all_scale = (
        own.pop(name, None) for name in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if amplitude is None:
        amplitude = yarn_amplitude(factor)
        if scale and all_scale:
            amplitude = yarn_amplitude(factor, scale) / yarn_amplitude(factor, all_scale)
    return Yarn(
        factor, theta, original,
        fast=float(own.pop("beta_fast", None) or 32),
        slow=float(own.pop("beta_slow", None) or 1),
        amplitude=float(amplitude),
        whole=bool(own.pop("truncate", True)),
    )  # fmt: skip


def rope_parameters(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """What `Settings.rope` reads."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    if isinstance(scaling, Linear | Dynamic):
        kind = type(scaling).__name__.lower()
        return {"rope_type": kind, "rope_theta": theta, "factor": scaling.factor}
    if isinstance(scaling, Llama3):
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original,
        }
    assert isinstance(scaling, Yarn)
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.fast,
        "beta_slow": scaling.slow,
        "attention_factor": scaling.amplitude,
        "truncate": scaling.whole,
    }
