"""Reads config.json: each key is used, known to be irrelevant, or refused."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

_LARGEST: dict[type, int | float] = {int: 2**31 - 1, float: sys.float_info.max}
REQUIRED = object()  # as a default: the key is required
_SHOWN = 5  # maximum number of unknown keys in a message

# Keys that do not change any family's results on whole sequences. Dropout is set by the experiment.
# Any key that is not listed might change the model.
WITHOUT_EFFECT = frozenset(
    {
        # the file's identity, and the program that wrote it
        "_commit_hash", "_name_or_path", "architectures", "auto_map", "is_llama_config",
        "model_type", "name_or_path", "tokenizer_class", "transformers.js_config",
        "transformers_version", "unsloth_fixed", "unsloth_version",
        # how the model is computed
        "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
        "cache_implementation", "chunk_size_feed_forward", "dtype", "gradient_checkpointing",
        "is_decoder", "is_encoder_decoder", "output_attentions", "output_hidden_states",
        "output_past", "pretraining_tp", "return_dict", "torch_dtype", "torchscript",
        "use_bfloat16", "use_cache", "use_return_dict",
        # how the model was trained
        "attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout",
        "initializer_range", "max_sequence_length", "resid_pdrop", "residual_dropout",
        "tf_legacy_loss",
        # other heads and tasks
        "_num_labels", "finetuning_task", "id2label", "label2id", "num_labels", "prefix",
        "problem_type", "task_specific_params",
        # generation
        "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cls_token_id",
        "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_scores", "pad_token_id", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
        "temperature", "top_k", "top_p", "typical_p",
    }
)  # fmt: skip

# Keys of all families that are ignored if they have these values or are null.
_AT_REST: dict[str, object] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "quantization_config": None,
    "tie_encoder_decoder": False,
}


class FolderError(ValueError):
    """A folder of weights that cannot be used; the message says why."""


class Settings:
    """Reads the config of the file `where` and tracks which keys were requested."""

    def __init__(
        self,
        content: Mapping[str, Any],
        where: str,
        without_effect: Collection[str] = WITHOUT_EFFECT,
    ):
        self._content, self.where = dict(content), where
        self._left = set(content) - set(without_effect)

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def take(
        self,
        key: str,
        default: Any = REQUIRED,
        kind: type = int,
        zero: bool = False,
        most: int | float | None = None,
        null: bool = False,
    ) -> Any:
        """Returns the value of `key`, or `default` if it is absent.

        Null is refused, because transformers does not replace it by the default, unless the default
        is `None` or an empty dict.

        Args:
          kind: type of the value: `int`, `float`, `bool`, `list` or `dict`.
          zero: True if a number may be 0. Negative and infinite numbers are always refused.
          most: the largest number; `None`: the largest of its kind, which is int32's for `int`.
          null: True if null is accepted, and read as `None`.

        Raises FolderError if the key is absent without a default, or its value is not of `kind`.
        """
        self._left.discard(key)
        value = self._content.get(key)
        if value is None:
            if key in self._content and null:
                return None
            if default is REQUIRED:
                raise FolderError(f"{self.where} has no {key}")
            if key in self._content and default not in (None, {}):
                raise FolderError(
                    f"{self.where}: {key} = null is not of type {kind.__name__}: without the key "
                    f"it would "
                    f"be {default!r:.200}"
                )
            return default
        if type(value) not in ((int, float) if kind is float else (kind,)):
            raise FolderError(
                f"{self.where}: {key} = {value!r:.200} is not of type {kind.__name__}"
            )
        if kind not in _LARGEST:
            return value
        largest = _LARGEST[kind] if most is None else most
        if not 0 <= value <= largest or (value == 0 and not zero):
            raise FolderError(
                f"{self.where}: {key} = {value!r:.200} is invalid: it must be "
                f"{'at least' if zero else 'above'} 0, and at most {largest}"
            )
        return kind(value)

    def only(self, key: str, *accepted: Any) -> Any:
        """Returns the value of `key`, which must be absent or one of `accepted`; else raises
        FolderError.
        """
        self._left.discard(key)
        value = self._content.get(key)
        if key in self._content and value not in accepted:
            choices = " or ".join("null" if each is None else repr(each) for each in accepted)
            raise self.refused(key, f"only {choices}")
        return value

    def refused(self, key: str, accepted: str) -> FolderError:
        """Returns the error for an unsupported value of `key`."""
        value = self._content.get(key)
        return FolderError(f"{self.where}: {key} = {value!r:.200} is not supported, {accepted}")

    def ignore(self, *keys: str) -> None:
        """Marks keys as having no effect in this family."""
        self._left.difference_update(keys)

    def done(self) -> None:
        """Raises FolderError if a key was never requested."""
        for key, value in _AT_REST.items():
            if key in self._left:
                self.only(key, value, None)
        if self._left:
            shown = sorted(self._left)[:_SHOWN]
            listed = ", ".join(f"{key:.200} = {self._content[key]!r:.200}" for key in shown)
            if len(self._left) > _SHOWN:
                listed += f" and {len(self._left) - _SHOWN} more"
            raise FolderError(
                f"{self.where}: {listed}: unknown here, so the model could be another than the one "
                "that was trained; remove what has no effect"
            )
