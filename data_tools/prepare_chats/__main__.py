"""Makes a split of flat tokens from conversations, for fine-tuning.

    python -m data_tools.prepare_chats --dataset=HuggingFaceTB/smoltalk --name=all --split=train \\
        --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct --out=DIR --max_length=2048

The tokenizer's chat template renders each conversation as text; the assistant's answers are the
targets. If it is killed, the same command continues where it stopped. See docs/finetuning.md.
"""

import time
from collections.abc import Sequence
from datetime import datetime
from typing import get_args

from absl import flags

from data_tools import command_line, shared_flags
from data_tools.command_line import ProgressLine
from data_tools.prepare_chats.conversations import ConversationField
from data_tools.prepare_chats.prepare import NOW, Overflow, prepare_chats
from data_tools.prepare_chats.template import load_template, template_names
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.report import summary
from data_tools.rows.block import SkippedRows
from data_tools.shared_flags import FLAGS

shared_flags.define_source_flags()
shared_flags.define_split_flags()
flags.adopt_module_key_flags(shared_flags)
flags.DEFINE_string("prompt_column", "prompt", "Column of prompts.")
flags.DEFINE_string("response_column", "response", "Column of responses.")
flags.DEFINE_bool("pairs", False, "Read a chosen and a rejected answer from each row.")
flags.DEFINE_bool(
    "labels", False, "Read an answer and its label, true if desirable, from each row."
)
flags.DEFINE_string(
    "template",
    None,
    f"Chat template: a file, or one of {', '.join(template_names())}; default: the tokenizer's. "
    "--template= joins each prompt and its response without a template.",
)
flags.DEFINE_string("date", f"{NOW:%Y-%m-%d}", "Date that the template shows as today.")
flags.DEFINE_integer(
    "max_length", None, "Maximum tokens of a conversation, or of both of a pair.", lower_bound=2
)
flags.DEFINE_enum(
    "overflow",
    "drop",
    get_args(Overflow),
    "How to shorten longer conversations: drop them, cut the beginning of the prompt, or cut the "
    "last turns. Responses are never cut; if nothing else can be, the conversation is dropped.",
)


def make_splits(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    command_line.check_no_arguments(arguments)
    out = OutFolder(FLAGS.out)
    try:
        now = datetime.strptime(FLAGS.date, "%Y-%m-%d")
    except ValueError as error:
        raise ValueError(f"--date={FLAGS.date} is not a date such as 2024-07-26") from error
    if FLAGS.pairs and FLAGS.labels:
        raise ValueError("--pairs and --labels exclude each other: give one of them")
    columns = FLAGS.prompt_column, FLAGS.response_column
    field = ConversationField(*columns, FLAGS.pairs, FLAGS.labels)
    source = shared_flags.rows(field)
    tokenizer = shared_flags.tokenizer()
    template = load_template(FLAGS.tokenizer, FLAGS.template)
    if template is None and FLAGS.template is None:
        raise ValueError(
            f"--tokenizer={FLAGS.tokenizer} has no chat template: give --template, a file or a "
            "name, or --template= to join each prompt and its response without one"
        )
    skipped = SkippedRows()
    for split, part, _ in shared_flags.parts():
        begun = time.monotonic()
        made = prepare_chats(
            source,
            tokenizer,
            template,
            out,
            split,
            max_length=FLAGS.max_length,
            overflow=FLAGS.overflow,
            now=now,
            part=part,
            workers=shared_flags.workers(),
            on_bad_row=FLAGS.on_bad_row,
            progress=ProgressLine(),
            skipped=skipped,
        )
        print(summary(made, f"{out}/{split}", time.monotonic() - begun), flush=True)
    return 0


if __name__ == "__main__":
    command_line.run("prepare_chats", make_splits, resumable=True)
