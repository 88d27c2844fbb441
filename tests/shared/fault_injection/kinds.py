"""The kinds of runs that the campaign strikes, each with what it reads."""

import dataclasses
from pathlib import Path

from fault_injection.inputs import write_base, write_teacher, write_tokens


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run.

    Args:
      name: for the table.
      fiddler: of experiment.py; `None`: its config as it is.
      splits: of the data set, all that it reads.
      base, teacher: whether it reads the base, or what a teacher said.
    """

    name: str
    fiddler: str | None
    splits: tuple[str, ...] = ("short", "long", "validation")
    base: bool = False
    teacher: bool = False

    def prepare(self, scratch: Path) -> None:
        """Makes the folder `scratch` with all that such a run reads."""
        scratch.mkdir(parents=True, exist_ok=True)
        write_tokens(scratch, self.splits)
        if self.base:
            write_base(scratch)
        if self.teacher:
            write_teacher(scratch)


EVERYTHING = Kind("everything at once", None)
KINDS = (
    Kind("pretraining", "pretraining"),
    Kind("LoRA on int8", "lora_on_int8", base=True),
    Kind("DPO", "dpo", ("pairs",), base=True),
    Kind("distillation", "distillation", base=True),
    Kind("stored teacher", "stored_teacher", ("long",), teacher=True),
)
