"""Makes the golden folders again, with lmlib[parity] installed:

PYTHONPATH=.:tests/shared python tests/hf/update.py [NAME …]
"""

import sys

import golden_by_peft
import golden_by_transformers
from hugging_face_families import ADAPTERS, FAMILIES, GOLDEN, GOLDEN_ADAPTERS

for name in sys.argv[1:] or FAMILIES:
    golden_by_transformers.write(GOLDEN / name, *FAMILIES[name])
for name in ADAPTERS.keys() & (sys.argv[1:] or ADAPTERS):
    golden_by_peft.write(GOLDEN_ADAPTERS / name, *ADAPTERS[name])
