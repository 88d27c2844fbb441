"""Untrusted folders and Hub names: odd but legal ones work, others are refused in a sentence.
Tests have no network; they fill the cache of `huggingface_hub` by hand."""

import functools
import json
import os
import re
import shutil
import struct
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_families import FAMILIES as FOLDERS
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals
from sentinels import sentinels
from small_folder import (
    HEAD,
    assert_same_weights,
    change,
    copy_small_folder,
    golden_model,
    rewritten,
    with_head,
)
from small_tokenizer import write_tokenizer_folder

from data_tools.tokenizer import load_tokenizer
from lmlib import Compute, hf, make_mesh
from lmlib.adapters.lora import with_adapters
from lmlib.data.chats.chat import read_chat_template
from lmlib.hf.families import FAMILIES, described, described_by, family_of
from lmlib.hf.hub import local_folder_of
from lmlib.hf.names import Share
from lmlib.hf.tensor_files import DTYPES, begin_files, laid_out, read_header, stored_tensors, write
from lmlib.models.differences import differences
from lmlib.models.families.gpt_neox import ACTIVATIONS, gpt_neox
from lmlib.models.families.gpt_neox import family as gpt_neox_family
from lmlib.models.families.hugging_face.rope import fraction_of
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.families.llama import llama
from lmlib.models.families.phi import phi3
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.rope import Rotary

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def folder(tmp_path):
    return copy_small_folder(tmp_path)


def test_missing_and_null_keys_mean_the_same_as_in_transformers(folder):
    change(
        folder, rope_parameters=..., rope_theta=10_000.0, rope_scaling=None, dtype=...,
        head_dim=..., attention_bias=..., mlp_bias=..., tie_word_embeddings=...,
    )  # fmt: skip
    model = hf.load(folder)
    assert_same_weights(model, golden_model())
    assert jax.tree.structure(model) == jax.tree.structure(golden_model())


def test_the_number_of_key_value_heads_defaults_to_the_heads(folder):
    def repeated(held):
        """Each key and value head twice."""
        heads = ("k_proj.weight", "v_proj.weight")
        return {
            name: each.reshape(2, 1, 4, 16).repeat(2, axis=1).reshape(16, 16)
            if name.endswith(heads)
            else each
            for name, each in held.items()
        }

    rewritten(folder, repeated)
    change(folder, num_key_value_heads=4)
    expected = hf.load(folder)
    change(folder, num_key_value_heads=...)
    model = hf.load(folder)
    assert jax.tree.structure(model) == jax.tree.structure(expected)
    assert_same_weights(model, expected)


@pytest.mark.parametrize(
    "name",
    sentinels(["llama_linear", "llama_3_1", "qwen2_yarn"], lambda name: name == "qwen2_yarn"),
)
def test_old_names_of_keys_mean_the_same(tmp_path, name):
    shutil.copy(GOLDEN / name / "config.json", tmp_path)
    expected = described(GOLDEN / name)
    scaling = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    old = {"rope_theta": theta, "rope_scaling": scaling | {"type": kind}}
    change(tmp_path, rope_parameters=..., dtype=..., torch_dtype="bfloat16", **old)
    assert described(tmp_path).arguments == expected.arguments


# Only `rope_parameters` says that OLMo Hybrid lacks rope: old readers do not know the family.
NO_ROPE = ("gpt2", "granite_hybrid", "kimi_linear", "kimi_linear_query_latent", "olmo_hybrid")
WITH_ROPE = [name for name in FOLDERS if name not in NO_ROPE]


@pytest.mark.parametrize(
    "name", sentinels(WITH_ROPE, lambda name: name in ("phi3_long_rope", "qwen2_yarn", "gemma3"))
)
def test_an_export_has_rope_keys_for_old_and_new_readers(name):
    """Each spelling is complete."""
    model = described(GOLDEN / name).shapes
    _, content = family_of(model, FOLDERS[name][0])
    old = (
        "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor",
        "rotary_emb_base", "rotary_pct",
    )  # fmt: skip
    for without in (("rope_parameters",), old):
        rest = {key: each for key, each in content.items() if key not in without}
        assert rest != content
        found = described_by(rest, "config.json").shapes
        assert not list(differences(found, model)), without


