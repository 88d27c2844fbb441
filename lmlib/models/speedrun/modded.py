"""The decoder of modded-nanogpt's record 89 (Jordan et al., `train_gpt.py` of August 2026).

Source: https://github.com/KellerJordan/modded-nanogpt. Shapes: B batch, S sequence, E embed, R
repetitions of a layer.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.families.transformer import check_sizes
from lmlib.models.forward_context import FIRST_RESIDUAL, TOKENS, ForwardContext
from lmlib.models.model import TrunkOutput, WeightGroup
from lmlib.models.part import Part
from lmlib.models.parts.embedding import embedded
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary
from lmlib.models.parts.ungated_mlp import MLP, relu_squared
from lmlib.models.parts.value_embedding import looked_up
from lmlib.models.speedrun.bigram import BigramEmbedding
from lmlib.models.speedrun.composed_heads import ComposedHeads
from lmlib.models.speedrun.exclusive import Exclusive
from lmlib.models.speedrun.paired_heads import PairedAttention
from lmlib.models.speedrun.pieces import Backout, DecoderInPieces, Pieces, with_factors
from lmlib.models.speedrun.record_attention import AfterAttention, HeadGate, RecordAttention
from lmlib.models.speedrun.record_block import RecordBlock, RecordValues, Share, SharedValues, Skip
from lmlib.models.speedrun.smear import Smear
from lmlib.models.speedrun.token_gates import Gate, TokenGates, of_residual
from lmlib.models.speedrun.window_yarn import WindowYarn
from lmlib.models.weights import fold_in_name, jit_init
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import reshard
from lmlib.parallel.matrix import dense

# Keys of `Context.shared`.
_BIGRAM, _SKIPPED, _ATTENDED = "bigram", "skipped", "attended"
_FIRST, _SKIP_GATE, _MIX, _SCALES = "first_end", "skip", "mix", "scales"
_VALUES, _VALUE_GATES = "values", "of_values"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layers, counted from 0, that differ from others, by default as in the record.

    Args:
      pieces: numbers of layers before each use of the residual stream again. The end of the first
        is read by `skip`, and that of the second by attention after it; the last piece has the
        connections of MUDD.
      long: layers with the long window and an offset of keys.
      paired, values, exclusive, gated, composed: layers with these parts.
      skip: the layer in the second piece whose attention is replaced by the end of the first.
    """

    pieces: tuple[int, int, int, int] = (4, 4, 2, 1)
    long: tuple[int, ...] = (3, 10)
    paired: tuple[int, ...] = (0, 2, 5, 9)
    values: tuple[int, ...] = (1, 2, 8, 9, 10)
    exclusive: tuple[int, ...] = (1, 3, 4, 7)
    gated: tuple[int, ...] = (3, 10)
    composed: tuple[int, ...] = (10,)
    skip: int | None = 6

    @property
    def layers(self) -> int:
        return sum(self.pieces)


