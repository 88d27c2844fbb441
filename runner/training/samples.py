"""What a model makes of an experiment's prompts, while it is trained and at the end."""

from typing import Any

from lmlib.compute import Compute
from lmlib.data.text import HasText
from lmlib.experiment import Experiment
from lmlib.generate import Generator, Sampling
from runner.command_line.errors import ConfigError, user_errors
from runner.processes.agreement import agreed

TOKENS = 48
SAMPLING = Sampling(temperature=0.8)
_LENGTHS = 64


def sampled(experiment: Experiment, model: Any) -> tuple[str, ...]:
    """The experiment's prompts and how `model` continues each; every process must call it.

    Weights stay split as they are in training, so that little more memory is needed.

    Raises:
      ConfigError: if the data has no tokenizer, or one that cannot read the prompts.
    """
    if not experiment.prompts:
        return ()
    with agreed(), user_errors():
        data = experiment.data
        codec = data.text_codec() if isinstance(data, HasText) else None
        if codec is None:
            raise ConfigError(f"{type(data).__name__} knows no tokenizer")
        prompts = [codec.encode(prompt) for prompt in experiment.prompts]
    longest = max(map(len, prompts)) + TOKENS
    generator = Generator(
        model,
        experiment.mesh,
        # What suits training's sequences may not suit prompts: any kernel.
        Compute(dtype=experiment.compute.dtype),
        rows=len(prompts),
        length=-(-longest // _LENGTHS) * _LENGTHS,
        whole=False,
    )
    made = generator(prompts, TOKENS, SAMPLING, seed=experiment.seed)
    return tuple(
        codec.decode([*prompt, *continuation.tokens])
        for prompt, (continuation,) in zip(prompts, made, strict=True)
    )