def test_rotary_fractions_of_all_head_sizes_are_read_back():
    """30 of 44 and 58 of 100 coordinates are hard cases."""
    for head_dim in range(2, 257):
        for turned in range(2, head_dim + 1, 2):
            assert int(head_dim * fraction_of(Rotary(turned), head_dim)) == turned
    make = functools.partial(phi3, 8, 44, 1, 1, 8, rotary_fraction=0.7)
    model = jax.eval_shape(lambda key: make(key=key), jax.random.key(0))
    assert model.stack.patterns[0][0].attention.rotary.head_dim == 30
    assert family_of(model, "phi3")[1]["hidden_size"] == 44


def test_dynamic_scaling_is_refused_beyond_the_training_length(folder):
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    change(folder, rope_parameters=dynamic, max_position_embeddings=8)
    model = described(folder).shapes
    told = "sequences of 9 tokens, but with Dynamic scaling rotary positions are known up to 8"
    model.check(8, Compute())
    with pytest.raises(ValueError, match=told):
        model.check(9, Compute())
    with pytest.raises(ValueError, match=told):
        model.stack.patterns[0][0].attention.rotary.rotations(
            jnp.zeros((1, 9), jnp.int32), jnp.float32
        )
    _, written = family_of(model)
    assert written["rope_parameters"] == dynamic and written["max_position_embeddings"] == 8
    change(folder, max_position_embeddings=...)
    with pytest.raises(FolderError, match="'dynamic' has no max_position_embeddings"):
        described(folder)


def test_the_length_for_dynamic_scaling_is_exported(tmp_path):
    golden = GOLDEN / "llama_dynamic_one_layer"
    hf.save(hf.load(golden), tmp_path / "again", longest=7)
    before, after = (
        json.loads((each / "config.json").read_text())["max_position_embeddings"]
        for each in (golden, tmp_path / "again")
    )
    assert before == after != 7


def test_a_tied_head_a_prefix_and_old_buffers_are_optional(folder):
    change(folder, tie_word_embeddings=True)
    with_head(folder, lambda table: table)

    def without_head(held):
        return {n: each for n, each in held.items() if n != HEAD}

    def as_old_files(held):
        held = {n.removeprefix("model."): each for n, each in held.items()}
        return held | {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}

    expected = hf.load(folder)
    assert expected.unembedding is None
    for change_tensors in (without_head, as_old_files):
        rewritten(folder, change_tensors)
        assert_same_weights(hf.load(folder), expected)


@pytest.mark.parametrize(("keys", "told"), refusals(__file__, "config"))
def test_unknown_keys_are_refused_by_name_and_value(folder, keys, told):
    change(folder, **keys)
    with pytest.raises(FolderError, match=re.escape(told)):
        hf.load(folder)


