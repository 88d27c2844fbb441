"""Computes many requests at once, in rows of one cache.

A prompt is computed alone, in chunks, then its row joins the rows that grow by a token at a time.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.generate import Sampling, usual_dtype, weights
from lmlib.generate.generator import check_prompt
from lmlib.generate.steps import NOTHING
from lmlib.hardware.free_memory import check_fits
from lmlib.models.model import Model, check_length
from lmlib.parallel.layout import COMPUTE, num_shards
from lmlib.parallel.mesh import mesh_of
from lmlib.serve.adapters import with_base
from lmlib.serve.prefixes import Prefixes, beginnings_of
from lmlib.serve.requests import MOST_STOP_IDS, MOST_TOP, Request, Token, Update
from lmlib.serve.steps import ROUND, Cache, Made, Rows, copy, decode, empty, prefill, score

CHUNK = 128  # tokens of a prompt that are computed at once
_SIZES = (16, 32, 64, CHUNK)  # of a prompt's last chunk
_HURRIED = 4  # maximum number of tokens of a call while other requests wait
_MOST_ROWS = 8  # of a call, as a multiple of the slots
_CHECKED = 4  # tokens that are compared when numbers of rows are checked
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Answer:
    """The state of a request in an engine.

    `computed` and `made` count tokens of the prompt in the cache, and new ones. `newest` is the
    token to compute next; `NOTHING` while the prompt is computed. `to_store` are numbers of chunks
    after which the prompt is copied for reuse.
    """

    request: Request
    receive: Callable[[Update], None]
    row: int = -1
    computed: int = 0
    reused: int = 0
    made: int = 0
    newest: int = NOTHING
    beginnings: list[bytes] = dataclasses.field(default_factory=list)
    to_store: set[int] = dataclasses.field(default_factory=set)
    scores: list[Token] = dataclasses.field(default_factory=list)
    began: bool = False
    cancelled: bool = False
    ended: bool = False
    queue_turn: int = 0  # lower ones leave the queue of a `Service` first

    @property
    def to_compute(self) -> int:
        """Tokens of the prompt before its last one, from which the first new token is made."""
        return len(self.request.prompt) - 1

    @property
    def left(self) -> int:
        """Tokens of the prompt that must be computed before the answer."""
        return self.to_compute - self.computed


class Engine:
    """Answers requests with one model.

    Args:
      model: copied in the dtype of `compute`.
      mesh: where the weights are placed; `None`: the mesh that they were made on, if any. Only
        `tensor` may split arrays: each device computes every row.
      compute: only `dtype` and `attention` are used; `None`: in `usual_dtype`.
      slots: requests that are computed at once.
      length: tokens of the longest prompt and its answer.
      prefix_rows: beginnings of prompts that are kept for reuse, each in a row of the cache.
      int8: True to store matrices in rounded 8-bit form.
      adapters: models with low-rank adapters of `model`, by the names that requests give. Only
        their adapters are copied.

    Raises:
      ValueError: if a size is out of range; the model does not support such long texts; the mesh
        splits the batch; or an adapter has another base, or changes more than matrices of layers.
      MemoryError: if the cache does not fit in free memory.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh | None = None,
        compute: Compute | None = None,
        slots: int = 16,
        length: int = 2_048,
        prefix_rows: int = 8,
        int8: bool = False,
        adapters: Mapping[str, Model] | None = None,
    ):
        sizes = ("slots", slots, 1), ("length", length, 2), ("prefix_rows", prefix_rows, 0)
        for name, size, least in sizes:
            if not least <= size < 2**31:
                raise ValueError(f"{name} must be in [{least}, 2^31), got {size}")
        self._mesh = mesh = mesh or mesh_of(model)
        if mesh is not None and num_shards(COMPUTE["batch"], mesh) > 1:
            raise ValueError(
                f"the mesh {dict(mesh.shape)} splits the batch, but every device computes all rows "
                "of an engine: use a mesh of `tensor` alone, make_mesh(tensor=…)"
            )
        switches = [length for key in model.reads for length in getattr(key, "switches", ())]
        self.slots, self.length, self.vocab = slots, min([length, *switches]), model.vocab
        self._prefix_rows = prefix_rows
        self.tokens = self._turns = 0  # tokens generated so far
        self._answers: list[Answer] = []
        self._cache: Cache | None = None
        with self._on_mesh():
            compute = compute or Compute(dtype=usual_dtype())
            self._compute = Compute(dtype=compute.dtype, attention=compute.attention)
            check_length(model, self.length, self._compute)
            settings = self._compute.dtype, mesh, True, int8
            base = weights.ready(model, *settings)
            self._weights: dict[str | None, weights.Weights] = {None: base}
            for name, adapter in (adapters or {}).items():
                self._weights[name] = with_base(name, adapter, model, base, settings)
            most = max(2, 1 << (slots - 1).bit_length())
            self._make_cache(most)
            self.rows = self._equal_rows(most)
            self._compile_prefill()

    # Requests

    def check(self, request: Request) -> None:
        """Raises ValueError if the engine cannot answer `request`."""
        check_prompt("the prompt", request.prompt, request.max_tokens, self.vocab, self.length)
        if request.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {request.max_tokens}")
        for name, end in (("seed", 2**32), ("sample", 2**31), ("top", MOST_TOP + 1)):
            if not 0 <= getattr(request, name) < end:
                raise ValueError(f"{name} must be in [0, {end:,}), got {getattr(request, name)}")
        if len(request.stop_ids) > MOST_STOP_IDS:
            raise ValueError(
                f"at most {MOST_STOP_IDS} tokens may end an answer, got {len(request.stop_ids)}"
            )
        if request.adapter not in self._weights:
            known = ", ".join(filter(None, self._weights)) or "none"
            raise ValueError(f"there is no adapter {request.adapter!r} (known: {known})")

    @property
    def free(self) -> int:
        """The number of requests that can begin."""
        return self.slots - len(self._answers)

    @property
    def running(self) -> list[Answer]:
        """Answers that grow."""
        return [each for each in self._answers if each.newest != NOTHING]

    @property
    def prefilling(self) -> list[Answer]:
        """Answers whose prompts are computed, in the order in which they came."""
        return [each for each in self._answers if each.newest == NOTHING]

    @property
    def prefixes(self) -> int:
        """The number of beginnings of prompts in the cache."""
        return len(self._prefixes)

    @property
    def cache_bytes(self) -> int:
        """The size of the cache, on all devices together."""
        return sum(each.nbytes for each in jax.tree.leaves(self._cache))

    def begin(self, answer: Answer) -> None:
        """Takes a row for a request that `check` accepts, while some are `free`."""
        taken = {each.row for each in self._answers}
        answer.row = next(row for row in range(self.slots) if row not in taken)
        self._answers.append(answer)

    def turn(self, others_wait: bool = False) -> None:
        """Computes a chunk of one prompt, then a few tokens of all answers.

        After an exception, call `fail`.
        """
        for each in [*self._answers]:
            if each.cancelled:
                self._end(each, Update(ended="cancelled"))
        with self._on_mesh():
            if self._cache is None:
                self._make_cache(self._most)
            if prompts := self.prefilling:
                # The one with the least left, but in every second turn the one that came first.
                self._turns += 1
                shortest = min(prompts, key=lambda each: each.left)
                self._prefill(shortest if self._turns % 2 else prompts[0])
            if running := self.running:
                self._decode(running, others_wait or len(running) < len(self._answers))

    def fail(self, error: Exception) -> None:
        """Ends all answers; the next turn makes the cache again."""
        self._cache = None
        text = str(error).strip().partition("\n")[0][:200]
        for each in [*self._answers]:
            self._end(each, Update(ended=f"failed: {type(error).__name__}: {text}"))

    # Memory

    def _make_cache(self, most: int) -> None:
        """Makes an empty cache for calls of up to `most` rows. Its last row is never written to."""
        self._most, self._prefixes = most, Prefixes(range(most, most + self._prefix_rows))
        self._empty_row = most + self._prefix_rows
        sizes = self._empty_row + 1, self.length, self._compute
        self._cache = None  # frees it before a new one is made
        make = jax.jit(empty, static_argnums=(1, 2, 3))
        model = self._weights[None].model
        shapes = jax.eval_shape(make, model, *sizes)
        devices = jax.devices()[:1] if self._mesh is None else list(self._mesh.devices.flat)
        try:
            check_fits(f"a cache of {sizes[0]:,} × {self.length:,} tokens", shapes, devices)
        except MemoryError as error:
            raise MemoryError(f"{error}: lower slots, prefix_rows or length") from None
        self._cache = make(model, *sizes)

    def _equal_rows(self, most: int) -> tuple[int, ...]:
        """Returns numbers of rows for which a row's bits depend on no other row of the call.

        XLA may sum the products of few rows in another order, as for a single row. The largest set
        of numbers with equal bits is chosen. If no number qualifies, calls get more rows.
        """
        sets: list[tuple[dict[Any, Made], list[int]]] = []
        while not sets:
            for rows in (most >> n for n in range(most.bit_length() - 1)):
                if (found := self._checked(rows)) is None:
                    continue
                equal = (numbers for bits, numbers in sets if bits | found == bits)
                if (numbers := next(equal, None)) is None:
                    sets.append((found, numbers := []))
                numbers.append(rows)
            if not sets:
                most *= 2
                if most > _MOST_ROWS * max(self.slots, 2):
                    raise ValueError(
                        "the bits of a row depend on the other rows in calls of up to "
                        f"{most // 2} rows, so this model cannot be served on these devices"
                    )
                self._make_cache(most)
        numbers = max((numbers for _, numbers in sets), key=lambda each: (len(each), each))
        return tuple(sorted(numbers))

    def _checked(self, rows: int) -> dict[Any, Made] | None:
        """Returns the first tokens of some texts in calls of `rows`; `None` if bits differ."""
        found: dict[Any, Made] = {}
        mixtures = range(rows), range(rows)[::-1], [0] * rows
        for name, texts in itertools.product(self._weights, mixtures):
            answers = [
                Answer(Request((text % self.vocab,), _CHECKED, Sampling(), text, top=1), _ignore, i)
                for i, text in enumerate(texts)
            ]
            for each in answers:
                each.newest = each.request.prompt[0]
                self._copy(self._empty_row, each.row, 0)
            made = self._call(name, answers, 0, rows, _CHECKED)
            for row, text in enumerate(texts):
                bits = jax.tree.map(lambda x, row=row: x[row].tobytes(), made)
                if found.setdefault((name, text), bits) != bits:
                    return None
        return found

    def _compile_prefill(self) -> None:
        for size in _SIZES:
            if size < 2 * self.length:
                for name in self._weights:
                    request = Request((0,) * (size + 1), 0, Sampling(), 0, adapter=name)
                    self._compute_chunk(Answer(request, _ignore, 0))

    def _copy(self, source: int, target: int, length: int) -> None:
        self._cache = copy(self._cache, np.int32(source), np.int32(target), np.int32(length))

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    # Steps

    def _prefill(self, answer: Answer) -> None:
        if not answer.began:
            self._reuse(answer)
        if answer.left > 0:
            self._compute_chunk(answer)
        if answer.left > 0:
            return
        prompt = tuple(answer.scores)
        if answer.request.max_tokens == 0:
            self._end(answer, Update(prompt, ended="length"))
            return
        if prompt:
            self._send(answer, Update(prompt))
        answer.newest = answer.request.prompt[-1]

    def _reuse(self, answer: Answer) -> None:
        """Puts the longest beginning of the prompt that is stored into the answer's row."""
        answer.began, request = True, answer.request
        chunks, source = 0, self._empty_row
        if not request.score_prompt:  # which needs the features of all tokens
            text = request.prompt[: answer.to_compute]
            answer.beginnings = beginnings_of(request.adapter, text, CHUNK)
            chunks, stored = self._prefixes.longest(answer.beginnings)
            source = stored if chunks else source
            answer.to_store = self._prefixes.worth_storing(answer.beginnings)
        answer.computed = answer.reused = chunks * CHUNK
        self._copy(source, answer.row, answer.computed)

    def _compute_chunk(self, answer: Answer) -> None:
        start, request = answer.computed, answer.request
        end = min(start + CHUNK, answer.to_compute)
        size = next(size for size in _SIZES if size >= end - start)
        tokens_C, next_C = np.zeros((2, size), np.int32)
        tokens_C[: end - start] = request.prompt[start:end]
        numbers = (np.int32(each) for each in (start, end, answer.row))
        given = self._weights[request.adapter]
        self._cache, h_CE = prefill(given, self._cache, tokens_C, *numbers, self._compute)
        if request.score_prompt:
            next_C[: end - start] = request.prompt[start + 1 : end + 1]
            made = score(given, h_CE, next_C, np.int32(request.top), self._compute)
            answer.scores += _tokens(jax.device_get(made), 0, end - start, request.top)
        answer.computed = end
        chunks, rest = divmod(end, CHUNK)
        if rest == 0 and chunks in answer.to_store:
            row = self._prefixes.store(answer.beginnings[chunks - 1])
            if row is not None:
                self._copy(answer.row, row, end)

    def _decode(self, running: Sequence[Answer], hurry: bool) -> None:
        self._move_together(running)
        end, most = self._covering(1 + max(each.row for each in running)), self.rows[-1]
        limit = min(
            _HURRIED if hurry else ROUND,
            max(each.request.max_tokens - each.made for each in running),
        )
        calls = collections.defaultdict(list)
        for each in running:
            calls[each.row // most * most, each.request.adapter].append(each)
        for (first, name), answers in calls.items():
            made = self._call(name, answers, first, min(most, end - first), limit)
            for each in answers:
                new = int(np.sum(made.tokens_BN[each.row - first] != NOTHING))
                tokens = _tokens(made, each.row - first, new, each.request.top)
                each.made += new
                each.newest = tokens[-1].id
                self.tokens += new
                reused = each.reused if each.made == new else 0
                update = Update((), tuple(tokens), None, reused)
                if each.newest in each.request.stop_ids:
                    self._end(each, update._replace(ended="stop"))
                elif each.made == each.request.max_tokens:
                    self._end(each, update._replace(ended="length"))
                else:
                    self._send(each, update)

    def _call(
        self, adapter: str | None, answers: Sequence[Answer], first: int, rows: int, limit: int
    ) -> Made:
        """Generates up to `limit` tokens of `answers`, in a call of `rows` from `first` on."""
        given, numbers = self._weights[adapter], (np.int32(first), np.int32(limit))
        texts = _rows_of(answers, first, rows)
        self._cache, made = decode(given, self._cache, texts, *numbers, self._compute)
        host: Made = jax.device_get(made)
        return host

    def _covering(self, rows: int) -> int:
        """The number of rows of calls for the first `rows`: large ones, then a smaller one."""
        whole, rest = divmod(rows, self.rows[-1])
        last = next(each for each in (0, *self.rows) if each >= rest)
        return whole * self.rows[-1] + last

    def _move_together(self, running: Sequence[Answer]) -> None:
        """Moves running rows to free ones, if a call then needs fewer rows."""
        fewest = self._covering(len(running))
        taken = {each.row for each in self._answers}
        free = [row for row in range(fewest) if row not in taken]
        beyond = [each for each in running if each.row >= fewest]
        if len(beyond) <= len(free):
            for answer, row in zip(beyond, free, strict=False):
                self._copy(answer.row, row, answer.to_compute + answer.made)
                answer.row = row

    def _end(self, answer: Answer, update: Update) -> None:
        answer.ended = True
        self._answers.remove(answer)
        self._send(answer, update)

    def _send(self, answer: Answer, update: Update) -> None:
        try:
            answer.receive(update)
        except Exception:
            _log.exception("an answer cannot be delivered, and is cancelled")
            answer.cancelled = True


def _ignore(update: Update) -> None:
    pass


def _rows_of(answers: Sequence[Answer], first: int, count: int) -> Rows:
    """The arguments of a call for `answers`; other rows are idle."""

    def filled(dtype: Any, value: Callable[[Answer], Any], *shape: int, fill: int = 0) -> Any:
        x = np.full((count, *shape), fill, dtype)
        for each in answers:
            x[each.row - first] = value(each)
        return x

    def stop_ids(each: Answer) -> list[int]:
        ids = each.request.stop_ids
        return [*ids, *[NOTHING] * (MOST_STOP_IDS - len(ids))]

    def setting(name: str) -> Any:
        return filled(np.float32, lambda each: getattr(each.request.sampling, name) or 0.0)

    return Rows(
        filled(np.int32, lambda each: each.newest),
        filled(np.int32, lambda each: each.to_compute + each.made),
        filled(np.int32, lambda each: each.request.max_tokens - each.made),
        filled(np.uint32, lambda each: each.request.seed),
        filled(np.uint32, lambda each: each.request.sample),
        {field.name: setting(field.name) for field in dataclasses.fields(Sampling)},
        filled(np.int32, stop_ids, MOST_STOP_IDS, fill=NOTHING),
        filled(np.int32, lambda each: each.request.top),
    )


def _tokens(made: Made, row: int, count: int, top: int) -> list[Token]:
    """The first `count` tokens of a row, with the `top` likeliest ones beside each."""
    found = []
    for n in range(count):
        beside = zip(
            made.top_ids_BNT[row, n, :top].tolist(),
            made.top_logprobs_BNT[row, n, :top].tolist(),
            strict=True,
        )
        id, logprob = made.tokens_BN[row, n].item(), made.logprobs_BN[row, n].item()
        found.append(Token(id, logprob, tuple(beside)))
    return found
