"""transformers with its static cache, eager or compiled; its loop over tokens is written out here,
which spares it what `generate` does around each."""

import torch
import transformers

from generate_peers.contender import NEW, PROMPT, Work


class Transformers:
    """See `generate_peers.contender.Contender`."""

    def __init__(self, work: Work, precision: str, compiled: bool):
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            work.folder, dtype=precision, attn_implementation="sdpa"
        ).eval()
        self._step = torch.compile(self._model, dynamic=False) if compiled else self._model
        self._prompts = torch.tensor(work.prompts)

    @torch.no_grad()
    def prefill(self) -> None:
        self._cache = transformers.StaticCache(
            config=self._model.config, max_cache_len=PROMPT + NEW + 1
        )
        self._made = [self._next(self._step, self._prompts, torch.arange(PROMPT))]

    @torch.no_grad()
    def decode(self) -> list[list[int]]:
        for n in range(NEW):
            at = torch.tensor([PROMPT + n])
            self._made.append(self._next(self._step, self._made[-1], at))
        return torch.cat(self._made, dim=1).tolist()

    def _next(self, step, tokens_BS, at_S):
        output = step(
            input_ids=tokens_BS,
            past_key_values=self._cache,
            position_ids=at_S[None].expand(len(tokens_BS), -1),
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].argmax(dim=-1, keepdim=True)