def damaged(how, folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    first = next(name for name in header if name != "__metadata__")
    if how == "cut":
        file.write_bytes(content[:-5])
    elif how == "longer":
        file.write_bytes(content + b"12345678")
    elif how == "huge header":
        file.write_bytes(struct.pack("<Q", 1 << 62) + content[8:])
    elif how == "no JSON":
        file.write_bytes(content[:8] + b"x" * size + content[8 + size :])
    elif how == "pickle":
        file.rename(folder / "pytorch_model.bin")
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "elsewhere":
        index = {"weight_map": {first: "../../etc/passwd"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        key, value = how
        header[first][key] = value
        text = json.dumps(header).encode().ljust(size)
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


@pytest.mark.parametrize(("how", "told"), refusals(__file__, "tensor files"), ids=str)
def test_a_damaged_or_hostile_file_is_refused(folder, how, told):
    damaged(how, folder)
    with pytest.raises(FolderError, match=re.escape(told)) as error:
        hf.load(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
def test_a_mask_is_ignored_and_cannot_be_a_weight(tmp_path, dtype):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "gpt_neox" / file, tmp_path)
    mask, bias = "gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.dense.bias"
    rewritten(tmp_path, lambda held: held | {mask: np.ones((1, 1, 4, 4), dtype)})
    assert_same_weights(hf.load(tmp_path), hf.load(GOLDEN / "gpt_neox"))
    rewritten(tmp_path, lambda held: held | {bias: np.ones(16, dtype)})
    with pytest.raises(FolderError, match=rf"{bias} has values of {dtype.__name__[:4]}"):
        hf.load(tmp_path)


def test_a_caller_gives_an_activation_a_name():
    def cubed(x):
        return x**3

    model = jax.eval_shape(
        lambda key: gpt_neox(8, 8, 1, 1, activation=cubed, key=key), jax.random.key(0)
    )
    mine = gpt_neox_family(ACTIVATIONS | {"cubed": cubed})
    family, content = family_of(model, families=[mine])
    assert family is mine and content["hidden_act"] == "cubed"
    assert described_by(content, "config.json", [mine]).arguments["activation"] is cubed
    with pytest.raises(ValueError, match=r"no name for the activation .*cubed"):
        family_of(model, "gpt_neox")


axes = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)


@given(st.data(), axes)
@settings(max_examples=12)
def test_cutting_and_joining_are_inverse(data, names):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(names), max_size=len(names)))
    order = data.draw(st.permutations(names))
    ends = sorted(data.draw(st.sets(st.integers(1, len(names)), max_size=2)) | {len(names)})
    within = tuple(" ".join(order[a:b]) for a, b in zip([0, *ends], ends, strict=False))
    along = data.draw(st.integers(0, len(within) - 1))
    shape = Share(tuple(names), tuple(sizes), within, along, 0).shape
    groups = data.draw(st.sampled_from([n for n in range(1, 5) if shape[along] % n == 0]))
    before, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    share = Share(tuple(names), tuple(sizes), within, along, before, groups)
    weight = np.arange(np.prod(sizes)).reshape(sizes)
    joined = np.asarray(share.joined(jnp.asarray(weight)))
    width = [(before, behind) if axis == along else (0, 0) for axis in range(len(within))]
    padded = np.concatenate(
        [
            np.pad(group, width, constant_values=-1)
            for group in np.split(joined, groups, axis=along)
        ],
        axis=along,
    )
    np.testing.assert_array_equal(share.cut(jnp.asarray(padded)), weight)


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=5),
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        min_size=1, max_size=5,
    ),
    st.integers(1, 300),
)  # fmt: skip
@settings(max_examples=40)
def test_files_of_any_tensors_are_read_as_they_were_written(tmp_path_factory, tensors, file_bytes):
    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    values = {
        name: random.normal(size=shape).astype(DTYPES[dtype])
        for name, (dtype, shape) in tensors.items()
    }
    placed = laid_out(folder, {n: (v.dtype, v.shape) for n, v in values.items()}, file_bytes)
    begin_files(placed)
    for name, each in values.items():
        write(placed[name], 0, each.reshape(-1))
    found = stored_tensors(folder)
    assert set(found) == set(values)
    for name, each in values.items():
        assert found[name].shape == each.shape and found[name].dtype == each.dtype
        assert found[name].offset % each.dtype.itemsize == 0  # else readers cannot map the file
        np.testing.assert_array_equal(found[name].read(0, each.size), each.reshape(-1))


def test_each_family_has_a_golden_folder():
    kinds = {json.loads(file.read_text())["model_type"] for file in GOLDEN.glob("*/config.json")}
    assert kinds == {family.model_type for family in FAMILIES}


def test_a_model_of_no_family_is_refused(tmp_path):
    odd = functools.partial(Attention, output_bias=True)
    model = llama(vocab=8, embed=8, layers=1, heads=2, mlp=8, attention=odd, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"none of llama, mistral, .* is this model"):
        hf.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_every_value_is_kept_unless_a_dtype_is_given(folder):
    told = hf.save(hf.load(folder), folder / "out")
    before, after = (stored_tensors(each) for each in (folder, folder / "out"))
    for name, each in before.items():
        one, other = (held.read(0, held.size) for held in (each, after[name]))
        assert other.dtype == np.float32
        np.testing.assert_array_equal(one, other)
    assert (told.largest, str(told)) == (0.0, "float32, which keeps every value")


