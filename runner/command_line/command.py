"""What the commands have in common: mistakes told in one line, tracebacks only where they help."""

import re
import sys
import traceback
from collections.abc import Sequence

from absl import flags

from lmlib.data.token_arrays import DamagedDataError
from runner.command_line.errors import ConfigError, StoppedEarly, TrainingStopped, in_words
from runner.processes.endings import MISTAKE

# Their messages say all that a user needs: what, where, and what to do.
_TOLD = (ConfigError, TrainingStopped, OSError, DamagedDataError)


def parse(arguments: Sequence[str]) -> list[str]:
    """For `app.run(main, flags_parser=parse)`: a wrong flag is told in one line, and exits with 2.

    `--fdl.x=1` is short for `--fdl_set=x=1`, which Fiddle defines.
    """
    written_out = [re.sub(r"^--fdl\.", "--fdl_set=", argument) for argument in arguments]
    try:
        return flags.FLAGS(written_out)
    except flags.Error as error:
        tell(ConfigError(f"{error}; see --help"), debug=False)
        sys.exit(MISTAKE)


def tell(error: BaseException, debug: bool) -> None:
    """Writes `error` to stderr: its message if that says all, else, or if `debug`, a traceback."""
    sys.stdout.flush()
    if debug or not isinstance(error, (*_TOLD, StoppedEarly)):
        traceback.print_exception(error)
    elif isinstance(error, StoppedEarly):
        print(error, file=sys.stderr)
    else:
        text = in_words(error)
        # Others may end with a table.
        print(
            "error:",
            " ".join(text.split()) if isinstance(error, ConfigError) else text,
            file=sys.stderr,
        )
    sys.stderr.flush()
