"""The decoder that all families share; each family states its differences."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary, Scaling
from lmlib.models.stack import segments
from lmlib.models.weights import fold_in_name, jit_init, residual_scale


def transformer(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float = 10_000.0,
    rope_scaling: Scaling | None = None,
    norm_epsilon: float = 1e-5,
    tied: bool = False,
    window: int | Sequence[int | None] | None = None,
    rotary_fraction: float = 1.0,
    *,
    attention: Callable[..., Any] | Sequence[Callable[..., Any]] = Attention,
    feed_forward: Callable[..., Any] | Sequence[Callable[..., Any]] = GatedMLP,
    rotary_layers: bool | Rotary | Sequence[bool | Rotary] = True,
    norm: Callable[..., Any] = RMSNorm,
    norms: Sequence[str] = ("attention_norm", "mlp_norm"),
    block: Callable[..., Part] = Block,
    layer: Callable[..., Part] | None = None,
    writes: float | None = None,
    positions: Callable[..., Any] | None = None,
    embedding_deviation: float | None = None,
    logits_scale: float = 1.0,
    key: PRNGKeyArray,
    **decoder: Any,
) -> Decoder:
    """Returns a decoder with new weights. The first arguments are as in `llama`.

    Args:
      attention, feed_forward: make a block's parts; or one for each layer, the same for equal ones.
      rotary_layers: True for `rope_theta`, a `Rotary`, or one such value for each layer.
      norm, norms: makes norms; the names of a block's norms.
      block, layer: make a block from its parts, and a layer from a block.
      writes: scale of initial matrices that write to the residual stream, or `residual_scale`.
      positions: makes learned positions.
      embedding_deviation: standard deviation of initial embeddings; `None`: 1, or 1/2 for a tied
        table. The last norm's initial scale then gives the logits of a tied table a standard
        deviation of embed^-1/2, so the first loss is ln(vocab) to within 0.1.
      logits_scale, decoder: further arguments of `Decoder`.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_sizes(vocab=vocab, embed=embed, layers=layers, heads=heads, kv_heads=kv_heads, mlp=mlp)
    if head_dim is None and embed % heads:
        raise ValueError(f"embed = {embed} must be a multiple of heads = {heads}, or give head_dim")
    head_dim = embed // heads if head_dim is None else head_dim

    def positions_of(rotary: bool | Rotary) -> Rotary | None:
        if not rotary or isinstance(rotary, Rotary):
            return rotary or None
        rotated = int(head_dim * rotary_fraction)
        if rotary_fraction != 1 and (rotated < 2 or rotated % 2):
            raise ValueError(
                f"rotary_fraction = {rotary_fraction} of head_dim = {head_dim} is {rotated} "
                "coordinates to rotate: it takes an even number, at least 2"
            )
        return Rotary(rotated, rope_theta, rope_scaling)

    rotaries = [positions_of(each) for each in _each("rotary_layers", rotary_layers, layers)]
    kinds = [*zip(
        _each("attention", attention, layers), _each("feed_forward", feed_forward, layers),
        rotaries, _each("window", window, layers), strict=True,
    )]  # fmt: skip
    writes = residual_scale(layers) if writes is None else writes
    deviation = (0.5 if tied else 1.0) if embedding_deviation is None else embedding_deviation
    last_scale = (1 / (deviation * embed) if tied else 1.0) / logits_scale

    def maker(attention: Any, feed_forward: Any, rotary: Any, window: Any) -> Callable[..., Part]:
        def make(key: PRNGKeyArray) -> Part:
            parts = {name: norm(embed=embed, epsilon=norm_epsilon, key=key) for name in norms}
            parts["attention"] = attention(
                embed, heads, kv_heads, head_dim, rotary=rotary, window=window,
                residual_scale=writes, key=fold_in_name(key, "attention"),
            )  # fmt: skip
            parts["mlp"] = feed_forward(
                embed, mlp, residual_scale=writes, key=fold_in_name(key, "mlp")
            )
            made = block(**parts)
            return made if layer is None else layer(made, key=fold_in_name(key, "layer"))

        return make

    def model(key: PRNGKeyArray) -> Decoder:
        makers = {kind: maker(*kind) for kind in dict.fromkeys(kinds)}
        return Decoder(
            vocab, embed, segments([makers[kind] for kind in kinds]), norm(embed=embed,
            epsilon=norm_epsilon, initial=last_scale, key=key), tied, embedding_deviation=deviation,
            logits_scale=logits_scale, positions=positions and positions(key=fold_in_name(key,
            "positions")), key=key, **decoder,
        )  # fmt: skip

    return jit_init(model)(key)


def check_sizes(**sizes: int) -> None:
    """Raises ValueError if a size is not positive, or too large."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
        most = 10_000 if name == "layers" else 2**31 - 1  # layers are made one by one
        if size > most:
            raise ValueError(f"{name} must be at most {most:,}, got {size:,}")


def _each(name: str, value: Any, layers: int) -> list[Any]:
    """Returns a list with a value for each layer."""
    values = [*value] if isinstance(value, Sequence) else [value] * layers
    if len(values) != layers:
        raise ValueError(f"{name} has {len(values)} values for {layers} layers")
    return values
