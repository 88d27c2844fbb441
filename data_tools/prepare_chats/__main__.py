"""Makes a split of flat tokens from conversations, for fine-tuning.

    python -m data_tools.prepare_chats --dataset=HuggingFaceTB/smoltalk --name=all --split=train \\
        --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct --out=DIR --max_length=2048

The tokenizer's chat template makes a text of each conversation; what the assistant says are the
targets. Killed and started again, it goes on where it was. docs/finetuning.md says more.
"""

import time
from collections.abc import Sequence
from datetime import datetime
from typing import cast, get_args

from absl import flags

from data_tools import command_line, source_flags, split_flags
from data_tools.prepare_chats import ConversationField, load_template, prepare_chats
from data_tools.prepare_chats.lengths import TooLong
from data_tools.prepare_chats.prepare import NOW
from data_tools.prepare_chats.template import template_names
from data_tools.pretokenize.out_folder import OutFolder
from data_tools.pretokenize.progress import ProgressLines
from data_tools.pretokenize.report import SkippedRows, summary
from data_tools.pretokenize.writing import OnBadRow
from data_tools.source_flags import ON_BAD_ROW
from data_tools.split_flags import OUT, TOKENIZER

for module in (source_flags, split_flags):
    flags.adopt_module_key_flags(module)  # --help lists them

_PROMPT_COLUMN = flags.DEFINE_string("prompt_column", "prompt", "The column of what is asked.")
_RESPONSE_COLUMN = flags.DEFINE_string(
    "response_column", "response", "The column of what is answered."
)
_PAIRS = flags.DEFINE_bool("pairs", False, "Rows have answers to choose from: chosen and rejected.")
_TEMPLATE = flags.DEFINE_string(
    "template",
    None,
    "Another chat template than the tokenizer's: a file, or one of "
    f"{', '.join(template_names())}; --template= for none: a prompt and its response, one after "
    "the other.",
)
_DATE = flags.DEFINE_string("date", f"{NOW:%Y-%m-%d}", "What the template takes for today.")
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length", None, "Tokens of the longest conversation, or of both of a pair.", lower_bound=2
)
_TOO_LONG = flags.DEFINE_enum(
    "too_long",
    "drop",
    get_args(TooLong),
    "What becomes of a longer one: it is dropped, or its prompt's beginning is cut off, or its "
    "last turns are. A response is never cut; where that cannot be, it is dropped.",
)


def make_splits(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    if arguments:
        raise ValueError(f"unexpected argument {arguments[0]!r}: settings are --name=value")
    out = OutFolder(OUT.value)
    try:
        now = datetime.strptime(_DATE.value, "%Y-%m-%d")
    except ValueError as error:
        raise ValueError(f"--date={_DATE.value} is no date such as 2024-07-26") from error
    field = ConversationField(_PROMPT_COLUMN.value, _RESPONSE_COLUMN.value, _PAIRS.value)
    source = source_flags.source(field)
    tokenizer = split_flags.tokenizer()
    template = load_template(TOKENIZER.value, _TEMPLATE.value)
    if template is None and _TEMPLATE.value is None:
        raise ValueError(
            f"--tokenizer={TOKENIZER.value} has no chat template, which marks who says what: give "
            "--template, a file or a name; --template= joins each prompt and its response as they "
            "are"
        )
    skipped = SkippedRows()
    for split, part, _ in split_flags.parts():
        begun = time.monotonic()
        made = prepare_chats(
            source,
            tokenizer,
            template,
            OUT.value,
            split,
            max_length=_MAX_LENGTH.value,
            too_long=cast(TooLong, _TOO_LONG.value),
            now=now,
            part=part,
            workers=split_flags.workers(),
            on_bad_row=cast(OnBadRow, ON_BAD_ROW.value),
            progress=ProgressLines(),
            skipped=skipped,
        )
        print(summary(made, f"{out}/{split}", time.monotonic() - begun), flush=True)
    return 0


if __name__ == "__main__":
    command_line.run("prepare_chats", make_splits, resumable=True)
