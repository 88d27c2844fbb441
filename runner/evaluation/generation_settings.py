"""The effect of a folder's generation_config.json on tasks, as in `transformers`.

lm-eval's backend `hf` calls `generate`, which takes settings that a task lacks from the file
(https://huggingface.co/docs/transformers/main_classes/text_generation).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FILE = "generation_config.json"
# The defaults of `transformers`, for settings that are neither in the task nor in the file.
_USUAL = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
SAMPLING = tuple(_USUAL)
_NEW_TOKENS = "max_new_tokens"

# Keys that do not affect the answers, and keys that lm-eval always sets itself.
_WITHOUT_EFFECT = {
    "max_length", "do_sample", "use_cache",  # lm-eval says these
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id",
    "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config", "renormalize_logits",
    "remove_invalid_values", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "transformers_version",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "early_stopping",
    "length_penalty", "diversity_penalty",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "assistant_ensemble_weight",
    "target_lookbehind", "max_matching_ngram_size", "speculation_type",
}  # fmt: skip
_ONLY_DRAWN = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
# Values of other keys that change nothing.
_NEUTRAL = {
    "min_length": 0, "min_new_tokens": 0, "num_beams": 1, "num_beam_groups": 1,
    "num_return_sequences": 1, "no_repeat_ngram_size": 0, "guidance_scale": 1.0,
    "token_healing": False, "use_mtp": False, **_ONLY_DRAWN,
}  # fmt: skip


@dataclass(frozen=True)
class GenerationSettings:
    """The settings in a generation_config.json.

    Args:
      content: the JSON object; empty if there is no file.
      name: name of the model, for errors.

    Raises:
      ValueError: if a value that is used is not a number.
    """

    content: Mapping[str, Any]
    name: str

    def __post_init__(self) -> None:
        for key in (*SAMPLING, _NEW_TOKENS):
            value = self.content.get(key)
            whole = key in ("top_k", _NEW_TOKENS)
            if type(value) not in ((int, type(None)) if whole else (int, float, type(None))):
                raise ValueError(
                    f"{FILE} of {self.name} has {key}={value!r:.40}: it must be a "
                    f"{'whole ' * whole}number"
                )
        most = self.max_new_tokens
        if most is not None and not 0 < most < 2**31:
            raise ValueError(
                f"{FILE} of {self.name} has {_NEW_TOKENS}={most}: it must be from 1 to 2^31 - 1"
            )

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum number of new tokens, overriding the task; `None`: the task decides."""
        return self.content.get(_NEW_TOKENS)

    def sampling(self, said: Mapping[str, Any], drawn: bool) -> dict[str, Any]:
        """Returns the arguments of `lmlib.generate.Sampling`.

        Args:
          said: the task's own settings among `SAMPLING`, which take precedence.
          drawn: True if the task wants random answers.
        """
        known = {key: value for key, value in self.content.items() if value is not None}
        found = {key: said.get(key, known.get(key, usual)) for key, usual in _USUAL.items()}
        found["top_k"] = found["top_k"] or None  # 0: all
        if not drawn:
            found["temperature"] = 0.0
        return found

    def ignored(self, drawn: bool) -> dict[str, Any]:
        """Returns the settings that change answers in `transformers` and are ignored here."""
        read = {*SAMPLING, _NEW_TOKENS, *_WITHOUT_EFFECT, *(() if drawn else _ONLY_DRAWN)}
        return {
            key: value
            for key, value in self.content.items()
            if key not in read
            and not key.startswith("_")
            and value is not None
            and not (key in _NEUTRAL and value == _NEUTRAL[key])
        }
