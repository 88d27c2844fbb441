"""Adapters of experts in PEFT's format, which has parameters of all experts together. What is
written here is checked against PEFT's definition in NumPy and, with lmlib[parity], by PEFT itself.
"""

import json

import equinox as eqx
import jax
import numpy as np
import pytest
from adapted_models import adapted, assert_same, assert_same_logits, base_of, ids_of, merge, theirs
from hugging_face_families import FAMILIES, GOLDEN, tensors
from sentinels import sentinels

from lmlib import hf
from lmlib.hf.families import described
from lmlib.hf.peft import adapters_in, read_config
from lmlib.hf.tensor_files import begin_files, laid_out, write
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.matrices.lora import map_adapted

ALL = ("stack.*", "*.experts.*")
EXPERTS = "base_model.model.model.layers.{}.mlp.experts"
IN_FOLDERS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def written(model, folder, name):
    hf.save_adapters(model, folder, model_type=FAMILIES[name][0], trained=())
    return folder


def read(folder, name):
    return hf.load_adapters(folder, base_of(name), model_type=FAMILIES[name][0])


@pytest.mark.parametrize("name", sentinels(IN_FOLDERS, lambda name: name == "mixtral"))
def test_the_product_of_what_is_written_is_what_merging_adds(name, tmp_path):
    """PEFT's definition: expert by expert W + alpha / r · B · A, where the rows of A are of one
    expert after the other, and the columns of B in turn of all."""
    model = adapted(name, rank=2, alpha=5.0, paths=ALL)
    config = read_config(written(model, tmp_path / "adapters", name))
    assert {*config.parameters} == {"experts.gate_up_proj", "experts.down_proj"}
    pairs = tensors(tmp_path / "adapters" / "adapter_model.safetensors")
    hf.save(merge(model), tmp_path / "merged", model_type=FAMILIES[name][0], dtype="float32")
    found, before = (
        tensors(folder / "model.safetensors") for folder in (tmp_path / "merged", GOLDEN / name)
    )
    module, gate, up, down = IN_FOLDERS[name]
    X = base_of(name).stack.patterns[0][0].mlp.router.experts

    def added(prefix, parameter):
        a, b = (pairs[f"{prefix}.lora_{each}.weight"] for each in "AB")
        rank, alpha = config.rank_of(parameter), config.alpha_of(parameter)
        a, b = a.reshape(X, rank, -1), b.reshape(-1, rank, X)
        return alpha / rank * np.einsum("orx,xri->xoi", b, a)

    for layer in range(3):
        holder = EXPERTS.format(layer)
        of_gate_up = added(f"{holder}.base_layer", "experts.gate_up_proj")
        of_gate, of_up = np.split(of_gate_up, 2, axis=1)
        of_down = added(holder, "experts.down_proj")
        for expert in range(X):
            for matrix, change in ((gate, of_gate), (up, of_up), (down, of_down)):
                key = f"model.layers.{layer}.{module}.experts.{expert}.{matrix}.weight"
                expected = before[key] + change[expert]
                assert np.abs(change[expert]).max() > 0.01
                np.testing.assert_allclose(found[key], expected, atol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    "paths",
    [("*.experts.down",), pytest.param(("*.query", "*.experts.up"), marks=pytest.mark.slow)],
)
def test_what_is_written_is_read_again(paths, tmp_path):
    model = adapted("mixtral", rank=2, alpha=5.0, paths=paths)
    again = read(written(model, tmp_path / "out", "mixtral"), "mixtral")
    one, other = merge(model), merge(again)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    if paths == ("*.experts.down",):
        assert_same(model, again)


def of_two_ranks(name):
    """Attention's adapters have rank 4 and another alpha, those of experts rank 2."""
    model = adapted(name, rank=2, alpha=5.0, paths=("*.experts.*",))
    attention = (
        adapted(name, rank=4, alpha=8.0, paths=("*.attention.*",)).stack.patterns[0][0].attention
    )
    return eqx.tree_at(lambda model: model.stack.patterns[0][0].attention, model, attention)