@pytest.mark.slow
def test_rounding_to_a_narrower_dtype_is_reported(folder):
    told = hf.save(hf.load(folder), folder / "out", dtype="bfloat16")
    changes, written = {}, stored_tensors(folder / "out")
    for name, each in stored_tensors(folder).items():
        value = each.read(0, each.size).astype(np.float64)
        rounded = value.astype(jnp.bfloat16).astype(np.float64)
        np.testing.assert_array_equal(written[name].read(0, each.size), rounded)
        changes[name] = np.max(np.abs(rounded - value) / np.abs(value))
    assert told.largest == pytest.approx(max(changes.values()), rel=1e-6)
    assert told.tensor == max(changes, key=changes.__getitem__)
    assert 0.001 < told.largest <= 2**-8
    assert str(told) == f"bfloat16, which rounds by up to {told.largest:.2%} (in {told.tensor})"


@pytest.mark.slow
def test_a_value_beyond_float16_is_refused_by_its_tensors_name(folder):
    model = hf.load(folder)
    up = model.stack.patterns[0][0].mlp.up.at[1, 3, 2].set(-1e5)
    model = eqx.tree_at(lambda model: model.stack.patterns[0][0].mlp.up, model, up)
    told = r"model\.layers\.1\.mlp\.up_proj\.weight holds -100000, which would become infinite in"
    with pytest.raises(ValueError, match=told):
        hf.save(model, folder / "out", dtype="float16")
    assert not (folder / "out").exists()
    hf.save(model, folder / "out", dtype="bfloat16")


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.landing)])
def test_an_interrupted_save_leaves_no_complete_folder_and_none_is_overwritten(
    tmp_path, monkeypatch, adapters
):
    save = functools.partial(hf.save_adapters, trained=()) if adapters else hf.save
    model = golden_model()
    if adapters:
        model = with_adapters(model, rank=2, key=jax.random.key(1))

    def ended(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", ended)
        with pytest.raises(KeyboardInterrupt):
            save(model, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.safetensors"), *(tmp_path / "out").glob("*.json")]
    with pytest.raises(FileExistsError, match="is not empty: give a new folder"):
        save(model, tmp_path / "out")
    save(model, tmp_path / "again")
    assert len([*(tmp_path / "again").glob("*.safetensors")]) == 1
    assert not [each for each in (tmp_path / "again").iterdir() if each.is_dir()]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (
            {"bos_token_id": 1, "eos_token_id": [0, 1]},
            {"bos_token": "<begin>", "eos_token": "<end>"},
        ),
        ({"bos_token_id": 5, "eos_token_id": []}, {}),
    ],
)
def test_a_tokenizer_file_gets_a_config_with_begin_and_end_tokens(folder, ids, told):
    added = [{"id": 0, "content": "<end>"}, {"id": 1, "content": "<begin>"}]
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({"added_tokens": added}))
    hf.save(hf.load(folder), folder / "out", tokenizer=file, settings=ids)
    found = json.loads((folder / "out" / "tokenizer_config.json").read_text())
    assert found == {"tokenizer_class": "PreTrainedTokenizerFast", **told}


