"""Continues an experiment's prompts, while the model is trained and at the end."""

from collections.abc import Sequence
from typing import Any

from lmlib.compute import Compute
from lmlib.data.chats.chat import answer_ends
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.text import HasText, TextCodec
from lmlib.experiment import Experiment
from lmlib.generate import Generator, Sampling
from lmlib.models.model import padded_length
from lmlib.storage.whole_file import make_folder, write_whole
from runner.errors import ConfigError, WorkdirLost, in_words, user_errors
from runner.processes.agreement import agreed
from runner.training.run import Run

FOLDER = "samples"
TOKENS = 48
SAMPLING = Sampling(temperature=0.8)
_LENGTHS = 64


class Samples:
    """Continues the prompts of a run. A failure is reported, and the run goes on."""

    def __init__(self, run: Run):
        self._run = run

    def write(self, step: int, model: Any) -> tuple[str, ...]:
        """Returns the texts and writes WORKDIR/samples/STEP.txt; every process must call it."""
        run = self._run
        try:
            texts = continued(run.experiment, model)
            run.lock.check()
            if texts and run.primary:
                make_folder(run.workdir / FOLDER)
                file = run.workdir / FOLDER / f"{step:08d}.txt"
                write_whole(file, "\n\n".join(texts) + "\n", run.lock.check)
            return texts
        except WorkdirLost:
            raise
        except Exception as error:
            reason = in_words(error).partition("\n")[0]
            run.tell(f"WARNING: the prompts are not continued: {type(error).__name__}: {reason}")
            return ()


def continued(experiment: Experiment, model: Any) -> tuple[str, ...]:
    """Returns the experiment's prompts, each with a continuation by `model`.

    Weights stay split as they are in training, so that little more memory is needed.

    Raises:
      ConfigError: if the data has no tokenizer, or one that cannot read the prompts.
    """
    if not experiment.samples.prompts:
        return ()
    with agreed(), user_errors():
        data = experiment.data
        codec = data.text_codec() if isinstance(data, HasText) else None
        if codec is None:
            raise ConfigError(f"{type(data).__name__} knows no tokenizer")
        prompts, stop_ids = asked(data, codec, experiment.samples.prompts)
    longest = max(map(len, prompts)) + TOKENS
    generator = Generator(
        model,
        experiment.mesh,
        # The kernel of training's sequences may not suit prompts.
        Compute(dtype=experiment.compute.dtype),
        rows=len(prompts),
        length=padded_length(model, longest, _LENGTHS),
        whole=False,
    )
    made = generator(prompts, TOKENS, SAMPLING, seed=experiment.seed, stop_ids=stop_ids)
    return tuple(
        codec.decode([*prompt, *continuation.tokens])
        for prompt, (continuation,) in zip(prompts, made, strict=True)
    )


def asked(data: Any, codec: TextCodec, prompts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Returns the ids of the prompts, and the ids that end a continuation.

    If `data` are conversations with a chat template, each prompt is a user's message in it.
    """
    template = data.chat_template() if isinstance(data, FlatTokens) else None
    if template is None:
        return [codec.encode(prompt) for prompt in prompts], []
    chats = [
        template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
        for prompt in prompts
    ]
    return [codec.encode_marked(chat.text) for chat in chats], sorted(answer_ends(template, codec))
