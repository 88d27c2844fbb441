"""`runner.convert`: models come in from Hugging Face's format and go out into it, on disks and in
buckets."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import pytest
from adapter_runs import write_adapter_run
from buckets.fixtures import SCHEMES, folder_in_bucket
from buckets.proxy import Fault
from byte_texts import write_ids
from folder_contents import files_of
from forked_processes import run_forked, succeeded
from hugging_face_families import GOLDEN
from sentinels import sentinels
from small_folder import assert_same_tensors
from small_tokenizer import write_tokenizer_folder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from data_tools.prepare_chats.conversations import ConversationField
from data_tools.prepare_chats.prepare import prepare_chats
from data_tools.prepare_chats.template import load_template
from data_tools.rows.files import Files
from data_tools.tokenizer import load_tokenizer
from experiments.base.pretraining import multi_token
from lmlib import hf
from lmlib.checkpoint import Checkpoints
from lmlib.data.chats.chat import read_chat_template
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.ungated_mlp import relu_squared
from lmlib.parallel.mesh import make_mesh
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import copies_folder
from lmlib.terminal.quantities import count_text
from runner import convert
from runner.command_line.new_folder import made_whole
from runner.config import configs
from runner.errors import ConfigError
from runner.inference.loaded import load

TOKENIZER = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()


@pytest.fixture(scope="module")
def brought_in(tmp_path_factory):
    """A folder with a tokenizer's files, and the workdir that was made of it."""
    folder = tmp_path_factory.mktemp("folder")
    shutil.copytree(GOLDEN / "llama", folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    workdir = tmp_path_factory.mktemp("in") / "run"
    convert.bring_in(str(folder), workdir)
    return folder, workdir


def test_an_import_is_a_checkpoint_and_its_export_equals_the_folder(brought_in, tmp_path):
    folder, workdir = brought_in
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [0]
        manifest = checkpoints.verify(0)
    assert all(name.startswith("model.") for name in manifest.arrays)
    assert not list(workdir.parent.glob(".*"))

    told = convert.bring_out(str(workdir), tmp_path / "out", None, "float32", 20_000)
    assert "step 0 of" in told and "the tokenizer of" in told
    assert "in float32, which keeps every value, with" in told
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same_tensors(tmp_path / "out", folder)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == TOKENIZER
    before, after = (
        json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "out")
    )
    older = {"rope_theta": before["rope_parameters"]["rope_theta"], "rope_scaling": None}
    assert {key: (older | before)[key] for key in after} == after  # readers of before 5 need these


OTHER = TOKENIZER.replace('"b"', '"c"')


def saved_run(workdir, folder, data, initialised_from):
    """A run with the folder's weights at step 7, trained on `data`."""
    cfg = configs.load("experiments/from_hf", ["tiny"], [f"folder={folder}"])
    cfg.data = data or cfg.data
    configs.save(cfg, workdir)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        notes = {"initialised_from": initialised_from}
        checkpoints.save(7, {"model": hf.load(folder)}, notes)
    return workdir


def flat_tokens(path, tokenizer_json, **ids):
    digest = hashlib.sha256(tokenizer_json.encode()).hexdigest()
    write_ids(
        path, [[1, 2, 3]], vocab_size=62, tokenizer=TokenizerIdentity("t", digest),
        tokenizer_json=tokenizer_json, **ids,
    )  # fmt: skip
    return fdl.Config(FlatTokens, path=str(path), split="train", batch_size=1, sequence_length=700)


