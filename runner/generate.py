"""Continues texts with a model, or chats with it.

    python -m runner.generate --from=WORKDIR[@STEP] --prompt="def fibonacci("
    python -m runner.generate --from=HF_DIR_OR_NAME
    python -m runner.generate --from=MODEL --prompts=FILE.jsonl --out=FILE.jsonl

Without --prompt, --tokens and --prompts, texts are typed on a terminal: Ctrl-C ends an answer,
Ctrl-D the command. Without a terminal, standard input is the prompt. Typed texts are a chat if
there is a chat template. A line of --prompts is an object with "prompt", "messages" or "tokens".
"""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence

from absl import flags

from runner.command_line.command import run, show, take_flags
from runner.command_line.exit_status import FINISHED, STOPPED
from runner.command_line.flags import DTYPES, MOST, TRUST_MODULE, loading, model_flags
from runner.errors import ConfigError, chosen_sizes, user_errors

_FROM = flags.DEFINE_string("from", None, "RUN, RUN@STEP, Hugging Face folder, or Hub name.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue.")
_CHAT = flags.DEFINE_bool("chat", None, "Render prompts with the chat template.")
_TOKENS = flags.DEFINE_multi_string("tokens", [], "Token ids instead of a prompt: 1,2,3.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSON lines file of prompts.")
_OUT = flags.DEFINE_string("out", None, "JSON lines file for answers; continued if unfinished.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 200, "Maximum tokens of an answer.", 1, MOST)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "Temperature; 0 takes the likeliest token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Number of likeliest tokens to sample from.")
_TOP_P = flags.DEFINE_float("top_p", 0.95, "Total probability of the tokens to sample from.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Minimum probability, relative to the likeliest token.")
_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Above 1: repeat tokens less.")
_SAMPLES = flags.DEFINE_integer("samples", 1, "Number of answers per prompt.", 1, MOST)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random numbers.", 0, 2**32 - 1)
_STOP = flags.DEFINE_multi_string("stop", [], "String that ends an answer.")
_ROWS = flags.DEFINE_integer("rows", 16, "With --prompts: answers generated together.", 1, MOST)
_LENGTH = flags.DEFINE_integer("length", None, "Maximum tokens of prompt and answer.", 2, MOST)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, DTYPES, "Compute dtype; default: bfloat16, on CPUs float32."
)
_INT8 = flags.DEFINE_bool("int8", False, "Keep matrices in 8 bits, which saves memory.")
_DRAFT = flags.DEFINE_string(
    "draft", None, "Smaller model that guesses tokens, for speed; `heads`: the model's own heads."
)
_DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", 4, "With --draft: guesses per call.", 1, MOST)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of another tokenizer than the model's.")
model_flags()

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

from lmlib.data.stored.metadata import tokenizers_differ
from lmlib.generate import Generator, Sampling, usual_dtype
from lmlib.generate.speculative import SpeculativeGenerator
from lmlib.models.multi_token import without_heads
from lmlib.storage.local_folder import local_folder
from lmlib.storage.stored_json import LARGEST
from runner.inference.answer import DecodingOptions
from runner.inference.answer_file import AnswerFile
from runner.inference.loaded import Loaded, load
from runner.inference.prompts import Reader, digest_of, read_lines
from runner.inference.terminal import Terminal
from runner.jax_settings.devices import start_devices

_LENGTHS = 64  # compiled lengths are multiples of this many tokens
_TYPED_LENGTH = 4096
_HEADS = "heads"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    _check(arguments)
    prompts = _PROMPT.value or _piped()
    with user_errors():
        sampling = Sampling(
            _TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _MIN_P.value, _PENALTY.value
        )
    start_devices()
    try:
        loaded = load(
            _FROM.value or "",
            dtype=_DTYPE.value or usual_dtype(),
            tokenizer=_TOKENIZER.value,
            **loading(),
            show=show,
        )
        reader = Reader(loaded.name, loaded.model.vocab, loaded.codec, loaded.chat_template)
        with user_errors():
            manner = DecodingOptions(
                reader.shown,
                loaded.answer_ends,
                tuple(_STOP.value),
                _MAX_TOKENS.value,
                sampling,
                _SAMPLES.value,
                _SEED.value,
            )
        if _PROMPTS.value:
            _answer_file(loaded, reader, manner)
        elif prompts or _TOKENS.value:
            _answer_prompts(loaded, reader, manner, prompts)
        else:
            _converse(loaded, reader, manner)
    except KeyboardInterrupt:
        show("stopped; run the same command to continue" if _PROMPTS.value else "stopped")
        return STOPPED
    return FINISHED


