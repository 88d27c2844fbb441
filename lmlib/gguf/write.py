"""Writes models as GGUF files, which llama.cpp and the programs around it run.

Tensors are assembled, rounded and written one after another.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from lmlib.gguf import rope, tokenizers
from lmlib.gguf.architectures import ARCHITECTURES, WINDOW, WITH_EXPERTS, Architecture
from lmlib.gguf.tensors import KINDS, Group, grouped, kind_of, size_of, stored
from lmlib.hf.families import FAMILIES, family_of
from lmlib.hf.load import Progress
from lmlib.hf.names import concatenate_shares, placed
from lmlib.hf.save import out_of_range
from lmlib.models.decoder import Decoder
from lmlib.models.experts.router import without_load
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.multi_token import without_heads
from lmlib.parallel.axes import map_weights

_FILE_TYPES = dict(zip(KINDS, (0, 1, 32, 7, 2), strict=True))  # of gguf.LlamaFileType
_UNSAID = 2_048  # longest text, if neither model nor data say it; Llama's default


def save(
    model: Decoder,
    file: str | Path,
    *,
    kind: str = "float32",
    tokenizer: str | None = None,
    chat_templates: Mapping[str, str] | None = None,
    longest: int | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    families: Sequence[Family] = FAMILIES,
) -> None:
    """Writes a model, its tokenizer and its chat template to a GGUF file, for llama.cpp.

    Raises ValueError if llama.cpp has no such model, a value exceeds float16, or the tokenizer has
    no equivalent there, and FileExistsError if `file` exists. Heads of multi-token prediction are
    left out.

    Args:
      kind: "float32", "float16", "bfloat16", "q8_0" or "q4_0". The last two quantize blocks of 32
        weights. Norms, biases and routers stay in float32; in "q4_0" the vocabulary's tables are
        "q8_0"; rows whose length is not a multiple of 32 are float16 in both.
      tokenizer: the text of a tokenizer.json; `None`: the file has no tokenizer.
      chat_templates: texts in Jinja's language, by name; the usual one is "default".
      longest: the longest text, if the model itself does not define it. A model with a window that
        llama.cpp ignores gets at most this window.
      settings: keys of config.json that do not follow from the model, such as `eos_token_id`.
      progress: called with the bytes written so far and the total, after each tensor.
      families: the known families; the first one that supports the model is used.
    """
    file, model = Path(file), without_heads(without_load(model))
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if file.exists():
        raise FileExistsError(f"{file} exists: give a new file")
    family, own = family_of(model, None, families)
    config = {**(settings or {}), **own}
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(file, architecture.name)
    extra = _add_settings(writer, config, architecture, longest)
    tokenizers.write(writer, tokenizer, chat_templates or {}, config)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    weights: dict[str, Any] = {}  # arrays of JAX or NumPy
    map_weights(lambda weight, array: weights.update({weight.path: array}), model)
    layers = config[architecture.keys["block_count"]]
    groups = grouped(placed(model, family.names), architecture, layers)
    shapes = {name: group.shape(config) for name, group in groups.items()}
    shapes |= {name: each.shape for name, each in extra.items()}
    kinds = {name: kind_of(name, shape, KINDS[kind]) for name, shape in shapes.items()}
    sizes = {name: size_of(shape, kinds[name]) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(name, shape, dtype, sizes[name], raw_dtype=kinds[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        written = 0
        for name in shapes:
            values = extra.get(name)
            if values is None:
                values = _values(groups[name], weights, config)
            rounded = stored(values, kinds[name])
            if rounded.dtype == np.float16 and np.isinf(rounded).any():
                raise out_of_range(name, float(np.max(np.abs(values))), "float16")
            writer.write_tensor_data(rounded)
            written += sizes[name]
            if progress is not None:
                progress(written, sum(sizes.values()))
    except BaseException:
        writer.close()
        file.unlink(missing_ok=True)
        raise
    writer.close()


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture of a config.json's content.

    Raises ValueError if llama.cpp does not have the family, or not with these settings.
    """
    family = config["model_type"]
    if family not in ARCHITECTURES:
        raise ValueError(
            f"GGUF files of {family} are not supported; there are {', '.join(ARCHITECTURES)}"
        )
    with_experts = family + WITH_EXPERTS if config.get("num_local_experts") else family
    found = ARCHITECTURES.get(with_experts, ARCHITECTURES[family])
    for key, value in found.fixed.items():
        if (own := config.get(key)) != (only := value(config)):
            raise ValueError(f"llama.cpp has {family} only with {key} = {only}, not {own}")
    if without := [key for key in found.keys.values() if config.get(key) is None]:
        raise ValueError(f"llama.cpp has {family} only with {', '.join(without)}, not None")
    return found


def _add_settings(
    writer: gguf.GGUFWriter, config: dict[str, Any], architecture: Architecture, longest: int | None
) -> dict[str, np.ndarray]:
    """Adds the model's settings to the file; returns the tensors that belong to them."""
    limit = config.get("max_position_embeddings") or longest or _UNSAID
    window = config.get("use_sliding_window", True) and config.get("sliding_window")
    if window and WINDOW not in architecture.keys:
        limit = min(limit, window)
    scaling, tensors = rope.written(config, limit)
    settings = {"context_length": limit, "vocab_size": config["vocab_size"], **scaling}
    settings |= {key: config[own] for key, own in architecture.keys.items()}
    settings |= architecture.writes(config)
    if "attention.key_length" in settings and "attention.value_length" not in settings:
        settings["attention.value_length"] = settings["attention.key_length"]
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    for key, value in settings.items():
        adders[type(value)](f"{architecture.name}.{key}", value)
    return tensors


def _values(group: Group, weights: Mapping[str, Any], config: Mapping[str, Any]) -> np.ndarray:
    """Assembles a tensor's values from the model's weights, in float32."""
    parts = [
        concatenate_shares(
            [piece.share for piece in each.pieces],
            [np.asarray(weights[piece.path][piece.at], np.float32) for piece in each.pieces],
        )
        for each in group.held
    ]
    return np.stack(parts) if group.stacked else group.there(parts[0], config)
