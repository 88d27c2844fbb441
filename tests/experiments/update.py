"""Writes the golden texts anew: python tests/experiments/update.py"""

from pathlib import Path

from runner.config import configs
from runner.config.text import flattened

golden = Path(__file__).parent / "golden"
golden.mkdir(exist_ok=True)
for name in configs.experiments():
    overrides = ["folder=tests/hf/golden/llama_3_1"] if name == "experiments/from_hf" else []
    text = flattened(configs.load(name, overrides=overrides))
    (golden / f"{name.removeprefix('experiments/')}.txt").write_text(text)