def _check(arguments: Sequence[str]) -> None:
    """Raises ConfigError for flags that cannot be combined."""
    if arguments or not _FROM.value:
        raise ConfigError('give --from and a prompt: --from=WORKDIR --prompt="Once"; see --help')
    ways = [flag for flag in (_PROMPT, _TOKENS, _PROMPTS) if flag.value]
    if len(ways) > 1:
        raise ConfigError(f"--{ways[0].name} and --{ways[1].name} are two ways to ask: give one")
    if bool(_PROMPTS.value) != bool(_OUT.value):
        raise ConfigError(
            "--prompts and --out go together: a file of prompts, and of their answers"
        )
    if _ROWS.present and not _PROMPTS.value:
        raise ConfigError("--rows is for --prompts")
    if _DRAFT_TOKENS.present and not _DRAFT.value:
        raise ConfigError("--draft_tokens is for --draft")
    if _PROMPTS.value and _ROWS.value < _SAMPLES.value:
        raise ConfigError(f"--rows={_ROWS.value} must be at least --samples={_SAMPLES.value}")
    if _CHAT.value and (_TOKENS.value or _PROMPTS.value):
        raise ConfigError('--chat is for --prompt and typed texts; in a file, use "messages"')


def _piped() -> list[str]:
    """Returns standard input as a list with one prompt, without the final newline.

    The list is empty on a terminal, and if other flags give the prompts.
    """
    if _TOKENS.value or _PROMPTS.value or (sys.stdin is not None and sys.stdin.isatty()):
        return []
    with user_errors():
        text = "" if sys.stdin is None else sys.stdin.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ConfigError(
            f"the piped text has more than {LARGEST:,} characters: give a shorter text"
        )
    if not text:
        raise ConfigError("give --prompt, or --prompts and --out; on a terminal prompts are typed")
    return [text.removesuffix("\n")]


