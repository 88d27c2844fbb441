"""Llama's logits in NumPy, with loops over rows, heads and positions, as the papers write it.

Shapes: B batch, S sequence, E embed, F mlp, D head_dim, V vocab, L layers.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np


def reference_logits(
    model,
    tokens_BS,
    positions_BS,
    segment_ids_BS,
    theta,
    epsilon,
    factors: Mapping = {},
    seen: defaultdict[str, list] | None = None,
):
    """Returns the logits in the precision of the weights.

    `factors` multiply the embedded tokens ("embedding", BSE) and each layer's outputs ("attention",
    "mlp", LBSE), as dropout does. `seen` gets each row's residual stream before each layer and
    after the last ("activations", SE), and attention weights ("attention", HST).
    """
    seen = defaultdict(list) if seen is None else seen
    tokens_BS, positions_BS = np.asarray(tokens_BS), np.asarray(positions_BS)
    segment_ids_BS = np.asarray(segment_ids_BS)
    ((block,),) = model.stack.patterns  # one segment, whose pattern is one block
    L, _, H, D = block.attention.query.shape
    K = block.attention.key.shape[2]

    def norm(x_SE, scale_E):
        return x_SE / np.sqrt((x_SE**2).mean(-1, keepdims=True) + epsilon) * scale_E

    def turned(x_D, position):
        out_D = np.empty_like(x_D)
        for i in range(D // 2):
            angle = position * theta ** (-2 * i / D)
            a, b = x_D[i], x_D[i + D // 2]
            out_D[i] = a * np.cos(angle) - b * np.sin(angle)
            out_D[i + D // 2] = a * np.sin(angle) + b * np.cos(angle)
        return out_D

    def attention(x_SE, layer, positions_S, segments_S):
        weights, out_SE = block.attention, np.zeros_like(x_SE)
        mix_HST = np.zeros((H, len(x_SE), len(x_SE)))
        for head in range(H):
            group = head // (H // K)
            q_SD = x_SE @ weights.query[layer, :, head]
            k_SD = x_SE @ weights.key[layer, :, group]
            v_SD = x_SE @ weights.value[layer, :, group]
            for s in range(len(x_SE)):
                within = [t for t in range(s + 1) if segments_S[t] == segments_S[s]]
                q_D = turned(q_SD[s], positions_S[s])
                scores = np.array([q_D @ turned(k_SD[t], positions_S[t]) for t in within]) / D**0.5
                mix = np.exp(scores - scores.max())
                mix /= mix.sum()
                mixed_D = sum(p * v_SD[t] for p, t in zip(mix, within, strict=True))
                mix_HST[head, s, within] = mix
                out_SE[s] += mixed_D @ weights.output[layer, head]
        seen["attention"].append(mix_HST)
        return out_SE

    def mlp(x_SE, layer):
        gate_SF = x_SE @ block.mlp.gate[layer]
        hidden_SF = gate_SF / (1 + np.exp(-gate_SF)) * (x_SE @ block.mlp.up[layer])
        return hidden_SF @ block.mlp.down[layer]

    def factor(name, *index):
        return factors[name][index] if name in factors else 1

    logits = []
    for b, (tokens_S, positions_S, segments_S) in enumerate(
        zip(tokens_BS, positions_BS, segment_ids_BS, strict=True)
    ):
        x_SE = model.embedding[tokens_S] * factor("embedding", b)
        for layer in range(L):
            seen["activations"].append(x_SE)
            h_SE = norm(x_SE, block.attention_norm.scale[layer])
            h_SE = attention(h_SE, layer, positions_S, segments_S)
            x_SE = x_SE + h_SE * factor("attention", layer, b)
            h_SE = norm(x_SE, block.mlp_norm.scale[layer])
            x_SE = x_SE + mlp(h_SE, layer) * factor("mlp", layer, b)
        seen["activations"].append(x_SE)
        table_EV = model.embedding.T if model.unembedding is None else model.unembedding
        logits.append(norm(x_SE, model.norm.scale) @ table_EV)
    return np.stack(logits)
