"""Folders in int8 and int4, against the format's own package and transformers."""

import json

import numpy as np
import pytest
from gguf_models import random_model, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlib.hf.compressed import compress, packed, quantized
from lmlib.hf.tensor_files import stored_tensors


def folder_of(tmp_path, bits, **config):
    model = random_model({"model_type": "llama", "num_hidden_layers": 2, **config})
    write_folder(model, tmp_path / "whole")
    (tmp_path / "whole/tokenizer.json").write_text("{}")
    (tmp_path / "small").mkdir()
    made = compress(tmp_path / "whole", tmp_path / "small", bits)
    return {name: each.read(0, each.size).reshape(each.shape).astype(np.float32)
            for name, each in stored_tensors(tmp_path / "whole").items()}, made  # fmt: skip


def unpacked(codes, bits):
    """Reads the codes one by one, as the format states."""
    words = codes.view(np.uint32).astype(np.uint64)
    found = [(words >> np.uint64(bits * i)) % 2**bits for i in range(32 // bits)]
    return np.stack(found, axis=-1).reshape(len(codes), -1).astype(np.int64) - 2 ** (bits - 1)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 4))
def test_codes_are_the_nearest_and_are_unpacked_again(data, bits, outputs, words):
    seed = data.draw(st.integers(0, 2**32 - 1))
    inputs = 32 * words
    values = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)
    values[0, : inputs // 2] = 0
    group = None if bits == 8 else 32
    codes, scales = quantized(values, bits, group)
    np.testing.assert_array_equal(unpacked(packed(codes, bits), bits), codes)
    wide = np.repeat(scales.astype(np.float64), group or inputs, axis=1)
    assert (np.abs(values - codes * wide) <= wide * 0.51 + np.abs(values) / 250).all()
    assert codes.max() <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_matrices_of_layers_are_quantized_and_nothing_else(bits, group, tmp_path):
    whole, made = folder_of(tmp_path, bits)
    assert made.startswith(f"int{bits} with a scale for each")
    found = stored_tensors(tmp_path / "small")
    config = json.loads((tmp_path / "small/config.json").read_text())
    own = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (own["num_bits"], own["group_size"]) == (bits, group)
    assert (tmp_path / "small/tokenizer.json").read_text() == "{}"
    for name, values in whole.items():
        if "proj" not in name:
            kept = found[name].read(0, found[name].size).astype(np.float32)
            np.testing.assert_allclose(kept, values.ravel(), rtol=2**-8)
            continue
        codes, scales, shape = (
            found[name + end].read(0, found[name + end].size).reshape(found[name + end].shape)
            for end in ("_packed", "_scale", "_shape")
        )
        assert tuple(shape) == values.shape
        scales = scales.astype(np.float32)
        back = unpacked(codes, bits) * np.repeat(scales, values.shape[1] // scales.shape[1], 1)
        assert np.abs(back - values).max() <= 0.51 * scales.max() + np.abs(values).max() / 250


def test_models_that_the_format_cannot_hold_are_refused(tmp_path):
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ValueError, match="a model of mixtral cannot be written in int8 or int4"):
        folder_of(tmp_path / "experts", 4, **experts)
    with pytest.raises(ValueError, match=r"down_proj.weight has 40 inputs, .* a multiple of 32"):
        folder_of(tmp_path / "width", 4, intermediate_size=40)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_transformers_loads_the_folder(bits, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    compressed_tensors = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    assert compressed_tensors
    whole, _ = folder_of(tmp_path, bits, head_dim=32)
    name = "model.layers.1.mlp.down_proj.weight"
    found = stored_tensors(tmp_path / "small")
    codes = found[name + "_packed"]
    words = torch.from_numpy(codes.read(0, codes.size).reshape(codes.shape))
    theirs = unpack_from_int32(words, bits, torch.Size(whole[name].shape)).numpy()
    np.testing.assert_array_equal(theirs, quantized(whole[name], bits, [None, 32][bits == 4])[0])
    (tmp_path / "small/tokenizer.json").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="float32")
    ids = torch.arange(20)[None] + 7
    small = model(ids).logits.detach().numpy()
    for tensor, values in whole.items():  # the same model with the weights that the codes mean
        if "proj" in tensor:
            group = [None, 32][bits == 4]
            own, scales = quantized(values, bits, group)
            wide = np.repeat(scales.astype(np.float32), group or values.shape[1], axis=1)
            whole[tensor] = own * wide
        else:
            whole[tensor] = torch.from_numpy(values).bfloat16().float().numpy()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="float32")
    plain.load_state_dict({name: torch.from_numpy(each) for name, each in whole.items()})
    expected = plain(ids).logits.detach().numpy()
    assert np.abs(small - expected).max() < 1e-4 * np.abs(expected).max()
