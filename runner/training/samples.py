"""Samples continuations of an experiment's prompts, during training and at its end."""

from collections.abc import Sequence
from typing import Any

from lmlib.compute import Compute
from lmlib.data.chats.chat import answer_ends
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.text import HasText, TextCodec
from lmlib.experiment import Experiment
from lmlib.generate import Generator, Sampling
from lmlib.models.model import padded_length
from lmlib.storage.atomic_file import make_folder, write_atomically
from runner.errors import ConfigError, WorkdirLost, error_text, user_errors
from runner.processes.agreement import agreed
from runner.training.run import Run

FOLDER = "samples"
TOKENS = 48
SAMPLING = Sampling(temperature=0.8)
_LENGTHS = 64


def write_samples(run: Run, step: int, model: Any) -> tuple[str, ...]:
    """Returns the samples and writes them to WORKDIR/samples/STEP.txt; every process calls it.

    Failures are reported but don't end the run.
    """
    try:
        texts = continued(run.experiment, model)
        run.lock.check()
        if texts and run.primary:
            make_folder(run.workdir / FOLDER)
            file = run.workdir / FOLDER / f"{step:08d}.txt"
            write_atomically(file, "\n\n".join(texts) + "\n", run.lock.check)
        return texts
    except WorkdirLost:
        raise
    except Exception as error:
        reason = error_text(error).partition("\n")[0]
        run.tell(f"WARNING: the prompts are not continued: {type(error).__name__}: {reason}")
        return ()


def continued(experiment: Experiment, model: Any) -> tuple[str, ...]:
    """Returns the experiment's prompts, each followed by a continuation from `model`.

    Raises ConfigError if the data has no tokenizer, or its tokenizer cannot encode the prompts.
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
        # The attention kernel for training may not support the prompts' lengths.
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
    """Returns the prompts' token ids, in the chat template of `data` if any, and stop ids."""
    template = data.chat_template() if isinstance(data, FlatTokens) else None
    if template is None:
        return [codec.encode(prompt) for prompt in prompts], []
    chats = [
        template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
        for prompt in prompts
    ]
    return [codec.encode_marked(chat.text) for chat in chats], sorted(answer_ends(template, codec))