@pytest.mark.parametrize("make", [lambda table: table + np.eye(62, 16), lambda table: table[:-1]])
def test_a_tied_head_with_other_values_is_refused(folder, make):
    """transformers would use it."""
    change(folder, tie_word_embeddings=True)
    with_head(folder, lambda table: make(table).astype(np.float32))
    with pytest.raises(FolderError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        hf.load(folder)
    change(folder, tie_word_embeddings=False)
    with_head(folder, lambda table: table + 1)
    assert hf.load(folder).unembedding is not None


def write_index(folder, file):
    names = dict.fromkeys(read_header(folder / "model.safetensors"), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_an_index_of_other_files_than_the_single_one_is_refused(folder):
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    write_index(folder, "other.safetensors")
    with pytest.raises(FolderError, match=r"model.safetensors, which transformers reads, and an"):
        hf.load(folder)
    write_index(folder, "model.safetensors")
    assert_same_weights(hf.load(folder), golden_model())


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # float64's 1e300
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_values_that_are_not_finite_are_refused_by_name(folder, dtype):
    name = "model.layers.1.mlp.up_proj.weight"

    def broken(held):
        values = held[name].astype(jnp.dtype(dtype))
        values[3, 5], values[7, 1] = np.inf if dtype != "float64" else 1e300, np.nan
        return held | {name: values}

    rewritten(folder, broken)
    with pytest.raises(FolderError) as error:
        hf.load(folder)
    told = f"2 of 384 values of {name} are not finite in float32, the first is inf at (3, 5)"
    assert told in str(error.value) and str(folder) in str(error.value)


@pytest.mark.several_devices
def test_values_that_are_not_finite_are_refused_on_a_mesh(folder):
    def broken(held):
        held["model.norm.weight"][-1] = -np.inf  # in the share of the last device
        return held

    rewritten(folder, broken)
    with pytest.raises(
        FolderError, match=r"1 of 16 values of model.norm.weight .* -inf at \(15,\)"
    ):
        hf.load(folder, make_mesh(fsdp=4, tensor=2))


LLAMA = Path(__file__).parent / "golden" / "llama"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """The empty snapshot of `someone/small-model` in the cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--someone--small-model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a1b2")
    (model / "snapshots" / "a1b2").mkdir(parents=True)
    return model / "snapshots" / "a1b2"


def test_a_hub_name_resolves_to_its_cached_folder(snapshot):
    shutil.copy(LLAMA / "config.json", snapshot)
    assert local_folder_of("someone/small-model", weights=False) == snapshot
    with pytest.raises(FolderError, match=r"no network access, or no \*\.safetensors there"):
        local_folder_of("someone/small-model")
    shutil.copy(LLAMA / "model.safetensors", snapshot)
    assert local_folder_of("someone/small-model") == snapshot


def as_links(snapshot, folder):
    """The files of `folder` as `huggingface_hub` keeps them."""
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"digest{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/digest{number}")


def test_links_inside_a_snapshot_are_followed(snapshot, tmp_path):
    write_tokenizer_folder(tmp_path / "here", begins=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(LLAMA / name, tmp_path / "here")
    as_links(snapshot, tmp_path / "here")
    loaded = hf.load("someone/small-model")
    assert_same_weights(loaded, golden_model())
    assert load_tokenizer(str(snapshot)).bos_id is not None
    assert read_chat_template(snapshot) is not None
    hf.save(loaded, tmp_path / "out", tokenizer=snapshot)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copied = tmp_path / "out" / name
        assert copied.read_bytes() == (tmp_path / "here" / name).read_bytes()
        assert not copied.is_symlink()


def test_links_to_another_repository_are_refused(snapshot, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(LLAMA / name, snapshot)
    private = tmp_path / "models--someone--private" / "blobs"
    private.mkdir(parents=True)
    (private / "digest").write_text("secret")
    (snapshot / "merges.txt").symlink_to("../../../models--someone--private/blobs/digest")
    with pytest.raises(FolderError, match=r"merges\.txt cannot be used: it is a link to .*private"):
        hf.save(hf.load(snapshot), tmp_path / "out", tokenizer=snapshot)


def test_an_error_without_a_network_says_what_to_do(snapshot):
    with pytest.raises(FolderError) as error:
        hf.load("someone/large-model")
    assert str(error.value) == (
        "someone/large-model is not a local folder, and cannot be downloaded from the Hugging Face "
        "Hub (no network access): with network access, run "
        "`hf download someone/large-model --local-dir FOLDER`, and give FOLDER"
    )


@pytest.mark.parametrize("name", ["folder", "./someone/model", "/someone/model", "a/b/c", "../b"])
def test_paths_that_are_not_hub_names_are_folders(name):
    assert local_folder_of(name) == Path(name)
