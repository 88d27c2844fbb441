"""Checkpoints have the format in docs/checkpoints.md, and the reader on that page reads them."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from jax.sharding import NamedSharding, PartitionSpec

from lmlib.checkpoint import Checkpoints
from lmlib.parallel.mesh import make_mesh

PAGE = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
WRITES, READS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ZARRAY, MANIFEST = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
FILES = re.findall(r"^\| `([\w./]+/[\w.]+)` \| `(.*)` \|$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that the first program on the page writes."""
    folder = tmp_path_factory.mktemp("example")
    exec(WRITES.replace("/tmp/example", str(folder)), {})
    return folder / "checkpoints/5"


def reader(example: Path) -> Any:
    """The `read` of the page, whose last lines read the example."""
    names: dict[str, Any] = {}
    exec(READS.replace("/tmp/example/checkpoints/5", str(example)), names)
    assert names["arrays"]["model.weight"].sum() == 15.0 and names["notes"]["tokens"] == 12345
    return names["read"]


def test_the_files_have_the_documented_bytes(example):
    assert len(FILES) == 5
    for name, content in FILES:
        expected = content.encode() if name.endswith(".json") else bytes.fromhex(content)
        assert (example / name).read_bytes() == expected, name
        assert MANIFEST["files"][name] == {
            "bytes": len(expected), "xxh3_128": xxhash.xxh3_128_hexdigest(expected)
        }  # fmt: skip
    assert json.loads((example / "state/model.weight/.zarray").read_text()) == ZARRAY


def test_the_manifest_says_what_is_documented_and_covers_all_files(example):
    text = (example / "manifest.json").read_text("ascii")
    manifest = json.loads(text)
    assert text == json.dumps(manifest, indent=1) + "\n" and [*manifest][-1] == "digest"
    others = manifest["files"].keys() - MANIFEST["files"].keys()
    rest = {name: manifest["files"].pop(name) for name in others}
    assert {key: manifest[key] for key in MANIFEST} == MANIFEST
    assert manifest.keys() - MANIFEST.keys() == {"saved_at", "digest"}
    there = {f.relative_to(example).as_posix() for f in example.rglob("*") if f.is_file()}
    assert there - {"manifest.json"} == rest.keys() | MANIFEST["files"].keys()


@pytest.mark.several_devices
def test_the_reader_reads_what_a_mesh_wrote_and_refuses_damage(example, tmp_path):
    read = reader(example)
    mesh = make_mesh(fsdp=2, tensor=2, data=-1)
    draw = np.random.default_rng(0)
    weight_XY, odd_X = draw.normal(size=(6, 8)).astype("float32"), np.arange(7, dtype="int32")
    layout = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    state = {
        "model": {"weight": jax.device_put(weight_XY, layout), "odd": jnp.asarray(odd_X)},
        "half": jax.device_put(weight_XY.astype(jnp.bfloat16), layout),
        "mask": jnp.asarray(weight_XY > 0),
        "keys": jax.random.split(jax.random.key(3), 2),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state, {"tokens": 1, "data": ["é"]})
    folder = tmp_path / "7"
    assert (folder / "state/model.weight/1.1").is_file()
    arrays, notes = read(folder)
    assert notes == {"tokens": 1, "data": ["é"]}
    np.testing.assert_array_equal(arrays["model.weight"], weight_XY)
    np.testing.assert_array_equal(arrays["model.odd"], odd_X)
    np.testing.assert_array_equal(arrays["half"], weight_XY.astype(jnp.bfloat16))
    np.testing.assert_array_equal(arrays["mask"], weight_XY > 0)
    np.testing.assert_array_equal(arrays["keys"], jax.random.key_data(state["keys"]))
    for name in ("state/model.weight/1.1", "notes/notes.json", "manifest.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content.replace(b"7", b"6") + b" " * (name[-1] == "1"))
        if name == "notes/notes.json":
            (folder / name).write_bytes(content.replace(b"1", b"2"))
        with pytest.raises(ValueError, match=f"^{name} is damaged"):
            read(folder)
        (folder / name).write_bytes(content)
