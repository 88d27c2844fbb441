"""Reward models against transformers' sequence classifiers, read and written."""

import json

import jax
import numpy as np
import pytest
from small_folder import tensors_of

from lmlib.compute import Compute
from lmlib.data.batch import packed_batch
from lmlib.generate.generator import Generator
from lmlib.hf.load import load
from lmlib.hf.save import save
from lmlib.losses.features import features
from lmlib.models.families.gpt2 import gpt2
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.reward import RewardModel, reward_model

torch = pytest.importorskip("torch", reason="needs lmlib[parity]")
transformers = pytest.importorskip("transformers", reason="needs lmlib[parity]")

FLOAT32 = Compute(dtype="float32")
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "num_labels": 1,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=8),
}


def transformers_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    return model.eval()


def rewards(model, texts):
    """Returns the reward of each text. Each text has its own row."""
    T = 1 + max(map(len, texts))
    tokens_BT = np.array([text + [0] * (T - len(text)) for text in texts], np.int32)
    lengths_B = np.array([len(text) for text in texts])
    batch = packed_batch(tokens_BT, np.zeros(tokens_BT.shape, bool), lengths_B)

    @jax.jit
    def scores(model):
        return model.scores(features(model, batch, FLOAT32).h_BSE, FLOAT32)

    return np.asarray(scores(model))[np.arange(len(texts)), lengths_B - 1]


def theirs(model, texts):
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        return model(ids, attention_mask=(ids != 0).long()).logits[:, 0].numpy()


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2"))],
)
def test_rewards_are_those_of_transformers_both_ways(tmp_path, family):
    random = np.random.default_rng(0)
    texts = [random.integers(1, 64, length).tolist() for length in (40, 7, 23)]
    original = transformers_model(CONFIGS[family])
    original.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert isinstance(model, RewardModel)
    expected = theirs(original, texts)
    np.testing.assert_allclose(rewards(model, texts), expected, atol=1e-5)
    save(model, tmp_path / "ours", settings={"pad_token_id": 0})
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype="float32"
    )
    assert type(again) is type(original) and again.config.num_labels == 1
    assert again.config.pad_token_id == 0
    np.testing.assert_allclose(theirs(again, texts), expected, atol=1e-6)
    one, other = (tensors_of(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_other_classifiers_are_refused(tmp_path):
    transformers_model(CONFIGS["llama"]).save_pretrained(tmp_path / "two")
    file = tmp_path / "two/config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"model_type": "gpt2"}))
    with pytest.raises(FolderError, match="reward models of gpt2 cannot be read or written"):
        load(tmp_path / "two")
    made = reward_model(
        gpt2, vocab=64, embed=16, layers=1, heads=2, positions=16, key=jax.random.key(0)
    )
    with pytest.raises(ValueError, match="reward models of gpt2 cannot be read or written"):
        save(made, tmp_path / "gpt2", model_type="gpt2")
    with pytest.raises(ValueError, match="a reward model gives texts a number: it cannot gen"):
        Generator(made, rows=1, length=8)