@pytest.mark.parametrize(
    ("origin", "data", "expected"),
    sentinels(
        [
            ("folder", None, TOKENIZER),
            ("folder", TOKENIZER, TOKENIZER),
            ("run", None, TOKENIZER),
            ("folder", OTHER, OTHER),
            (None, OTHER, OTHER),
            (None, None, None),
        ],
        lambda case: case == ("folder", OTHER, OTHER),
    ),
)
def test_an_export_has_the_tokenizer_of_its_ids(
    brought_in, tmp_path, origin, data, expected, capsys
):
    folder, workdir = brought_in
    begun = {"folder": str(folder), "run": f"{workdir / 'checkpoints'}@0", None: None}[origin]
    source = data and flat_tokens(tmp_path / "data", data, bos_id=5, eos_id=6)
    run = saved_run(tmp_path / "run", folder, source, begun)
    convert.bring_out(str(run), tmp_path / "out")
    file = tmp_path / "out" / "tokenizer.json"
    assert (file.read_text() if file.exists() else None) == expected
    assert ("no tokenizer files found" in capsys.readouterr().err) == (expected is None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ends = (1, 2) if origin else (5, 6) if data else (None, None)
    assert (config.get("bos_token_id"), config.get("eos_token_id")) == ends
    longest = 700 if data else 512 if origin else 64
    assert config["max_position_embeddings"] == longest


@pytest.mark.landing
@pytest.mark.parametrize("name", ["chatml", None])
def test_an_export_has_the_chat_template_of_its_data(tmp_path, name):
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN / "llama", folder)
    write_tokenizer_folder(folder, begins=True)
    template = load_template(str(folder), name)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "The river?", "response": "It runs."}')
    rows = Files([str(tmp_path / "chats.jsonl")], field=ConversationField())
    prepare_chats(rows, load_tokenizer(str(folder)), template, tmp_path / "data", "train")
    data = {"path": str(tmp_path / "data"), "batch_size": 1, "sequence_length": 64}
    source = fdl.Config(FlatTokens, split="train", **data)
    run = saved_run(tmp_path / "run", folder, source, str(folder))
    loaded = load(str(run), mesh=make_mesh())
    assert loaded.tokenizer_folder == folder
    assert loaded.chat_template.sources == template.sources
    assert (template.sources == read_chat_template(folder).sources) == (name is None)
    convert.bring_out(str(run), tmp_path / "out")
    exported = read_chat_template(tmp_path / "out")
    assert exported.sources == template.sources
    assert exported.special_tokens == template.special_tokens
    convert.bring_out(str(run), tmp_path / "told", folder)
    files = [each / "tokenizer_config.json" for each in (folder, tmp_path / "told")]
    assert files[0].read_text() == files[1].read_text()
    shutil.rmtree(tmp_path / "data")
    (folder / "chat_template.jinja").write_text("{% if")
    lines = []
    assert load(str(run), mesh=make_mesh(), show=lines.append).chat_template is None
    assert "the chat template cannot be used" in lines[-1] and "is wrong in line 1" in lines[-1]


@pytest.mark.parametrize(
    "name", ["mistral", pytest.param("deepseek_v3_direct_queries", marks=pytest.mark.landing)]
)
def test_an_export_of_heads_says_how_many_parameters_it_has(tmp_path, name, capsys):
    keeps = name.startswith("deepseek")
    cfg = configs.load("experiments/from_hf", ["tiny"], [f"folder={str(GOLDEN / name)!r}"])
    if keeps:
        cfg.model.multi_token_depths = 1
    else:
        multi_token(cfg)
    write_adapter_run(cfg, GOLDEN / name, tmp_path / "run")
    told = convert.bring_out(str(tmp_path / "run"), tmp_path / "out")
    assert (f"a folder of {name} has no heads" in capsys.readouterr().err) != keeps
    model = hf.load(tmp_path / "out")
    assert hasattr(model, "predictors") == keeps
    assert f"{count_text(sum(x.size for x in jax.tree.leaves(model)))} parameters" in told


