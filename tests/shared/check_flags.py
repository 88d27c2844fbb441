"""`check_flags.py MODULE ARGUMENTS` ends with 0 if the command has these flags and values."""

import re
import runpy
import sys

from absl import flags

from runner.config import configs

module, *arguments = sys.argv[1:]
runpy.run_module(module, run_name="defines its flags")
given = [re.sub(r"^--fdl\.", "--fdl_set=", argument) for argument in arguments]
flags.FLAGS([module, *given])
name = flags.FLAGS["fdl_config"].value if "fdl_config" in flags.FLAGS else ""
if name in configs.experiments() and "--fdl.tokens=" not in " ".join(arguments):  # which is read
    configs.load(name, flags.FLAGS.fiddler, flags.FLAGS.fdl_set)
