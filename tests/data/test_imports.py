import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ALL_OF_DATA = """
import sys
from lmlib.data import *
slow = {"datasets", "tokenizers"} & set(sys.modules)
ours = ("lmlib.data", "lmlib.storage", "lmlib.row_order")
others = [name for name in sys.modules if name.startswith("lmlib.") and not name.startswith(ours)]
assert FlatTokens and not slow and not others, (slow, others)
"""
WRITING = """
import sys
from lmlib.data import ShardWriter, read_split
assert "jax" not in sys.modules
"""
READING = """
import importlib, pkgutil, sys
import lmlib.data.stored, lmlib.data.text, lmlib.storage
for room in (lmlib.data.stored, lmlib.storage):
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(module.name)
assert "lmlib.data.stored.metadata" in sys.modules and "jax" not in sys.modules
"""
CHATS = """
import sys
import lmlib.data.chats.chat
assert "jinja2" not in sys.modules
import lmlib.data.chats.server
assert not {"jax", "datasets", "tokenizers"} & set(sys.modules)
"""
CHAT_SERVER = """
import sys
import lmlib.data.chats.server
assert not {"jax", "numpy", "datasets", "tokenizers"} & set(sys.modules)
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_data_stands_alone() -> None:
    run(ALL_OF_DATA)


def test_writing_shards_does_without_jax() -> None:
    run(WRITING)


def test_whatever_reads_what_is_stored_does_without_jax() -> None:
    run(READING)


def test_chat_templates_start_soon() -> None:
    run(CHATS)
    run(CHAT_SERVER)
