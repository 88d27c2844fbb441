"""GGUF files: values, settings and rounding, against the package `gguf`, and refused files."""

import functools
import json
import tempfile
from pathlib import Path

import gguf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlib.hf.families import described, family_of
from lmlib.hf.load import FolderError
from lmlib.hf.tensor_files import stored_tensors
from lmlib.models.matrices.mxfp4 import VALUES, quantized

gguf = pytest.importorskip("gguf")

from lmlib.gguf import save, to_folder  # noqa: E402

PLUS_ONE = {"gemma2", "gemma3", "qwen3_next"}
QUICK = {"llama_3_1", "gemma2", "qwen3_moe", "gpt2", "gpt_neox"}
GOLDEN = Path(__file__).parents[1] / "hf/golden"
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def read_tensors(folder):
    found = stored_tensors(folder)
    return {name: each.read(0, each.size).reshape(each.shape) for name, each in found.items()}


def saved(tmp_path, config=None, **how):
    file = tmp_path / "model.gguf"
    model = gguf_models.random_model({"model_type": "llama"} if config is None else config)
    save(model, file, **how)
    return model, file


def values_in(file):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def every_family():
    for name in gguf_models.CONFIGS:
        yield pytest.param(name, marks=[] if name in QUICK else pytest.mark.landing)


@pytest.mark.parametrize("name", every_family())
def test_a_file_read_back_is_the_same_model(name, tmp_path):
    model, file = saved(tmp_path, gguf_models.CONFIGS[name], longest=1024)
    to_folder(file, tmp_path / "back")
    expected, found = gguf_models.tensors_of(model), read_tensors(tmp_path / "back")
    assert expected.keys() == found.keys()
    for tensor, values in expected.items():
        if tensor.endswith("linear_attn.norm.weight"):
            np.testing.assert_array_equal(found[tensor], values)
        elif name in PLUS_ONE and "norm" in tensor:  # 1 is added in the file
            np.testing.assert_array_equal(found[tensor] + 1, values + 1)
        elif tensor.endswith("A_log"):  # whose exponential is in the file
            np.testing.assert_allclose(found[tensor], values, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(found[tensor], values)
    before, after = family_of(model)[1], family_of(described(tmp_path / "back").shapes)[1]
    if name == "mistral":  # whose window llama.cpp does not have
        config = json.loads((tmp_path / "back/config.json").read_text())
        assert config["max_position_embeddings"] == before["sliding_window"]
        assert after["model_type"] == "llama"
    else:
        assert after == before


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", every_family())
def test_a_quantized_file_of_every_family_is_off_by_its_rounding_alone(name, kind, tmp_path):
    """Also: matrices whose values the kind holds, with its largest one in any 32, stay the same."""
    random, model = np.random.default_rng(3), gguf_models.random_model(gguf_models.CONFIGS[name])
    largest, step = (127, 2.0**-9) if kind == "q8_0" else (-8, 2.0**-5)

    def held(x):
        values = np.where(random.random(x.shape) < 0.5, largest, random.integers(-7, 8, x.shape))
        return (step * values).astype(np.float32) if x.ndim > 1 else x

    for which, made in (("any", model), ("held", jax.tree.map(held, model))):
        file = tmp_path / f"{which}.gguf"
        save(made, file, kind=kind, longest=1024)
        to_folder(file, tmp_path / which)
        found, exact = read_tensors(tmp_path / which), 0
        for tensor, values in gguf_models.tensors_of(made).items():
            wide = kind == "q4_0" and values.shape[0] == made.vocab  # a table, in Q8_0
            part = 1 / 8 if kind == "q4_0" and not wide else 0.54 / 127  # of the largest value
            limit = part * np.abs(values).max()
            if which == "held" and values.ndim > 1 and not wide and "A_log" not in tensor:
                limit = 0
            assert np.abs(found[tensor].astype(np.float32) - values).max() <= limit, tensor
            exact += limit == 0
        assert exact >= (which == "held") * 9


@pytest.mark.parametrize(
    ("kind", "package"),
    [("float16", "F16"), ("bfloat16", "BF16"), ("q8_0", "Q8_0"), ("q4_0", "Q4_0")],
)
def test_weights_are_rounded_as_by_the_package_gguf(kind, package, tmp_path):
    model, file = saved(tmp_path, kind=kind)
    to_folder(file, tmp_path / "back")
    held, back, plain = (
        values_in(file),
        read_tensors(tmp_path / "back"),
        gguf_models.tensors_of(model),
    )
    own = getattr(gguf.GGMLQuantizationType, package)
    values = plain["model.layers.1.mlp.up_proj.weight"]
    expected = gguf.quants.quantize(values, own)
    up = held["blk.1.ffn_up.weight"]
    assert up.tensor_type == own
    assert up.data.tobytes() == expected.tobytes()
    read = back["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(read, gguf.quants.dequantize(expected, own))
    largest = {"q8_0": 0.005, "q4_0": 0.09}.get(kind, 0.005)
    assert np.abs(read - values).max() < largest * np.abs(values).max()
    norm = held["blk.1.ffn_norm.weight"]
    assert norm.tensor_type == gguf.GGMLQuantizationType.F32
    table = "Q8_0" if kind == "q4_0" else package
    assert held["token_embd.weight"].tensor_type.name == table


@settings(max_examples=8, deadline=None)
@given(
    heads=st.integers(1, 3), groups=st.integers(1, 2), pairs=st.integers(1, 5),
    mlp=st.integers(1, 70), layers=st.integers(1, 2), tied=st.booleans(),
    kind=st.sampled_from(["float32", "q8_0"]),
)  # fmt: skip
def test_any_sizes_are_read_back(tmp_path_factory, heads, groups, pairs, mlp, layers, tied, kind):
    tmp_path = tmp_path_factory.mktemp("sizes")
    config = {
        "model_type": "llama", "num_attention_heads": heads * groups, "num_hidden_layers": layers,
        "num_key_value_heads": heads, "head_dim": 2 * pairs, "intermediate_size": mlp,
        "tie_word_embeddings": tied, "hidden_size": 33,
    }  # fmt: skip
    model, file = saved(tmp_path, config, kind=kind)
    to_folder(file, tmp_path / "back")
    expected, found = gguf_models.tensors_of(model), read_tensors(tmp_path / "back")
    for name, values in expected.items():
        if kind == "float32":
            np.testing.assert_array_equal(found[name], values)
        else:
            np.testing.assert_allclose(found[name], values, atol=0.02)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "IQ4_XS"])
