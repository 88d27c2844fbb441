"""Llama: a pre-norm decoder with rotary grouped-query attention and SwiGLU (Touvron et al. 2023,
arXiv:2302.13971).

Shapes: B batch, S sequence, E embed, V vocab, L layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32, Key, PRNGKeyArray

from lmlib.models.attend import IMPLEMENTATIONS, problem
from lmlib.models.attention import Attention
from lmlib.models.dropout import dropout
from lmlib.models.embedding import embedded
from lmlib.models.initial import fold, initial_weight
from lmlib.models.layers import RMSNorm, SwiGLU
from lmlib.models.quantized import checked_precisions
from lmlib.models.rematerialization import check_names, policy
from lmlib.parallel.layout import gather, move, share


class Block(eqx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with a key, dropout before each sum."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: SwiGLU

    def __call__(
        self,
        x_BSE: Float[Array, "b s embed"],
        positions_BS: Int32[Array, "b s"],
        segment_ids_BS: Int32[Array, "b s"],
        residual: str,
        attention: str,
        dropout_rate: float,
        key: PRNGKeyArray | None,
    ) -> Float[Array, "b s embed"]:
        # `share` gathers the sequence over `tensor` when the residual stream is sequence-parallel.
        h_BSE = share(self.attention_norm(x_BSE), "batch seq embed")
        h_BSE = checkpoint_name(h_BSE, "attention_input")
        h_BSE = self.attention(h_BSE, positions_BS, segment_ids_BS, residual, attention)
        x_BSE = x_BSE + dropout(h_BSE, dropout_rate, key, "attention", residual)
        x_BSE = checkpoint_name(x_BSE, "attention_residual")
        h_BSE = share(self.mlp_norm(x_BSE), "batch seq embed")
        h_BSE = checkpoint_name(h_BSE, "mlp_input")
        h_BSE = self.mlp(h_BSE, residual)
        return x_BSE + dropout(h_BSE, dropout_rate, key, "mlp", residual)


class Llama(eqx.Module):
    """Tokens to logits. Weights are float32 and layers are stacked along a leading axis.

    Args:
      vocab, embed, layers, heads, kv_heads, head_dim, mlp: sizes. `head_dim` defaults to
        embed / heads, `kv_heads` to `heads`.
      rope_theta: base of the rotary wavelengths.
      norm_epsilon: added to the mean square in every norm.
      tied: one table embeds and unembeds.
      dropout: rate at which the outputs of attention and mlp are dropped before they are added to
        the residual stream, and the embedded tokens (Vaswani et al. 2017, arXiv:1706.03762, §5.4;
        GPT-2 drops at the same places). Only in calls with a key: those of training.
      attention: which implementation, of those in `lmlib.models.attend`.
      window: positions that each one attends to, itself and those before it; `None` for all.
      loss_chunk: tokens whose logits a device holds at a time; `None`: see `LossSettings`.
      quantized: products in 8 bits, by kind of layer ("projections", "mlp"): "int8" or "float8", as
        in `lmlib.models.quantized`.
      logits_dtype: of the logits that the loss is computed from; softmax is in float32 at least.
      compute_dtype: of activations and gathered weights, for example "bfloat16" or "float32".
      saved: activations kept for the backward pass, by their names in
        `lmlib.models.rematerialization`; it computes the others again.
      offloaded: more of them, kept in the host's memory.
      unroll: layers unrolled in each turn of the scan.
      sequence_parallel: split the residual stream between blocks along its sequence over `tensor`
        (Korthikanti et al. 2022, arXiv:2205.05198).
      key: seed of the weights.

    Raises:
      ValueError: if a size is not positive, `kv_heads` does not divide `heads`, `head_dim` is odd,
        `dropout` is not in [0, 1), a dtype is no floating type, or a name is unknown.
    """

    embedding: Float[Array, "vocab embed"]
    blocks: Block
    norm: RMSNorm
    unembedding: Float[Array, "embed vocab"] | None
    dropout: float = eqx.field(static=True)
    attention: str = eqx.field(static=True)
    loss_chunk: int | None = eqx.field(static=True)
    logits_dtype: str = eqx.field(static=True)
    compute_dtype: str = eqx.field(static=True)
    saved: tuple[str, ...] = eqx.field(static=True)
    offloaded: tuple[str, ...] = eqx.field(static=True)
    unroll: int = eqx.field(static=True)
    sequence_parallel: bool = eqx.field(static=True)

    def __init__(
        self,
        vocab: int,
        embed: int,
        layers: int,
        heads: int,
        mlp: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10_000.0,
        norm_epsilon: float = 1e-5,
        tied: bool = False,
        dropout: float = 0.0,
        attention: str = "auto",
        window: int | None = None,
        loss_chunk: int | None = None,
        logits_dtype: str = "float32",
        quantized: Mapping[str, str] | None = None,
        compute_dtype: str = "bfloat16",
        saved: tuple[str, ...] = (),
        offloaded: tuple[str, ...] = (),
        unroll: int = 1,
        sequence_parallel: bool = False,
        *,
        key: PRNGKeyArray,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        _check_counts(layers=layers, heads=heads, kv_heads=kv_heads, unroll=unroll)
        _check_counts(window=window, loss_chunk=loss_chunk)
        head_dim = embed // heads if head_dim is None else head_dim
        _check_attention(heads, kv_heads, head_dim)
        check_names(saved=saved, offloaded=offloaded)
        precisions = checked_precisions(quantized or {}, ("projections", "mlp"))

        def block(key: PRNGKeyArray) -> Block:
            return Block(
                RMSNorm(embed, norm_epsilon, key=fold(key, "attention_norm")),
                Attention(
                    embed,
                    heads,
                    kv_heads,
                    head_dim,
                    rope_theta,
                    window,
                    precisions["projections"],
                    key=fold(key, "attention"),
                ),
                RMSNorm(embed, norm_epsilon, key=fold(key, "mlp_norm")),
                SwiGLU(embed, mlp, precisions["mlp"], key=fold(key, "mlp")),
            )

        sizes = {"vocab": vocab, "embed": embed}
        self.embedding = initial_weight(Llama, "embedding", key, **sizes)
        self.blocks = jax.vmap(block)(_layer_keys(key, layers))
        self.norm = RMSNorm(embed, norm_epsilon, key=fold(key, "norm"))
        self.unembedding = None if tied else initial_weight(Llama, "unembedding", key, **sizes)
        self.dropout = _checked_rate(dropout)
        self.attention = _checked_attention(attention)
        self.loss_chunk = loss_chunk
        self.logits_dtype = _checked_dtype("logits_dtype", logits_dtype)
        self.compute_dtype = _checked_dtype("compute_dtype", compute_dtype)
        self.saved, self.offloaded = tuple(saved), tuple(offloaded)
        self.unroll = unroll
        self.sequence_parallel = sequence_parallel

    def __call__(
        self,
        tokens_BS: Int32[Array, "b s"],
        positions_BS: Int32[Array, "b s"] | None = None,
        segment_ids_BS: Int32[Array, "b s"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "b s vocab"]:
        """Logits of the next token. Without segment ids a row is one document; without a key
        nothing is dropped."""
        return self.head(self.trunk(tokens_BS, positions_BS, segment_ids_BS, key))

    def trunk(
        self,
        tokens_BS: Int32[Array, "b s"],
        positions_BS: Int32[Array, "b s"] | None = None,
        segment_ids_BS: Int32[Array, "b s"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "b s embed"]:
        """The residual stream after the last block, in the compute dtype."""
        x_BSE, _ = self.observed_trunk(
            tokens_BS, positions_BS, segment_ids_BS, lambda x_BSE: None, key
        )
        return x_BSE

    def observed_trunk(
        self,
        tokens_BS: Int32[Array, "b s"],
        positions_BS: Int32[Array, "b s"] | None,
        segment_ids_BS: Int32[Array, "b s"] | None,
        observe: Callable[[Array], Any],
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b s embed"], Any]:
        """What `trunk` gives, and what `observe` makes of each layer's output, stacked.

        Keys descend from `key` as those of the weights do from theirs: by field and layer.
        """
        if positions_BS is None:
            positions_BS = jnp.zeros_like(tokens_BS) + jnp.arange(
                tokens_BS.shape[1], dtype=jnp.int32
            )
        if segment_ids_BS is None:
            segment_ids_BS = jnp.zeros_like(tokens_BS)
        residual = "batch seq_parallel embed" if self.sequence_parallel else "batch seq embed"
        if self.dropout == 0:
            key = None
        keys_L = None if key is None else _layer_keys(key, self.layers)

        def layer(x_BSE: Array, part: tuple[Block, PRNGKeyArray | None]) -> tuple[Array, Any]:
            block, layer_key = part
            x_BSE = checkpoint_name(x_BSE, "layer_input")
            block = gather(block, self.compute_dtype)
            x_BSE = block(
                x_BSE,
                positions_BS,
                segment_ids_BS,
                residual,
                self.attention,
                self.dropout,
                layer_key,
            )
            return x_BSE, observe(x_BSE)

        # Inside a scan nothing can merge the recomputation with the forward pass, so CSE is safe.
        scanned = self.unroll < self.layers
        layer = jax.checkpoint(layer, policy=self._policy, prevent_cse=not scanned)
        x_BSE = self.embed(tokens_BS, residual)
        if key is not None:
            # Drawn again in the backward pass, as in the layers, rather than kept.
            x_BSE = jax.checkpoint(dropout, static_argnums=(1, 3, 4))(
                x_BSE, self.dropout, key, "embedding", residual
            )
        with jax.named_scope("layers"):
            return jax.lax.scan(layer, x_BSE, (self.blocks, keys_L), unroll=self.unroll)

    @jax.named_scope("embed")
    def embed(
        self, tokens_BS: Int32[Array, "b s"], residual: str = "batch seq embed"
    ) -> Float[Array, "b s embed"]:
        """Rows of the table, laid out as `residual` names."""
        return embedded(self.embedding, tokens_BS, self.compute_dtype, residual)

    def features(self, x_BSE: Float[Array, "b s embed"]) -> Float[Array, "b s embed"]:
        """The residual stream after the last norm, which `unembedding_EV` makes logits of; laid
        out as it came."""

        def normed(x_BSE: Array) -> Array:
            x_BSE = checkpoint_name(x_BSE, "head_input")
            norm = gather(self.norm, self.compute_dtype)
            return norm(x_BSE)

        return jax.checkpoint(normed, policy=self._policy)(x_BSE)

    @property
    def unembedding_EV(self) -> Float[Array, "embed vocab"]:
        """As it is stored; of a tied model the embedding's transpose."""
        return self.embedding.T if self.unembedding is None else self.unembedding

    def head(self, x_BSE: Float[Array, "b s embed"]) -> Float[Array, "b s vocab"]:
        """Logits, float32 (float64 if computed so), the vocabulary split over `tensor`."""
        table_EV = move(self.unembedding_EV.astype(self.compute_dtype), "embed vocab")
        wide = jnp.promote_types(self.compute_dtype, jnp.float32)
        h_BSE = move(self.features(x_BSE), "batch seq embed")
        return jnp.einsum("bse,ev->bsv", h_BSE, table_EV, preferred_element_type=wide)

    def check(self, sequence_length: int) -> None:
        """Raises ValueError if sequences so long cannot be computed as the model is set to."""
        head_dim = self.blocks.attention.query.shape[-1]
        reason = problem(self.attention, sequence_length, head_dim, self.compute_dtype)
        if reason is not None:
            raise ValueError(f"attention={self.attention!r}: {reason}; use 'blockwise' or 'auto'")

    @property
    def _policy(self) -> Callable[..., Any]:
        return policy(self.saved, self.offloaded)

    def training_flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Analytic FLOPs of forward and backward pass for one token, rematerialisation not counted
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

        Six for each parameter that multiplies activations, and 12 · layers · heads · head_dim ·
        keys for the two attention products. `keys` is the sequence's length or the window's, or if
        `causal` how many a position sees on average, about half: what a kernel that skips masked
        blocks computes.
        """
        multiplied = (self.blocks.attention, self.blocks.mlp)
        parameters = sum(weight.size for weight in jax.tree.leaves(multiplied))
        parameters += self.embedding.size if self.unembedding is None else self.unembedding.size
        layers, _, heads, head_dim = self.blocks.attention.query.shape
        keys = float(min(self.blocks.attention.window or sequence_length, sequence_length))
        if causal:
            keys -= keys**2 / (2 * sequence_length)
        return 6.0 * parameters + 12 * layers * heads * head_dim * keys

    @property
    def layers(self) -> int:
        return self.blocks.mlp.down.shape[0]

    @property
    def vocab(self) -> int:
        return self.embedding.shape[0]


def _layer_keys(key: PRNGKeyArray, layers: int) -> Key[Array, "L"]:
    """A key for each layer, which depends on `key` and the layer's index only."""
    indices_L = jnp.arange(layers, dtype=jnp.int32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(fold(key, "blocks"), indices_L)


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def _check_attention(heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")


def _checked_rate(dropout: float) -> float:
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    return dropout


def _checked_attention(name: str) -> str:
    known = ("auto", *IMPLEMENTATIONS)
    if name not in known:
        raise ValueError(f"attention must be one of {', '.join(known)}, got {name!r}")
    return name


def _checked_dtype(setting: str, name: str) -> str:
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{setting} must be a floating type like 'bfloat16', got {name!r}")
    return dtype.name
