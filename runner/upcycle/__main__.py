"""Makes a mixture of experts of a dense model: each expert a copy of its mlp, with a new router.

    python -m runner.upcycle --from=RUN_OR_FOLDER --experts=8 --top=2 --to=WORKDIR

--from     RUN, RUN@STEP, or a folder of Hugging Face's or its name; adapters are merged
--experts  how many there are in each layer
--top      how many of them a token goes to, at least 2; their shares add up to 1
--to       a folder that is new or empty
--seed     of the routers
--init_from, --weights, --trust_module   as of runner.convert
WORKDIR has a config and a checkpoint of step 0, the weights alone, which compute what the dense
model does. Runs begin with them: python -m runner --fdl_config=WORKDIR --workdir=RUN. The config is
that of the run, or experiments/from_hf of the folder's model, with the mixture as model, of which
all trains, and router_balance in the loss. docs/finetuning.md says what it is good for.
The memory of this machine holds both models in float32; a run reads its checkpoint onto a mesh.
"""

import sys
import time
from collections.abc import Sequence

from absl import flags

from runner.command_line.command import run, take_flags
from runner.command_line.config_flags import TRUST_MODULE
from runner.command_line.exit_status import FINISHED
from runner.command_line.init_from import INIT_FROM
from runner.command_line.weights import EMA, WEIGHTS
from runner.errors import ConfigError, user_errors

_FROM = flags.DEFINE_string("from", None, "RUN[@STEP], a folder of Hugging Face's, or its name")
_TO = flags.DEFINE_string("to", None, "the workdir to make")
_EXPERTS = flags.DEFINE_integer("experts", 8, "in each layer", lower_bound=2)
_TOP = flags.DEFINE_integer("top", 2, "experts of a token", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "of the routers", lower_bound=0, upper_bound=2**32 - 1)

if __name__ == "__main__":
    take_flags()  # what follows takes seconds to import

import jax

from lmlib.storage.local_folder import local_folder
from lmlib.terminal.quantities import duration_text
from runner.upcycle.mixture import make_mixture
from runner.weights.target import LoadOptions


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be busy with a run
    if arguments or not _FROM.value or not _TO.value:
        raise ConfigError("give --from and --to, as in: --from=RUN --to=WORKDIR; see --help")
    began = time.perf_counter()
    options = LoadOptions(TRUST_MODULE.value, INIT_FROM.value, WEIGHTS.value == EMA, _show)
    with user_errors():
        to = local_folder(_TO.value)
        made = make_mixture(_FROM.value, to, _EXPERTS.value, _TOP.value, _SEED.value, options)
    print(f"{to} holds {made}; it took {duration_text(time.perf_counter() - began)}")
    return FINISHED


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