def test_other_quantizations_are_read_as_by_the_package_gguf(kind, tmp_path):
    _, file = saved(tmp_path, {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1})
    own = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[own]
    random = np.random.default_rng(1)
    shape = (96, 256)
    raw = random.integers(0, 256, (shape[0], shape[1] // block * size)).astype(np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in halves.get(kind, (0,)):  # of each block's scales, which random bits make infinite
        for start in range(at, raw.shape[1], size):
            raw[:, start : start + 2] = np.array([0.01], np.float16).view(np.uint8)
    rewrite(file, {"blk.0.ffn_up.weight": (raw, own)})
    to_folder(file, tmp_path / "back")
    found = read_tensors(tmp_path / "back")["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, own))
    assert np.isfinite(found).all() and found.std() > 0


def test_mxfp4_of_gpt_oss_is_read_as_by_the_package_gguf_and_keeps_its_values(tmp_path):
    model, file = saved(tmp_path, gguf_models.CONFIGS["gpt_oss"])
    own, packed = gguf.GGMLQuantizationType.MXFP4, {}
    for name, tensor in values_in(file).items():
        if name.endswith("_exps.weight"):
            packed[name] = gguf.quants.quantize(np.array(tensor.data), own), own
    assert len(packed) == 3 * 3
    rewrite(file, packed)
    to_folder(file, tmp_path / "back")
    stored = stored_tensors(tmp_path / "back")
    found = read_tensors(tmp_path / "back")
    gate, up, down = (
        gguf.quants.dequantize(packed[f"blk.1.ffn_{name}_exps.weight"][0], own).swapaxes(1, 2)
        for name in ("gate", "up", "down")
    )
    both, outputs = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    np.testing.assert_array_equal(found[both][..., ::2], gate)
    np.testing.assert_array_equal(found[both][..., 1::2], up)
    np.testing.assert_array_equal(found[outputs], down)
    assert stored[both].dtype == stored[outputs].dtype == "bfloat16"
    assert np.abs(down - gguf_models.tensors_of(model)[outputs]).max() < 0.4
    # In lmlib's MXFP4 they have the same values again.
    codes, exponents = quantized(jnp.asarray(down), 1)
    values = np.asarray(VALUES, np.float32)[np.stack([codes & 15, codes >> 4], 2)]
    scales = np.repeat(np.exp2(np.asarray(exponents, np.float32) - 127), 32, 1)
    np.testing.assert_array_equal(values.reshape(down.shape) * scales, down)


def rewrite(file, tensors=None, fields=None, without=()):
    """Writes the file again with other tensors and settings, as another program might."""
    reader = gguf.GGUFReader(file)
    name = reader.fields["general.architecture"].contents()
    other = file.with_suffix(".other")
    writer = gguf.GGUFWriter(other, (fields or {}).get("general.architecture", (name,))[0])
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in without:
            kinds = field.types
            writer.add_key_value(key, field.contents(), kinds[0], *kinds[1:])
    for key, (value, kind) in (fields or {}).items():
        if key != "general.architecture":
            writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        data, kind = (tensors or {}).get(tensor.name, (tensor.data, tensor.tensor_type))
        if tensor.name not in without:
            writer.add_tensor(tensor.name, np.array(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    other.replace(file)


UINT, STRING = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.STRING


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": {"llama.expert_count": (3, UINT), "llama.expert_used_count": (2, UINT)}},
         "it has no tensor blk.0.ffn_gate_inp.weight"),
        ({"fields": {"llama.attention.clamp_kqv": (8.0, gguf.GGUFValueType.FLOAT32)}},
         "its settings attention.clamp_kqv are not supported for llama"),
        ({"fields": {"general.architecture": ("falcon", STRING)}},
         "its architecture 'falcon' is not supported; there are deepseek2, gemma2,"),
        ({"fields": {"llama.block_count": (4_000_000_000, UINT)}}, "more layers than tensors"),
        ({"fields": {"llama.attention.head_count": ("four", STRING)}},
         "llama.attention.head_count is 'four', not one number"),
        ({"fields": {"split.count": (2, gguf.GGUFValueType.UINT16)}}, "one of several parts"),
        ({"fields": {"llama.rope.scaling.type": ("longrope", STRING)}},
         "rope.scaling.type 'longrope' is not supported"),
        ({"without": ("llama.block_count",)}, "it lacks 'num_hidden_layers'"),
        ({"without": ("blk.2.attn_v.weight",)}, "it has no tensor blk.2.attn_v.weight"),
        ({"tensors": {"blk.1.ffn_up.weight": (np.zeros((95, 64), np.float32), None)}},
         r"blk.1.ffn_up.weight has the shape \(95, 64\), not \(96, 64\)"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(changes, message, tmp_path):
    _, file = saved(tmp_path)
    rewrite(file, **changes)
    with pytest.raises(FolderError, match=f"model.gguf.*{message}"):
        to_folder(file, tmp_path / "back")
    assert not (tmp_path / "back/config.json").exists()


@functools.cache
def _small_file():
    with tempfile.TemporaryDirectory() as folder:
        _, file = saved(Path(folder), {"model_type": "llama", **ONE_LAYER})
        return file.read_bytes()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_a_sentence_or_has_other_values(tmp_path_factory, data):
    tmp_path = tmp_path_factory.mktemp("damaged")
    whole = bytearray(_small_file())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 200))]
        cut = True
    else:
        cut = False
        whole[data.draw(st.integers(0, 1_500))] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "bad.gguf").write_bytes(whole)
    try:
        to_folder(tmp_path / "bad.gguf", tmp_path / "back")
    except FolderError as error:
        assert "bad.gguf" in str(error)
    else:
        assert not cut


def test_models_that_llama_cpp_does_not_have_are_refused(tmp_path):
    for name in ("olmo_hybrid", "bamba"):
        shapes = described(GOLDEN / name).shapes
        with pytest.raises(ValueError, match=f"GGUF files of {name} are not supported; there are"):
            save(shapes, tmp_path / "model.gguf")
        assert name.replace("_", "") not in gguf.MODEL_ARCH_NAMES.values()
    scaled = gguf_models.CONFIGS["gemma2"] | {"query_pre_attn_scalar": 50}
    with pytest.raises(ValueError, match="gemma2 only with query_pre_attn_scalar = 32, not 50"):
        saved(tmp_path, scaled)
    uncapped = gguf_models.CONFIGS["gemma2"] | {"final_logit_softcapping": None}
    with pytest.raises(ValueError, match="gemma2 only with final_logit_softcapping, not None"):
        saved(tmp_path, uncapped)
    rope = gguf_models.CONFIGS["qwen2_yarn"]["rope_scaling"]
    for key, value in {"beta_fast": 16.0, "truncate": False}.items():
        other = {"model_type": "qwen2", "rope_scaling": rope | {key: value}}
        with pytest.raises(ValueError, match=f"yarn only with {key} = .*, not {value:g}"):
            saved(tmp_path, other)
    swish = gguf_models.CONFIGS["gpt_neox"] | {"hidden_act": "silu"}
    with pytest.raises(ValueError, match="gpt_neox only with GELUs, not hidden_act = silu"):
        saved(tmp_path, swish)
    llama3 = gguf_models.CONFIGS["llama_3_1"] | {"model_type": "qwen3"}
    with pytest.raises(ValueError, match="qwen3 only without rope_type = llama3"):
        saved(tmp_path, llama3)
    assert not any(tmp_path.iterdir())


def test_values_beyond_float16_are_refused_and_leave_no_file(tmp_path):
    model = gguf_models.random_model({"model_type": "llama"})
    large = jax.tree.map(lambda x: x * 1e6, model)
    with pytest.raises(ValueError, match=r"token_embd.weight holds .*infinite in float16"):
        save(large, tmp_path / "model.gguf", kind="float16")
    assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"kind must be one of float32, .* got 'q6_k'"):
        save(model, tmp_path / "model.gguf", kind="q6_k")


def test_existing_files_and_folders_are_kept(tmp_path):
    model, file = saved(tmp_path)
    with pytest.raises(FileExistsError, match="exists: give a new file"):
        save(model, file)
    (tmp_path / "back").mkdir()
    (tmp_path / "back/mine").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        to_folder(file, tmp_path / "back")
