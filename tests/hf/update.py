"""Makes the golden folders again, with lmlib[parity] installed:

PYTHONPATH=.:tests/shared python tests/hf/update.py [NAME …]
"""

import sys

from golden_by_transformers import write
from hugging_face_families import FAMILIES, GOLDEN

for name in sys.argv[1:] or FAMILIES:
    write(GOLDEN / name, *FAMILIES[name])
