"""Reads GGUF files into Hugging Face folders, tensor by tensor.

Files are untrusted. The package `gguf` maps them into memory. Its errors for damaged files become a
FolderError that names the file.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind

from lmlib.gguf import rope, tokenizers
from lmlib.gguf.architectures import ARCHITECTURES, WITH_EXPERTS, Architecture
from lmlib.gguf.changes import head_dim
from lmlib.gguf.tensors import grouped
from lmlib.hf.families import described_by
from lmlib.hf.load import Progress
from lmlib.hf.names import placed
from lmlib.hf.tensor_files import begin_files, laid_out, write
from lmlib.models.families.hugging_face.settings import FolderError

# Settings that follow from others, that nothing reads, or that concern no decoder.
_IGNORED = {"vocab_size", "rope.scaling.finetuned", "attention.causal"}
# The size of dense layers, which the families do not have, or the file does not use.
_BESIDE = {name: {"feed_forward_length"} for name in ("qwen3moe", "qwen3next")}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_KEPT = {Kind.F16: np.dtype(np.float16), Kind.BF16: _BFLOAT16, Kind.MXFP4: _BFLOAT16}
_FILE_BYTES = 5_000_000_000


def to_folder(file: str | Path, folder: str | Path, progress: Progress | None = None) -> None:
    """Writes the model, the tokenizer and the chat template of a GGUF file to a new folder.

    `lmlib.hf.load` and `from_pretrained` of transformers load the folder. Tensors in float32,
    float16 and bfloat16 keep their values; quantized ones become float32, and MXFP4, gpt-oss'
    experts, bfloat16. Gemma's norms are the exception: their scales have 1 added in a file, which
    rounds them once.

    Raises FolderError if the file is damaged or one of several parts, its architecture or a setting
    is not supported, or its tensors do not fit the model that it describes, and
    FileExistsError if the folder is not empty.

    Args:
      progress: called with the bytes read so far and the total, after each tensor.
    """
    file, folder = Path(file), Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: give a new folder")
    with _refusing(file):
        reader = gguf.GGUFReader(file)
        settings = {name: _value(field) for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        if settings.get("split.count", 1) != 1:
            raise ValueError("it is one of several parts: join them by `llama-gguf-split --merge`")
        architecture, config = _config(settings, tensors)
        texts = tokenizers.read(settings)
        config |= tokenizers.special_ids(settings)
        found = described_by(config, str(file))
        layers = config[architecture.keys["block_count"]]
        groups = grouped(placed(found.shapes, found.family.names), architecture, layers)
        shapes = {name: group.shape(config) for name, group in groups.items()}
        for name, shape in shapes.items():
            if name not in tensors:
                raise ValueError(f"it has no tensor {name}")
            if (own := _shape(tensors[name])) != shape:
                raise ValueError(f"{name} has the shape {own}, not {shape}")
        own_of_rope = {rope.FREQUENCIES, rope.LONG, rope.SHORT}
        if more := sorted(tensors.keys() - shapes.keys() - own_of_rope):
            raise ValueError(f"it holds tensors that the model does not have: {more[:5]}")
        folder.mkdir(parents=True, exist_ok=True)
        files = laid_out(
            folder,
            {
                each.name: (_dtype(tensors[name]), each.shape)
                for name, group in groups.items()
                for each in group.held
            },
            _FILE_BYTES,
        )
        begin_files(files)
        total, read = sum(int(tensors[name].n_bytes) for name in groups), 0
        parts: list[np.ndarray] = []  # of one tensor
        for name, group in groups.items():
            parts.append(_values(tensors[name]))
            if len(parts) == group.parts:
                values = parts[0] if group.change is None else group.change.back(parts, config)
                for index, each in enumerate(group.held):
                    write(files[each.name], 0, values[index] if group.stacked else values)
                parts = []
            read += int(tensors[name].n_bytes)
            if progress is not None:
                progress(read, total)
    config |= {"architectures": [found.family.transformers_class]}
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    contents = texts | {"generation_config.json": ends, "config.json": config}
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Raises FolderError, with the name of the file, for what a wrong file causes."""
    try:
        yield
    except FolderError:
        raise
    except OSError as error:
        raise FolderError(f"{file} cannot be read: {error.strerror or error}") from error
    except KeyError as error:
        raise FolderError(f"{file} is damaged or incomplete: it lacks {error}") from error
    except (IndexError, TypeError, OverflowError, RecursionError, ArithmeticError) as error:
        raise FolderError(f"{file} is damaged or cut short: {error}") from error
    except (ValueError, NotImplementedError) as error:
        raise FolderError(f"{file} cannot be used: {error}") from error


def _value(field: gguf.ReaderField) -> Any:
    """Returns a setting's value; floats are the shortest that give the same float32."""
    value = field.contents()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _config(
    settings: dict[str, Any], tensors: dict[str, gguf.ReaderTensor]
) -> tuple[Architecture, dict[str, Any]]:
    """Returns the file's architecture, and the content of a config.json.

    Raises ValueError if either is unknown, or a setting is.
    """
    name = settings.get("general.architecture")
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in settings.items()
        if key.startswith(f"{name}.")
    }
    has_experts = bool(own.get("expert_count"))
    kinds = {kind: each for kind, each in ARCHITECTURES.items() if each.name == name}
    fitting = [kind for kind, each in kinds.items() if has_experts == ("expert_count" in each.keys)]
    if not fitting:
        known = ", ".join(sorted({each.name for each in ARCHITECTURES.values()}))
        raise ValueError(f"its architecture {name!r:.80} is not supported; there are {known}")
    architecture = ARCHITECTURES[fitting[0]]
    config: dict[str, Any] = {"model_type": fitting[0].removesuffix(WITH_EXPERTS)}
    for key, target in architecture.keys.items():
        if key in own:
            config[target] = own.pop(key)
            if not isinstance(config[target], int | float):
                raise ValueError(f"{name}.{key} is {config[target]!r:.80}, not one number")
    if not 0 < config[architecture.keys["block_count"]] <= len(tensors):
        raise ValueError("it has more layers than tensors")
    config["vocab_size"] = _shape(tensors["token_embd.weight"])[0]
    config |= {key: value(config) for key, value in architecture.fixed.items()}
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config |= architecture.reads(own, config)
    if (limit := own.pop("context_length", None)) is not None:
        config["max_position_embeddings"] = limit
    if own.pop("attention.value_length", None) not in (None, head_dim(config)):
        raise ValueError(f"{name}.attention.value_length differs from the size of a head")
    factors = {name: _values(each) for name, each in tensors.items() if name.startswith("rope_f")}
    config |= rope.read(own, factors, config)
    ignored = _IGNORED | _BESIDE.get(architecture.name, set())
    zeros = {key for key, value in own.items() if value == 0 and key.startswith("expert")}
    if unknown := sorted(own.keys() - ignored - zeros):
        raise ValueError(f"its settings {', '.join(unknown)} are not supported for {fitting[0]}")
    return architecture, config


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _dtype(tensor: gguf.ReaderTensor) -> np.dtype:
    """Returns the dtype in the folder."""
    return _KEPT.get(tensor.tensor_type, np.dtype(np.float32))


def _values(tensor: gguf.ReaderTensor) -> np.ndarray:
    if tensor.tensor_type is Kind.BF16:
        return tensor.data.view(ml_dtypes.bfloat16)
    if tensor.tensor_type in (Kind.F32, Kind.F16):
        return tensor.data
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return values.astype(_dtype(tensor), copy=False)  # bfloat16 holds every value of MXFP4
