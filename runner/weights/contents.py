"""Digests of weights. The processes of a run compare them to know that they read the same."""

import os
from pathlib import Path

import xxhash

from lmlib.checkpoint.manifest import encode, read_manifest
from lmlib.hf.folder import opened
from lmlib.storage.bucket.copies import shown
from runner.processes.agreement import Read
from runner.weights.model_folder import ModelFolder
from runner.weights.saved_run import SavedRun

_CONFIGS = ("config.json", "adapter_config.json")
_SAMPLES, _SAMPLE_BYTES = 64, 4_096  # of each file of tensors


def content_of(weights: SavedRun | ModelFolder) -> Read:
    """Digests of weights: a checkpoint's manifest, which covers all its files, or the config and
    samples of the tensors in a folder of Hugging Face's."""
    if isinstance(weights, SavedRun):
        manifest = xxhash.xxh3_128_hexdigest(encode(read_manifest(weights.folder)))
        return Read([manifest], [shown(weights.folder.absolute())])
    folders = dict.fromkeys((weights.found.folder, weights.base.folder))
    return Read([_digest(folder) for folder in folders], [str(each.absolute()) for each in folders])


def _digest(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.suffix != ".safetensors" and path.name not in _CONFIGS:
            continue
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}\n".encode())
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
