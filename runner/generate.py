"""Continues texts with a model, or chats with it.

    python -m runner.generate --from=WORKDIR[@STEP] --prompt="def fibonacci("
    python -m runner.generate --from=HF_DIR_OR_NAME
    python -m runner.generate --from=MODEL --prompts=FILE.jsonl --out=FILE.jsonl

--prompt     a text to continue; repeatable. Without it, on a terminal: text after text is typed;
             Ctrl-C ends an answer, Ctrl-D the command
--chat       prompts are a user's turns, written by the tokenizer's chat template; typed turns are
             remembered. Unless said, what is typed is a chat where there is a template
--tokens     ids in place of a prompt, as 1,2,3; repeatable
--prompts    a file of JSON objects, one in a line, with a "prompt", "messages" or "tokens" each
--out        their answers, likewise; a file that was begun goes on
--max_tokens, --temperature (0: always the likeliest token), --top_k, --top_p, --min_p,
--repetition_penalty, --samples, --seed, --stop (a string that ends an answer; repeatable)
--rows       of --prompts: answers that are made together
--length     tokens of prompt and answer at most; typed chats need room to grow
--dtype      to compute in: unless said the run's, or float32
--tokenizer  a folder with a tokenizer's files, in place of the model's own
--trust_module   a module of yours that a config.json may refer to; repeatable
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from lmlib.data.chat import ChatTemplate, read_chat_template
from lmlib.data.text import TextCodec
from lmlib.generate import Generator, Sampling
from lmlib.local_folder import local_folder
from lmlib.quantities import duration_text
from runner.command_line.command import run
from runner.command_line.config_flags import TRUST_MODULE
from runner.command_line.errors import ConfigError, user_errors
from runner.command_line.paths import check_can_be_made
from runner.inference.answer import Manner
from runner.inference.answer_file import AnswerFile
from runner.inference.loaded import Loaded, load
from runner.inference.prompt_files import read_lines, settings_of
from runner.inference.prompts import AS_NUMBERS, Reader
from runner.inference.terminal import Terminal
from runner.jax_settings.accelerators import check_devices, use_cpu_if_alone
from runner.jax_settings.compilation_cache import keep_compiled_programs
from runner.jax_settings.xla_flags import keep_cpus_in_order
from runner.processes.endings import FINISHED, STOPPED

