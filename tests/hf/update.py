"""Makes the golden folders again, with lmlib[parity] installed:

PYTHONPATH=.:tests/shared python tests/hf/update.py [NAME …]
"""

import json
import sys

import changed_keys
import golden_by_peft
import golden_by_transformers
from hugging_face_families import ADAPTERS, FAMILIES, GOLDEN, GOLDEN_ADAPTERS

chosen = sys.argv[1:] or [*FAMILIES, *ADAPTERS]
if unknown := set(chosen) - FAMILIES.keys() - ADAPTERS.keys():
    sys.exit(f"no golden folder is called {', '.join(sorted(unknown))}")
for name in FAMILIES.keys() & chosen:
    golden_by_transformers.write(GOLDEN / name, *FAMILIES[name])
    changed_keys.OUTCOMES[name] = golden_by_transformers.outcomes_of_changed_keys(name)
changed_keys.FILE.write_text(json.dumps(changed_keys.OUTCOMES, indent=1, sort_keys=True) + "\n")
for name in ADAPTERS.keys() & chosen:
    golden_by_peft.write(GOLDEN_ADAPTERS / name, *ADAPTERS[name][:2])
