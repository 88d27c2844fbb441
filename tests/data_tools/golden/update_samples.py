"""Writes samples.mds and samples.tar with the packages of the two formats.

pip install mosaicml-streaming webdataset
python tests/data_tools/golden/update_samples.py
"""

import importlib.util
import sys
import tempfile
import types
from pathlib import Path

import webdataset

HERE = Path(__file__).parent
SAMPLES = [
    {"text": "one", "id": 1, "meta": {"lang": "en"}, "score": 0.5},
    {"text": "", "id": -2, "meta": [], "score": 2.0},
    {"text": "drei 🤖\nLinien", "id": 3, "meta": None, "score": -1.0},
]
COLUMNS = {"text": "str", "id": "int", "meta": "json", "score": "float32"}


def mosaic_writer():
    """Returns MDSWriter, without the readers and their packages."""
    folder = Path(importlib.util.find_spec("streaming").origin).parent
    for name in (
        "streaming",
        "streaming.base",
        "streaming.base.format",
        "streaming.base.format.mds",
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.parent / name.replace(".", "/"))]
        sys.modules[name] = package
    return importlib.import_module("streaming.base.format.mds.writer").MDSWriter


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with mosaic_writer()(out=folder, columns=COLUMNS) as writer:
            for sample in SAMPLES:
                writer.write(sample)
        (HERE / "samples.mds").write_bytes((Path(folder) / "shard.00000.mds").read_bytes())
    with webdataset.TarWriter(str(HERE / "samples.tar"), mtime=0) as writer:
        for number, sample in enumerate(SAMPLES):
            json = {name: value for name, value in sample.items() if name != "text"}
            writer.write({"__key__": f"set/{number:04}", "txt": sample["text"], "json": json})