class ModdedDecoder(DecoderInPieces):
    """The decoder that `modded` makes."""

    rows_may_be_split = True

    bigram: BigramEmbedding | None
    gates: tuple[TokenGates, TokenGates]  # computed before the first layer, and after its piece
    mudd: tuple[TokenGates, TokenGates] | None  # for the last layer, and after it
    backout: Backout | None

    def __init__(
        self, *sizes: Any, bigram: Any, gates: Any, mudd: Any, backout: Any, **decoder: Any
    ):
        super().__init__(*sizes, **decoder)
        self.bigram, self.gates, self.mudd, self.backout = bigram, gates, mudd, backout

    def trunk(
        self, tokens_BS: Int32[Array, "b s"], context: ForwardContext, cache: Any = None
    ) -> TrunkOutput:
        compute, context = context.compute, context.sharing({TOKENS: tokens_BS})
        with jax.named_scope("embed"):
            x_BSE = embedded(dense(self.embedding), tokens_BS, compute.dtype, compute.residual)
            x_BSE, window = self.smeared(x_BSE, context, cache)
            x_BSE, pairs = reshard(x_BSE, compute.residual), None
            assert self.norm is not None
            x_BSE = jax.checkpoint(gather(self.norm, compute.dtype))(x_BSE)
            context = context.sharing({FIRST_RESIDUAL: x_BSE, **self._gates(0, x_BSE, context)})
            if self.bigram is not None:
                before = None if cache is None else cache[2][0]
                bigram_BSE, pairs = self.bigram(tokens_BS, context, before)
                context = context.sharing({_BIGRAM: bigram_BSE})
                x_BSE += of_residual(context.shared[_BIGRAM, 0], context) * bigram_BSE
        ends, pieces = [x_BSE], Pieces(self, context, cache)
        ends.append(pieces.run(x_BSE))
        later = {_SKIPPED: ends[1], **self._gates(1, ends[1], context)}
        ends.append(pieces.run(ends[1], later))
        later |= {_ATTENDED: ends[2]}
        ends.append(pieces.run(ends[2], later))
        if self.mudd is None:
            x_BSE = pieces.run(ends[3], later)
            if self.backout is not None:
                x_BSE = gather(self.backout, compute.dtype)(x_BSE, ends[2])
        else:
            x_BSE = self._connected(pieces, ends, later, context)
        found = pieces.output(x_BSE, window)
        if cache is not None:
            kept = None if pairs is None else pairs[None]
            found = found._replace(cache=(*found.cache, kept))
        return found

    def _gates(self, number: int, x_BSE: Array, context: ForwardContext) -> dict[Hashable, Array]:
        gates = self.gates[number]
        return {} if gates is None else gather(gates, context.compute.dtype)(x_BSE, context)

    def _connected(
        self, pieces: Pieces, ends: list[Array], later: dict[Hashable, Array],
        context: ForwardContext,
    ) -> Float[Array, "b s embed"]:  # fmt: skip
        """Runs the last piece, with connections to the ends of others before and after it."""
        assert self.mudd is not None
        dtype = context.compute.dtype
        first, skipped, attended, x_BSE = ends
        mix = gather(self.mudd[0], dtype)(x_BSE, context)
        of_values, of_stream = (of_residual(mix[name], context) for name in (_VALUES, _MIX))
        found: dict[Hashable, Array] = {
            _VALUES: _weighted(of_values, (first, attended, x_BSE)), _FIRST: first
        }  # fmt: skip
        last_BSE = x_BSE + _weighted(of_stream, (first, attended, x_BSE))
        y_BSE = pieces.run(last_BSE, {**later, **mix, **found})
        mix_BSM = of_residual(gather(self.mudd[1], dtype)(y_BSE, context)[_MIX], context)
        sources = (first, attended, x_BSE, skipped, *self._first_values(context))
        return y_BSE + _weighted(mix_BSM, sources)

    def _first_values(self, context: ForwardContext) -> list[Float[Array, "b s embed"]]:
        """The rows of the first layer's value embedding that has one."""
        layers: Any = itertools.chain(*self.stack.patterns)
        for layer in layers:
            values = getattr(layer.attention, "value_embedding", None)
            if values is not None:
                table_VE = jax.tree.map(lambda w_R: w_R[0], values).table
                rows_BSE = looked_up(dense(table_VE), context.shared[TOKENS], context.compute.dtype)
                return [reshard(rows_BSE, context.compute.residual)]
        return []

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """The caches of layers and of the smear, and the last token, for its bigram."""
        found = super().empty_cache(rows, length, dtype)
        of_pairs = self.bigram and self.bigram.empty_cache(rows, length, dtype)[None]
        return found and (*found, of_pairs)

    def weight_groups(self) -> tuple[WeightGroup, ...]:
        names = ("bigram", "gates", "mudd", "backout")
        own = ((name, getattr(self, name)) for name in names)
        return (*super().weight_groups(), *(WeightGroup(*each) for each in own if any(each[1:])))


def _weighted(
    mix_BSM: Float[Array, "b s mixed"], sources: Sequence[Float[Array, "b s embed"]]
) -> Float[Array, "b s embed"]:
    """Σ_m mix[m] · sources[m]."""
    terms = [mix_BSM[..., m : m + 1] * x_BSE for m, x_BSE in enumerate(sources)]
    return functools.reduce(jnp.add, terms)


