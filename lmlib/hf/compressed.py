"""Folders in 8 or 4 bits for serving, in the format compressed-tensors of vLLM and transformers.

Format: https://github.com/vllm-project/compressed-tensors, "pack-quantized". A matrix
[outputs, inputs] becomes signed codes, several in 32 bits, the first in the lowest, and scales: one
for each output, or for each group of inputs. Codes are rounded to the nearest.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lmlib.hf.folder import read_json
from lmlib.hf.tensor_files import INDEX, Stored, begin_files, laid_out, stored_tensors, write

_GROUPS = (128, 32)  # sizes of groups in 4 bits; the first that divides all matrices is used
_TRANSPOSED = ("gpt2",)  # whose matrices are not modules that the format quantizes
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def compress(source: Path, folder: Path, bits: int) -> str:
    """Quantizes the matrices of `source`, a folder of `lmlib.hf.save`; returns a description.

    The layers' matrices get 8 bits with a scale for each output, or 4 bits with a scale for each
    group of 128 inputs, or 32 if a matrix needs it. Everything else becomes bfloat16. Tensors are
    read and written one after another. Raises ValueError if the model has experts or matrices that
    the format cannot hold.

    Args:
      source: its other files are copied.
      bits: 8 or 4.
    """
    tensors, config = stored_tensors(source), read_json(source / "config.json")
    kind = config["model_type"]
    if kind in _TRANSPOSED or any(".experts." in name for name in tensors):
        raise ValueError(f"a model of {kind} cannot be written in int8 or int4, only dense layers")
    chosen = {name for name, each in tensors.items() if _is_matrix(name, each)}
    per_code = 32 // bits
    for name in chosen:
        if tensors[name].shape[1] % (per_code if bits == 8 else _GROUPS[-1]):
            least = per_code if bits == 8 else _GROUPS[-1]
            raise ValueError(
                f"{name} has {tensors[name].shape[1]} inputs, and int{bits} needs a multiple of "
                f"{least}"
            )
    group = None
    if bits == 4:
        widths = [tensors[name].shape[1] for name in chosen]
        group = next(size for size in _GROUPS if not any(width % size for width in widths))
    planned: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, each in tensors.items():
        if name not in chosen:
            planned[name] = _BFLOAT16, each.shape
            continue
        outputs, inputs = each.shape
        planned[f"{name}_packed"] = np.dtype(np.int32), (outputs, inputs // per_code)
        planned[f"{name}_scale"] = _BFLOAT16, (outputs, 1 if group is None else inputs // group)
        planned[f"{name}_shape"] = np.dtype(np.int64), (2,)
    files = laid_out(folder, planned, 5_000_000_000)
    begin_files(files)
    for name, each in tensors.items():
        values = each.read(0, each.size).reshape(each.shape)
        if name not in chosen:
            write(files[name], 0, values.astype(_BFLOAT16))
            continue
        codes, scales = quantized(values.astype(np.float32), bits, group)
        write(files[f"{name}_packed"], 0, packed(codes, bits))
        write(files[f"{name}_scale"], 0, scales)
        write(files[f"{name}_shape"], 0, np.array(each.shape, np.int64))
    for other in source.iterdir():
        if other.suffix != ".safetensors" and other.name not in (INDEX, "config.json"):
            shutil.copy(other, folder / other.name)
    config |= {"dtype": "bfloat16", "quantization_config": _settings(bits, group)}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    each_of = "output" if group is None else f"{group} inputs"
    return f"int{bits} with a scale for each {each_of}, and bfloat16"


def quantized(values: np.ndarray, bits: int, group: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a matrix [outputs, inputs]; returns int8 codes, and bfloat16 scales.

    The scales are [outputs, 1], or [outputs, inputs / group]. The largest value of a slice has the
    largest code; codes are rounded with the scale as it is stored.
    """
    most = 2 ** (bits - 1) - 1
    slices = values.reshape(len(values), -1, group or values.shape[1])
    scales = (np.abs(slices).max(axis=2) / most).astype(_BFLOAT16)
    wide = scales.astype(np.float32)[..., None]
    codes = np.rint(np.divide(slices, wide, out=np.zeros_like(slices), where=wide != 0))
    return np.clip(codes, -most - 1, most).astype(np.int8).reshape(values.shape), scales


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs signed codes [outputs, inputs] into int32, the first one in the lowest bits."""
    count = 32 // bits
    unsigned = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint32)
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    groups = unsigned.reshape(len(codes), -1, count)
    return np.bitwise_or.reduce(groups << shifts, axis=2).view(np.int32)


def _is_matrix(name: str, tensor: Stored) -> bool:
    """True for matrices of layers: neither the vocabulary's tables, nor norms, nor biases."""
    of_layer = any(part.isdecimal() for part in name.split("."))
    return of_layer and len(tensor.shape) == 2 and name.endswith(".weight")


def _settings(bits: int, group: int | None) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": True, "dynamic": False,
        "strategy": "channel" if group is None else "group", "group_size": group,
        "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    only = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": only | {"input_activations": None, "output_activations": None}
        },
    }  # fmt: skip
