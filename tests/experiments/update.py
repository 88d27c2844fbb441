"""Writes the golden texts anew: python tests/experiments/update.py"""

import os
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "shared"))
from own_texts import write_own_texts  # noqa: E402

from runner.config import configs  # noqa: E402
from runner.config.text import flattened  # noqa: E402

GOLDEN = TESTS / "experiments/golden"
NEEDS = {
    "experiments/from_hf": ["folder=tests/hf/golden/llama_3_1"],
    "experiments/lora": ["base=tests/hf/golden/llama_3_1"],
    "experiments/dpo": ["base=tests/hf/golden/llama_3_1"],
    "experiments/own_text": ["tokens=DATA"],
}

with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    os.symlink(TESTS, "tests")
    write_own_texts(Path("DATA"))
    for name in configs.experiments():
        text = flattened(configs.load(name, overrides=NEEDS.get(name, ())))
        text = text.replace(f"{os.getcwd()}/", "")
        (GOLDEN / f"{name.removeprefix('experiments/')}.txt").write_text(text)