def modded(
    vocab: int,
    embed: int,
    heads: int,
    mlp: int,
    layout: Layout = Layout(),
    short_window: int = 768,
    long_window: int = 1_664,
    yarn_windows: tuple[int, ...] = (384, 896, 1_408, 1_664),
    bigram_rows: int = 377_280,
    value_embeddings: bool = True,
    smear: bool = True,
    scales: bool = True,
    paired_heads: bool = True,
    key_offset: bool = True,
    exclusive: bool = True,
    head_gates: bool = True,
    composed_heads: bool = True,
    composed_window: int = 112,
    skip: bool = True,
    one_input: bool = True,
    first_shares: bool = True,
    mudd: bool = True,
    backout: bool = False,
    logit_cap: float | None = 11.5,
    logits_scale: float = 23 / 30,
    norm_epsilon: float = 2.0**-23,
    *,
    key: PRNGKeyArray,
) -> ModdedDecoder:
    """Returns a decoder with new weights, which has no biases and no learned norms.

    Initial values have the record's standard deviations.

    Args:
      vocab, embed, heads, mlp, norm_epsilon: as in `llama`, for the layers of `layout`.
      short_window, long_window: tokens before a token that it attends to, half in paired heads.
      yarn_windows: the long windows for which rotations were changed so far; see `WindowYarn`.
      bigram_rows: rows of the `BigramEmbedding`; 0 for none.
      value_embeddings, smear, paired_heads, exclusive, head_gates, composed_heads, skip: False
        leaves out `GatedValueEmbedding`, `Smear`, `PairedAttention`, `Exclusive`, `HeadGate`,
        `ComposedHeads` or `Skip`.
      composed_window: tokens that composed heads see.
      scales: False for no scales in `RecordBlock` and `RecordAttention`.
      key_offset: False for no offset of keys in layers with a long window.
      one_input: False if attention after the second piece reads its own layer's input.
      first_shares: False if layers do not add a gated share of the embedded tokens.
      mudd: False for no connections (`ModdedDecoder`) to earlier layers.
      backout: True subtracts the end of the second piece at the end, if `mudd` is off.
      logit_cap, logits_scale: c and s of logits c · tanh(s z / c).
    """
    check_sizes(vocab=vocab, embed=embed, layers=layout.layers, heads=heads, mlp=mlp)
    if embed % heads or embed // heads % 4 or embed // heads < 8:
        raise ValueError(
            f"embed = {embed} must be heads = {heads} times a multiple of 4, at least 8: a quarter "
            "of a head's coordinates are pairs that rotate"
        )
    head_dim, last = embed // heads, layout.layers - 1
    yarn, quarter = WindowYarn(tuple(yarn_windows)), embed // heads // 4
    # Wavelengths are 2 pi · 1024^(i / (quarter - 1)).
    rotary = Rotary(head_dim // 2, 1_024 ** (quarter / (quarter - 1)), yarn, interleaved=True)
    norm = functools.partial(RMSNorm, epsilon=norm_epsilon, learned=False)
    scale = 0.1 * yarn.sharper
    switches = {
        "paired": paired_heads, "values": value_embeddings, "exclusive": exclusive,
        "gated": head_gates, "composed": composed_heads,
    }  # fmt: skip
    off: dict[str, Any] = {name: () for name, is_on in switches.items() if not is_on}
    layout = dataclasses.replace(layout, **off, skip=layout.skip if skip else None)
    given = {"first": first_shares, "bigrams": bigram_rows > 0, "mudd": mudd}

    def layer(number: int, key: PRNGKeyArray) -> Part:
        by_mudd = mudd and number == last
        is_long, is_paired = number in layout.long, number in layout.paired
        values: Any = None
        own: dict[str, Any] = {}
        if number in layout.values and by_mudd:
            values, own = SharedValues, {"gate": _VALUE_GATES, "activations": _VALUES}
        elif number in layout.values:
            values, own = RecordValues, {"gate_input": 6, "row_input": 6, "peak": 2.0}
        values = values and functools.partial(values, vocab, **own)
        after: list[AfterAttention] = []
        if number in layout.composed:
            keys = ("composed_in", number), ("composed_out", number)
            after.append(ComposedHeads(heads, head_dim, scale, *keys, composed_window))
        after += [Exclusive(("exclusive", number))] if number in layout.exclusive else []
        after += [HeadGate(("head", number))] if number in layout.gated else []
        attention: Part = Skip(Share(_SKIP_GATE, _SKIPPED), key=key)
        if number != layout.skip:
            attention = (PairedAttention if is_paired else RecordAttention)(
                embed, heads, heads, head_dim, rotary=rotary, scales=scales, scale=scale,
                window=1 + (long_window if is_long else short_window),
                offset=key_offset and is_long and not is_paired, after=after,
                norm=functools.partial(norm, "head_dim"), value_embedding=values,
                residual_scale=0.5, key=fold_in_name(key, "attention"),
            )  # fmt: skip
        fed = MLP(embed, mlp, relu_squared, False, residual_scale=0.0, key=fold_in_name(key, "mlp"))
        late = one_input and number >= sum(layout.pieces[:2])
        return RecordBlock(
            attention, fed, norm(embed=embed, key=key), _shares(layout, number, **given),
            _ATTENDED if late else None,
            _SCALES if by_mudd else "learned" if scales else None, key=fold_in_name(key, "layer"),
        )  # fmt: skip

    def model(key: PRNGKeyArray) -> ModdedDecoder:
        makers = [functools.partial(layer, number) for number in range(layout.layers)]
        starts = [0, *itertools.accumulate(layout.pieces)]
        gates = functools.partial(TokenGates, embed)
        mixes = [
            [Gate(_VALUES, (0.0,) * 3), Gate(_MIX, (0.0,) * 3), Gate(_VALUE_GATES, (2.0,) * 2),
             Gate(_SCALES, (1.1**0.5, 1.0) * 2), Gate(("first", last), (0.0,)),
             Gate((_BIGRAM, last), (0.05,))],
            [Gate(_MIX, (0.0, -0.5, 0.0, 0.0, 0.0)[: 5 if layout.values else 4])],
        ]  # fmt: skip
        made = ModdedDecoder(
            vocab, embed, [makers[a:b] for a, b in itertools.pairwise(starts)],
            Smear(embed, min(12, embed), key=key) if smear else None,
            bigram=BigramEmbedding(bigram_rows, embed, key=fold_in_name(key, "bigram"))
            if bigram_rows else None,
            gates=tuple(
                gates(each, key=fold_in_name(key, f"gates {i}")) if each else None
                for i, each in enumerate(_gates(layout, heads, **given))
            ),
            mudd=tuple(
                gates(each, learned_scale=False, key=fold_in_name(key, f"mudd {i}"))
                for i, each in enumerate(mixes)
            ) if mudd else None,
            backout=Backout(0.5, key=key) if backout and not mudd else None,
            norm=norm(embed=embed, key=key), logit_cap=logit_cap, logits_scale=logits_scale,
            embedding_deviation=0.005, key=key,
        )  # fmt: skip
        # Standard deviations of the record, divided by ours.
        factors = dict.fromkeys((".query", ".key", ".value", ".mlp.up"), 0.5)
        return with_factors(made, {**factors, "unembedding": 0.005 * embed**0.5 / 0.35})

    return jit_init(model)(key)


def _shares(layout: Layout, number: int, first: bool, bigrams: bool, mudd: bool) -> list[Share]:
    """The first layer's input has its bigrams already. MUDD's layer adds it, and not the tokens."""
    if number == layout.skip:
        return []
    by_mudd = mudd and number == layout.layers - 1
    found = [Share(("first", number), _FIRST if by_mudd else FIRST_RESIDUAL)]
    of_pairs = [Share((_BIGRAM, number), _BIGRAM)] if bigrams and number else []
    return [*(found if first or by_mudd else []), *of_pairs]


def _gates(
    layout: Layout, heads: int, first: bool, bigrams: bool, mudd: bool
) -> tuple[list[Gate], list[Gate]]:
    """The gates made before the first layer, and at the end of the first piece."""
    found: tuple[list[Gate], list[Gate]] = [], []
    of_heads = {
        "exclusive": (layout.exclusive, 0.0),
        "head": (layout.gated, 0.25),
        "composed_in": (layout.composed, 1.0),
        "composed_out": (layout.composed, 0.0),
    }
    for number in range(layout.layers):
        made = found[number >= layout.pieces[0]]
        made += [
            Gate((name, number), (initial,) * heads)
            for name, (layers, initial) in of_heads.items()
            if number in layers
        ]
        if number == layout.skip:
            made.append(Gate(_SKIP_GATE, (0.5,)))
        elif not (mudd and number == layout.layers - 1):
            made += [Gate(("first", number), (0.0,))] if first else []
            made += [Gate((_BIGRAM, number), (0.05,))] if bigrams else []
    return found