def _generator(loaded: Loaded, rows: int, needed: int) -> Generator:
    """Makes a generator for `rows` sequences of `needed` tokens."""
    length = _LENGTH.value
    if length is None:
        longest = needed if loaded.longest is None else max(loaded.longest, needed)
        length = min(-(-needed // _LENGTHS) * _LENGTHS, longest)
    if warning := loaded.beyond_training(length):
        show(warning)
    with user_errors(), chosen_sizes("give a smaller --max_tokens, --length, --samples or --rows"):
        settings = loaded.mesh, loaded.compute, rows, length
        if _DRAFT.value is None:
            return Generator(without_heads(loaded.model), *settings, int8=_INT8.value)
        draft = None if _DRAFT.value == _HEADS else _draft(loaded, _DRAFT.value, length).model
        return SpeculativeGenerator(
            loaded.model, draft, _DRAFT_TOKENS.value, *settings, int8=_INT8.value
        )


def _draft(loaded: Loaded, reference: str, length: int) -> Loaded:
    """Loads the model that guesses for `loaded`, on the same devices."""
    mesh = loaded.mesh if loaded.mesh.size > 1 else None
    dtype = str(loaded.compute.dtype)
    draft = load(reference, mesh=mesh, dtype=dtype, trusted=TRUST_MODULE.value, show=show)
    if tokenizers_differ(loaded.tokenizer, draft.tokenizer):
        raise ConfigError(
            f"{draft.name} knows the ids of {draft.tokenizer}, and {loaded.name} of "
            f"{loaded.tokenizer}: give a --draft with the model's tokenizer"
        )
    if warning := draft.beyond_training(length):
        show(f"--draft: {warning}")
    return draft


def _answer_prompts(
    loaded: Loaded, reader: Reader, manner: DecodingOptions, prompts: list[str]
) -> None:
    if _TOKENS.value:
        try:
            given = [[int(each) for each in text.split(",")] for text in _TOKENS.value]
        except ValueError as error:
            flags = " ".join(f"--tokens={text}" for text in _TOKENS.value)
            raise ConfigError(f"{flags}: write ids as 1,2,3") from error
        asked = [*map(reader.checked, given)]
        echoes = [reader.shown.decode(ids) for ids in asked]
    elif _CHAT.value:
        asked = [reader.of_chat([{"role": "user", "content": text}]) for text in prompts]
        echoes = [""] * len(asked)
    else:
        asked = [reader.of_text(text) for text in prompts]
        echoes = prompts
    generator = _generator(loaded, manner.samples, max(map(len, asked)) + manner.max_tokens)
    terminal = Terminal(generator, reader, manner)
    terminal.prepare(max(asked, key=len))
    for number, (ids, echo) in enumerate(zip(asked, echoes, strict=True)):
        terminal.show(ids, number, echo)


def _converse(loaded: Loaded, reader: Reader, manner: DecodingOptions) -> None:
    if reader.codec is None:
        reader.of_text("")  # its error says what to do
    chat = reader.template is not None if _CHAT.value is None else _CHAT.value
    if chat and reader.template is None:
        reader.of_chat([])
    if chat and manner.samples > 1:
        raise ConfigError("--samples is for texts: a chat has one answer; give --nochat")
    length = min(loaded.longest or _TYPED_LENGTH, _TYPED_LENGTH)
    terminal = Terminal(_generator(loaded, manner.samples, length), reader, manner)
    terminal.prepare([0])
    how = "a chat (--nochat continues texts)" if chat else "each text is continued"
    show(f"{loaded.name}: {how}; Ctrl-C ends an answer, Ctrl-D all")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, gives `input` an editor
    terminal.converse(lambda: input("> "), chat)


def _answer_file(loaded: Loaded, reader: Reader, manner: DecodingOptions) -> None:
    with user_errors():
        prompts, out = local_folder(_PROMPTS.value or ""), local_folder(_OUT.value or "")
        digest = digest_of(prompts)
    if out.absolute() == prompts.absolute():
        raise ConfigError("--out is the file of prompts: give another")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out={out}: there is no folder {out.parent}")
    file = AnswerFile(
        out,
        {
            "from": loaded.name,
            "prompts": digest,
            "tokenizer": loaded.tokenizer and loaded.tokenizer.sha256,
            "dtype": str(loaded.compute.dtype),
            "int8": _INT8.value,
            "draft": _DRAFT.value,
            "draft_tokens": _DRAFT_TOKENS.value if _DRAFT.value else None,
            "max_tokens": manner.max_tokens,
            **dataclasses.asdict(manner.sampling),
            "samples": manner.samples,
            "seed": manner.seed,
            "stop": manner.stop,
            "rows": _ROWS.value,
            "length": _LENGTH.value,
        },
    )
    # Templates see the time of the first start, so that a resumed command renders the same chats.
    lines = read_lines(prompts, dataclasses.replace(reader, now=file.begun))
    longest = max(len(line.ids) for line in lines)
    if _LENGTH.value is not None and longest + manner.max_tokens > _LENGTH.value:
        line = max(lines, key=lambda line: len(line.ids))
        raise ConfigError(
            f"line {line.number} has {longest:,} tokens, which with --max_tokens="
            f"{manner.max_tokens} are more than --length={_LENGTH.value}"
        )
    rows = min(_ROWS.value, len(lines) * manner.samples)
    generator = _generator(loaded, rows, longest + manner.max_tokens)
    file.answer(lines, generator, manner, together=_ROWS.value // manner.samples)
    show(f"{out} has the answers to all {len(lines):,} lines of {prompts}")


if __name__ == "__main__":
    run(main)