def test_attention_and_experts_may_have_ranks_of_their_own(tmp_path):
    model = of_two_ranks("mixtral")
    config = read_config(written(model, tmp_path / "out", "mixtral"))
    names = ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")
    found = [(config.rank_of(name), config.alpha_of(name)) for name in names]
    # Gate and up are one parameter there, with the ranks of both.
    assert found == [(4, 8.0), (4, 8.0), (4, 10.0), (2, 5.0)]
    again = merge(read(tmp_path / "out", "mixtral"))
    for a, b in zip(jax.tree.leaves(merge(model)), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def save_tensors(found, file):
    shaped = {name: (each.dtype, each.shape) for name, each in found.items()}
    placed = laid_out(file.parent, shaped, 1 << 40, file.name)
    begin_files(placed)
    for name, values in found.items():
        write(placed[name], 0, values)


def with_modules_of_experts(folder, name, ranks=2):
    """The folder as PEFT wrote it with transformers 4: each expert's matrices are modules."""
    model = adapted(name, rank=ranks, alpha=5.0, paths=("*.experts.*",))
    module, *matrices = IN_FOLDERS[name]
    found = {}

    def note(path, one):
        ending = dict(zip(("gate", "up", "down"), matrices, strict=True))[path.rpartition(".")[2]]
        for layer, (down, up) in enumerate(zip(one.down, one.up, strict=True)):
            for expert, pair in enumerate(zip(down, up, strict=True)):
                at = f"base_model.model.model.layers.{layer}.{module}.experts.{expert}.{ending}"
                for each, values in zip("AB", pair, strict=True):
                    found[f"{at}.lora_{each}.weight"] = np.ascontiguousarray(values.T)
        return one

    map_adapted(note, model)
    folder.mkdir()
    save_tensors(found, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ranks, "lora_alpha": 5.0,
        "target_modules": matrices,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return model


@pytest.mark.landing
def test_modules_of_each_expert_are_read_too(tmp_path):
    model = with_modules_of_experts(tmp_path / "old", "mixtral")
    assert_same(read(tmp_path / "old", "mixtral"), model)
    file = tmp_path / "old" / "adapter_model.safetensors"
    fewer = {key: each for key, each in tensors(file).items() if ".experts.4." not in key}
    file.unlink()
    save_tensors(fewer, file)
    with pytest.raises(FolderError, match=r"experts\.4\.w1\.lora_A\.weight is missing"):
        read(tmp_path / "old", "mixtral")


@pytest.mark.landing
def test_experts_of_deepseek_have_a_place_where_its_dense_mlps_have_none(tmp_path):
    """Their names end alike."""
    model = adapted("deepseek_v3", rank=2, paths=("*.experts.*",))
    config = read_config(written(model, tmp_path / "out", "deepseek_v3"))
    assert {*config.parameters} == {"experts.gate_up_proj", "experts.down_proj"}


def test_experts_that_trained_whole_beside_adapters_are_refused(tmp_path):
    model = adapted("mixtral", rank=2, paths=("*.experts.down",))
    with pytest.raises(ValueError, match=r"no place for the trained .*experts\.gate_up_proj"):
        hf.save_adapters(model, tmp_path / "out", trained=("*.experts.gate",))


def test_a_parameter_that_is_not_there_is_refused(tmp_path):
    model = adapted("mixtral", rank=2, paths=("*.experts.down",))
    file = written(model, tmp_path / "out", "mixtral") / "adapter_config.json"
    content = json.loads(file.read_text())
    for names, told in (
        (["experts.w1"], "target_parameters has 'experts.w1', and the model has no such"),
        (["experts.gate_up_proj"], "lora_A.weight has shape"),
    ):
        file.write_text(json.dumps(content | {"target_parameters": names}))
        with pytest.raises(FolderError, match=told):
            read(tmp_path / "out", "mixtral")


def test_patterns_of_experts_are_names(tmp_path):
    model = adapted("mixtral", rank=2, paths=("*.experts.down",))
    file = written(model, tmp_path / "out", "mixtral") / "adapter_config.json"
    pattern = {r".*\.mlp\.experts\.down_proj": 2}
    content = json.loads(file.read_text()) | {"r": 9, "rank_pattern": pattern}
    file.write_text(json.dumps(content))
    names = described(GOLDEN / "mixtral").family.names
    found = adapters_in(tmp_path / "out", base_of("mixtral"), names)
    assert {rank for rank, _ in found.sizes.values()} == {2}


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("golden_by_peft", reason="needs lmlib[parity]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "paths"),
    [
        *((name, ALL) for name in IN_FOLDERS),
        ("mixtral", ("*.experts.down",)),
        ("qwen3_moe", ("*.key", "*.experts.gate")),
        ("deepseek_v3", ("*.experts.*",)),
        ("gpt_oss", ALL),
    ],
)
def test_peft_computes_the_same_of_what_is_written_here(peft, name, paths, tmp_path):
    model = adapted(name, rank=3, alpha=5.0, rank_stabilized=name == "olmoe", paths=paths)
    expected = theirs(peft.read(name, written(model, tmp_path / "out", name)), ids_of(name))
    assert_same_logits(model, ids_of(name), expected)
    assert_same_logits(merge(model), ids_of(name), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FOLDERS)
def test_peft_computes_the_same_of_two_ranks(peft, name, tmp_path):
    model = of_two_ranks(name)
    expected = theirs(peft.read(name, written(model, tmp_path / "out", name)), ids_of(name))
    assert_same_logits(model, ids_of(name), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_FOLDERS, "gpt_oss"])
@pytest.mark.parametrize(
    "settings",
    [
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 3},
            "alpha_pattern": {"experts.gate_up_proj": 7},
        },
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj"], "use_rslora": True},
    ],
)
def test_of_what_peft_writes_lmlib_computes_the_same(peft, name, settings, tmp_path):
    model = peft.adapted(name, r=4, lora_alpha=6, **settings)
    model.save_pretrained(tmp_path)
    found, expected = read(tmp_path, name), theirs(model, ids_of(name))
    assert_same_logits(found, ids_of(name), expected)
    assert_same_logits(merge(found), ids_of(name), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FOLDERS)
def test_peft_reads_modules_of_each_expert_as_lmlib_does(peft, name, tmp_path):
    with_modules_of_experts(tmp_path / "old", name)
    model = peft.read(name, tmp_path / "old")
    expected = theirs(model, ids_of(name))
    assert_same_logits(read(tmp_path / "old", name), ids_of(name), expected)
    model.save_pretrained(tmp_path / "new")  # its patterns are longer
    assert_same_logits(read(tmp_path / "new", name), ids_of(name), expected)
