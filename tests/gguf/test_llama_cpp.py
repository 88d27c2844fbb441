"""GGUF files in llama.cpp itself: pip install llama-cpp-python, which compiles it.

Its logits and greedy tokens are compared with lmlib's, and its tokenizers with `tokenizers`.
"""

import gguf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_tokenizers import NAMES, SAMPLES, tokenizer_json
from small_tokenizer import CHAT
from tokenizers import Tokenizer

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp")

from lmlib import Compute, single_document_context  # noqa: E402
from lmlib.gguf import save  # noqa: E402

pytestmark = pytest.mark.slow
FLOAT32 = Compute(dtype="float32")
NEW, LENGTH = 100, 24
# GELU is a table of float16 values in llama.cpp. DeltaNets sum in another order there.
ROUNDED = {
    "gpt2", "starcoder2", "gpt_neox", "gpt_neox_in_turn", "gemma2", "gemma3", "qwen3_next",
    "kimi_linear",
}  # fmt: skip


class LlamaCpp:
    """A GGUF file in llama.cpp, in float32 on one thread."""

    def __init__(self, file, context):
        settings = llama_cpp.llama_model_default_params()
        settings.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        assert self.model, file
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch = context, context
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab, self.size = vocab, llama_cpp.llama_vocab_n_tokens(vocab)
        self.past = 0

    def logits(self, ids):
        """Logits after each of `ids`, which follow all earlier ones."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = int(id), self.past + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert llama_cpp.llama_decode(self.context, batch) == 0
        self.past += len(ids)
        found = llama_cpp.llama_get_logits(self.context)
        values = np.ctypeslib.as_array(found, (len(ids), self.size)).copy()
        llama_cpp.llama_batch_free(batch)
        return values

    def tokens(self, text):
        """The ids of a text, with the token that begins one, if the file says so."""
        encoded, room = text.encode(), 8 * len(text.encode()) + 8
        ids = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self.vocab, encoded, len(encoded), ids, room, True, False)
        assert count >= 0
        return list(ids[:count])

    def template(self):
        found = llama_cpp.llama_model_chat_template(self.model, None)
        return found.decode() if found else None

    def close(self):
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


@pytest.fixture
def opened():
    held = []

    def open_file(file, context=256):
        held.append(LlamaCpp(file, context))
        return held[-1]

    yield open_file
    for each in held:
        each.close()


def greedy(model, prompt):
    """lmlib's greedy continuation and the logits of the whole text, [positions, vocab]."""
    length = len(prompt) + NEW

    @jax.jit
    def forward(ids_BS):
        return model(ids_BS, single_document_context(ids_BS, FLOAT32))[0]

    ids = np.zeros((1, length), np.int32)
    ids[0, : len(prompt)] = prompt
    for position in range(len(prompt), length):
        ids[0, position] = np.argmax(forward(jnp.asarray(ids))[position - 1])
    return ids[0], np.asarray(forward(jnp.asarray(ids)))


@pytest.mark.parametrize("name", list(gguf_models.CONFIGS))
def test_llama_cpp_gives_the_same_logits_and_greedy_tokens(name, tmp_path, opened):
    model = gguf_models.random_model(gguf_models.CONFIGS[name])
    save(model, tmp_path / "model.gguf", longest=256)
    prompt = np.random.default_rng(2).integers(0, 160, LENGTH)
    whole, expected = greedy(jax.tree.map(jnp.asarray, model), prompt)
    other = opened(tmp_path / "model.gguf")
    found = [*other.logits(prompt)]
    said = list(prompt)
    for _ in range(NEW):
        said.append(int(np.argmax(found[-1])))
        found += [*other.logits(said[-1:])]
    np.testing.assert_array_equal(said, whole)
    largest = np.abs(expected).max()
    bound = 1e-3 if name in ROUNDED else 1e-5
    assert np.abs(np.array(found) - expected).max() < bound * largest


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_gives_the_same_tokens_of_texts(name, tmp_path, opened):
    model = gguf_models.random_model(
        {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 420}
    )
    text, file = tokenizer_json(name), tmp_path / "model.gguf"
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    save(model, file, tokenizer=text, settings=ends, chat_templates={"default": CHAT})
    other, own = opened(file), Tokenizer.from_str(text)
    for sample in SAMPLES:
        if sample or name != "llama":  # SentencePiece has a space before an empty text or not
            assert other.tokens(sample) == own.encode(sample).ids, sample
    assert other.template() == CHAT
