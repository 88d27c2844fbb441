"""Golden texts of all experiments. To write them anew: python tests/experiments/update.py"""

import contextlib
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


def texts():
    """Returns the file's name and the text of each experiment."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.symlink(TESTS, "tests")
        write_own_texts(Path("DATA"))
        for name in configs.experiments():
            text = flattened(configs.load(name, overrides=NEEDS.get(name, ())))
            yield f"{name.removeprefix('experiments/')}.txt", text.replace(f"{os.getcwd()}/", "")


if __name__ == "__main__":
    for name, text in texts():
        (GOLDEN / name).write_text(text)
