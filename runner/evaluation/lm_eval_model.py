"""A model for lm-eval. Only this file and `tasks` import lm_eval, from the extra `eval`.

Tokenization, truncation and the first token are the same as in lm-eval's backend `hf`, so that the
same weights get the same numbers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lmlib.data.chats.chat import DEFAULT, ChatTemplate
from runner.evaluation.answering import Answering
from runner.evaluation.tasks import FILE, SAMPLING, GenerationSettings

_NAMED = 3  # questions listed in an error


class LmEvalModel(TemplateLM):
    """Answers lm-eval's requests.

    Raises ValueError if the tokenizer lacks such a token.

    Args:
      tokenizer: a tokenizer of transformers, with a token that begins or ends texts.
      generation: the generation settings of the model's folder.
      warn: called with a line about ignored settings.
    """

    def __init__(
        self,
        answering: Answering,
        tokenizer: Any,
        generation: GenerationSettings,
        warn: Callable[[str], None],
    ):
        super().__init__()
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no token that begins or ends a text")
        self.tokenizer = tokenizer
        self._answering = answering
        self._generation, self._warn = generation, warn
        self._ignored: set[str] = set()  # ignored settings already reported

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return eos if bos is None else bos

    @property
    def max_length(self) -> int:
        return self._answering.length

    @property
    def max_gen_toks(self) -> int:
        """The default number of new tokens, if a task does not set it."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the chat as one text.

        Without a generation prompt, the text ends inside the last message, to be continued. If the
        template takes no system message, the message is dropped with a warning, as in lm-eval's own
        backends. Raises ValueError if there is no template, or it rejects the chat, and OSError as
        `ChatTemplate.render` does.
        """

        def applied(messages: list[dict[str, str]]) -> str:
            if add_generation_prompt:
                return self._template.render(messages, add_generation_prompt=True).text
            return continued(self._template, messages)

        others = [message for message in chat_history if message["role"] != "system"]
        try:
            text = applied(chat_history)
        except ValueError:
            if len(others) == len(chat_history):
                raise
            text = applied(others)
        said = [each["content"].strip() for each in chat_history if each["role"] == "system"]
        if "system" not in self._ignored and not all(each in text for each in said):
            self._ignored.add("system")
            self._warn(
                f"WARNING: the chat template ignores the system message {said[0]!r:.80}: use a "
                "template that includes it (chat_template.jinja)"
            )
        return text

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        """The chat template, rendered by us: transformers sets no limits on its memory and time."""
        found = self.tokenizer.chat_template
        if found is None:
            raise ValueError("the tokenizer has no chat template")
        sources = {DEFAULT: found} if isinstance(found, str) else found
        return ChatTemplate(sources, self.tokenizer.special_tokens_map)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encodes a text; adds the tokenizer's special tokens unless the text begins with them."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(prefix)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each request.

        Raises ValueError before computing any of them, with the task and the question, if a context
        or continuation has no tokens or a continuation is too long.
        """
        asked = [self._encoded(*request.args) for request in requests]
        wrong = [
            f"task {request.task_name}, question {request.doc_id}: the continuation "
            f"{request.args[1]!r:.60} has {len(continuation):,} tokens, and its context "
            f"{len(context):,}"
            for request, (context, continuation) in zip(requests, asked, strict=True)
            if not context or not 0 < len(continuation) <= self.max_length
        ]
        if wrong:
            more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise ValueError(
                f"{'; '.join(wrong[:_NAMED])}{more}. Both need a token, and a continuation has up "
                f"to {self.max_length:,}: fix these questions (counted from 0), or leave out "
                "their tasks"
            )
        return self._answering.likelihoods(asked)

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context:
            return self._encode_pair(context, continuation)
        ids = self.tok_encode(continuation, add_special_tokens=False)
        begun = ids[:1] == [self.prefix_token_id]
        return (ids[:1], ids[1:]) if begun else ([self.prefix_token_id], ids)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._answering.likelihoods([request[1:] for request in requests])

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        windows, owners = [], []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(make_disjoint_window(window))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (nats, _) in zip(owners, self._answering.likelihoods(windows), strict=True):
            sums[number] += nats
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generates answers; requests with the same settings run together. Greedy by default."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            settings = dict(normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks))
            max_tokens, drawn = settings.pop("max_gen_toks"), settings.pop("do_sample", False)
            eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
            until = [term for term in handle_stop_sequences(settings.pop("until"), eos) if term]
            said = {name: settings.pop(name) for name in SAMPLING if name in settings}
            if settings:
                raise ValueError(f"generation_kwargs has {', '.join(settings)}, which is not known")
            self._tell_ignored(drawn)
            prompts = (self.tok_encode(requests[number].args[0]) for number in numbers)
            made = self._answering.continuations(
                [prompt or [self.prefix_token_id] for prompt in prompts],
                max_tokens,
                until,
                self._generation.sampling(said, drawn),
                numbers,
                self._generation.max_new_tokens or max_tokens,
            )
            for number, tokens in zip(numbers, made, strict=True):
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                texts[number] = postprocess_generated_text(text, until, None)
        return texts

    def _tell_ignored(self, drawn: bool) -> None:
        ignored = self._generation.ignored(drawn)
        if new := ignored.keys() - self._ignored:
            self._ignored |= new
            named = ", ".join(f"{key}={ignored[key]!r:.40}" for key in sorted(new))
            self._warn(
                f"WARNING: {FILE} of {self._generation.name} has {named}: ignored here, where "
                "transformers may generate other answers"
            )


def continued(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text up to the end of the last message.

    Same as `continue_final_message` of transformers. Raises ValueError if the template rejects the
    chat, or leaves that message out.
    """
    *before, last = messages
    mark = uuid4().hex
    whole = template.render([*before, {**last, "content": f"{last['content']}{mark} "}]).text
    text, found, rest = whole.rpartition(mark)
    if not found:
        raise ValueError("the chat template leaves out the last message")
    return text if rest.startswith(" ") else text.rstrip()  # some templates strip the message