@pytest.mark.slow
def test_a_model_of_no_family_is_refused_before_it_is_read(brought_in, tmp_path):
    _, workdir = brought_in
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "0" / "state")
    cfg = configs.load(str(workdir))
    cfg.model.feed_forward = fdl.Partial(GatedMLP, activation=relu_squared)
    configs.save(cfg, tmp_path / "run")
    with pytest.raises(ValueError, match=r"none of llama, mistral, .* is this model"):
        convert.bring_out(str(tmp_path / "run"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("merges.txt", None, "merges.txt cannot be used: it is a link to .*/secret, which is"),
        ("tokenizer.json", "{", "tokenizer.json is damaged: its JSON cannot be read"),
    ],
)
def test_copied_files_must_be_undamaged_and_inside_the_folder(
    brought_in, tmp_path, name, content, told
):
    """Those that come in, and a tokenizer's files that go out with a model."""
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "stranger")
    (tmp_path / "secret").write_text("secret")
    if content is None:
        (folder / name).symlink_to(tmp_path / "secret")
    else:
        (folder / name).write_text(content)
    with pytest.raises(FolderError, match=told):
        convert.bring_in(str(folder), tmp_path / "run")
    with pytest.raises(FolderError, match=told):
        convert.bring_out(str(brought_in[1]), tmp_path / "run", folder)
    assert not (tmp_path / "run").exists()


@pytest.fixture(params=SCHEMES)
def bucket(request, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with folder_in_bucket(request.param, monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with Llama's golden weights."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    convert_command(GOLDEN / "llama", folder)
    return folder


def convert_command(source, to, *flags, run=succeeded):
    return run("-m", "runner.convert", f"--from={source}", f"--to={to}", *flags)


@pytest.mark.slow
def test_an_export_to_a_bucket_equals_one_on_disk_and_is_read_back(bucket, run, tmp_path):
    url, _ = bucket
    flags = ("--largest_file=0.00002", "--dtype=float32")  # some files of tensors
    for to in (tmp_path / "out", f"{url}/out"):
        done = convert_command(run, to, *flags)
        assert done.stdout.startswith(f"{to} holds step 0 of ")
    expected = files_of(tmp_path / "out")
    store = BucketStore(BucketUrl.parsed(f"{url}/out"))
    assert {name: store.read(name) for name in store.list()} == {
        str(name): content for name, content in expected.items()
    }
    assert len(expected) > 4
    assert not [each for each in copies_folder().rglob("*.safetensors")]
    again = convert_command(run, f"{url}/out", run=run_forked)
    assert again.returncode == 2
    assert f"--to={url}/out is not empty: give a new folder" in again.stderr
    for source, to in ((f"{url}/out", "back"), (tmp_path / "back", "again")):
        convert_command(source, tmp_path / to)
    assert_same_tensors(tmp_path / "again", tmp_path / "out")


@pytest.mark.slow
def test_a_failed_upload_leaves_no_folder_that_looks_whole(bucket, run):
    url, proxy = bucket
    proxy.fault = lambda request: (
        Fault.FORBIDDEN
        if request.method in ("PUT", "POST") and re.search(r"(/|%2F)config\.json", request.path)
        else None
    )
    done = convert_command(run, f"{url}/out", run=run_forked)
    assert done.returncode == 2, done.stderr
    assert f"cannot write {url}/out/config.json: " in done.stderr.splitlines()[-1]
    proxy.fault = lambda request: None
    assert "config.json" not in BucketStore(BucketUrl.parsed(f"{url}/out")).list()
    assert not [each for each in copies_folder().rglob("*.safetensors")]
    read = run_forked("-m", "runner.generate", f"--from={url}/out", "--tokens=1", "--max_tokens=2")
    assert read.returncode == 2, read.stderr


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_new_folder_is_whole_or_absent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".out.unfinished" / "half").mkdir(parents=True)  # a kill left it
    out = Path("out")  # as the user writes it
    with pytest.raises(OSError, match="full"), made_whole(Path("other")) as unfinished:
        (unfinished / "half").write_text("")
        raise OSError("the disk is full")
    with made_whole(out) as unfinished:
        assert not names(unfinished)
        (unfinished / "first").write_text("")
        with pytest.raises(ConfigError, match="--to=out: another command makes it"):
            made_whole(out).__enter__()
        assert names(unfinished) == ["first"] and not out.exists()
    with pytest.raises(ConfigError, match="=out is not empty: give a new"), made_whole(out):
        pass
    assert names(tmp_path) == ["out"] and names(out) == ["first"]
