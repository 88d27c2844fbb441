"""Finding a model and restoring it onto this machine's devices."""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
from jax.sharding import Mesh, SingleDeviceSharding

from lmlib.compute import Compute
from lmlib.data.chats.chat import ChatTemplate, read_chat_template
from lmlib.data.stored.metadata import TokenizerIdentity
from lmlib.data.text import (
    BYTE_TOKENIZER,
    TextCodec,
    beginning_of,
    codec_of_bytes,
    codec_of_file,
)
from lmlib.hf.families import described
from lmlib.hf.folder import read_json
from lmlib.hf.load import load_weights
from lmlib.hf.peft import adapters_in, holds_adapters
from lmlib.models.protocol import check_protocol
from lmlib.parallel.axes import LayoutError
from lmlib.parallel.check import check_model
from lmlib.parallel.mesh import make_mesh
from runner.errors import user_errors
from runner.inference.loaded import Loaded
from runner.inference.saved_run import SavedRun, longest_in, use_run
from runner.processes.agreement import agreed
from runner.watch.transfer import told
from runner.weights.references import HuggingFace, base_of, located, tokenizer_of

_TOKENIZER_FILE = "tokenizer.json"


def load(
    reference: str,
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    trusted: Collection[str] = (),
    init_from: str | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> Loaded:
    """The model of a run, `WORKDIR[@STEP]`, of a folder of Hugging Face's or of PEFT's, or of a
    name on the Hub.

    Every process must call it. The run's data need not be there, nor its mesh fit these devices.

    Args:
      mesh: `None`: every device, over which the weights are split if they divide, else copied; of
        a single device the model needs no mesh.
      dtype: to compute in; `None`: the run's, of a folder float32.
      tokenizer: a tokenizer.json or its folder, in place of the one that is known.
      trusted: modules that the run's config.json may refer to.
      init_from: where what a run began with is now, whose checkpoints do not hold all weights, or
        the base of a folder of PEFT's; `None`: where it was.
      show: gets a line now and then while a folder is read, and what is not as it was asked for.

    Raises:
      ConfigError: if there is no such model, it is damaged, or a run removes it meanwhile; of the
        newest checkpoint only if that happens again and again.
    """
    with agreed(), user_errors():
        found = located(reference)
        if isinstance(found, HuggingFace):
            if init_from is not None and not holds_adapters(found.folder):
                show(f"--init_from={init_from} is ignored: {found.name} holds the whole model")
            based = dataclasses.replace(found, base=init_from)
            loaded = _of_folder(based, mesh, dtype, tokenizer, show)
        else:
            loaded = use_run(
                found,
                lambda run: _of_run(run, mesh, dtype, tokenizer, show),
                trusted,
                init_from,
                show,
            )
    if mesh is not None or loaded.mesh.size > 1:
        return loaded
    alone = SingleDeviceSharding(loaded.mesh.devices.item())
    return dataclasses.replace(loaded, model=jax.device_put(loaded.model, alone))


def _of_run(
    run: SavedRun,
    mesh: Mesh | None,
    dtype: str | None,
    tokenizer: str | None,
    show: Callable[[str], None],
) -> Loaded:
    if tokenizer is None:
        run.check_tokenizer()
    check_protocol(jax.eval_shape(fdl.build(run.cfg.model), key=jax.random.key(0)))
    mesh = mesh or _mesh_for(run.abstract_model)
    folder = run.tokenizer_folder if tokenizer is None else _file_of(tokenizer).parent
    return Loaded(
        model=run.model(mesh),
        mesh=mesh,
        compute=Compute(dtype=dtype or fdl.build(run.cfg.compute).dtype),
        codec=_codec_of_run(run) if tokenizer is None else _codec_of(_file_of(tokenizer), ()),
        tokenizer_file=_file_of_run(run) if tokenizer is None else _file_of(tokenizer),
        end_ids=_end_ids_of_run(run),
        document_end=_document_end(run) if tokenizer is None else None,
        tokenizer=run.tokenizer if tokenizer is None else _identity_of(tokenizer),
        tokenizer_folder=folder,
        chat_template=_chat_template(folder, show, run if tokenizer is None else None),
        longest=run.longest,
        name=f"{run.workdir}@{run.step}",
        step=run.step,
        cfg=run.cfg,
    )


def _of_folder(
    found: HuggingFace,
    mesh: Mesh | None,
    dtype: str | None,
    tokenizer: str | None,
    show: Callable[[str], None],
) -> Loaded:
    base = base_of(found)
    there = described(base.folder)
    shapes = there.shapes
    adapters = None
    if base is not found:
        adapters = adapters_in(found.folder, shapes, there.family.names)
    mesh = mesh or _mesh_for(lambda mesh: shapes if adapters is None else adapters.beside(shapes))
    # What is damaged in the small files is found before gigabytes are read.
    end_ids = end_ids_of(base.folder)
    texts = base if _file_in(found.folder) is None else found
    file = _file_in(texts.folder) if tokenizer is None else _file_of(tokenizer)
    folder = texts.folder if tokenizer is None else _file_of(tokenizer).parent
    codec = None if file is None else _codec_of(file, end_ids)
    tell = told(f"reading {base.name}:", show)
    model = load_weights(base.folder, shapes, there.family.names, mesh, tell)
    return Loaded(
        model=model if adapters is None else adapters.onto(model),
        mesh=mesh,
        compute=Compute(dtype=dtype or "float32"),
        codec=codec,
        tokenizer_file=file,
        end_ids=end_ids,
        document_end=None,
        tokenizer=tokenizer_of(texts) if tokenizer is None else _identity_of(tokenizer),
        tokenizer_folder=folder,
        chat_template=_chat_template(folder, show),
        longest=longest_in(read_json(base.folder / "config.json")),
        name=found.name,
        step=None,
        cfg=None,
    )


def _chat_template(
    folder: Path | None, show: Callable[[str], None], run: SavedRun | None = None
) -> ChatTemplate | None:
    """That of the run's data, or else of the tokenizer's folder; a damaged one is told of."""
    try:
        found = None if run is None else run.chat_template()
        return read_chat_template(folder) if found is None and folder is not None else found
    except (ValueError, OSError) as error:
        show(f"WARNING: there is no chat template: {error}")
        return None


def end_ids_of(folder: Path) -> tuple[int, ...]:
    """The ids that end a text, as generation_config.json says, or else config.json."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            said = read_json(folder / name).get("eos_token_id")
            ids = said if isinstance(said, list) else [said]
            if known := tuple(id for id in ids if type(id) is int):
                return known
    return ()


def _codec_of_run(run: SavedRun) -> TextCodec | None:
    """That of its data; if that is gone, or was never seen, of the folder that it began with."""
    if run.data is not None and run.data.tokenizer == run.tokenizer:
        codec = run.data.text_codec()
        if codec is not None:
            return codec
    folder = run.tokenizer_folder
    if folder is not None and (file := _file_in(folder)) is not None:
        return _codec_of(file, end_ids_of(folder))
    return codec_of_bytes(None) if run.tokenizer == BYTE_TOKENIZER else None


def _file_of_run(run: SavedRun) -> Path | None:
    """The tokenizer.json of the same, if there is one."""
    data, folder = run.data, run.tokenizer_folder
    if data is not None and data.tokenizer == run.tokenizer and data.tokenizer_path is not None:
        return data.tokenizer_path
    return None if folder is None else _file_in(folder)


def _end_ids_of_run(run: SavedRun) -> tuple[int, ...]:
    if (end := _document_end(run)) is not None:
        return (end,)
    return () if run.origin is None else end_ids_of(run.origin)


def _document_end(run: SavedRun) -> int | None:
    metadata = None if run.data is None else run.data.metadata
    return None if metadata is None else metadata.eos_id


def _codec_of(file: Path, end_ids: Collection[int]) -> TextCodec:
    return codec_of_file(file, beginning_of(file, end_ids))


def _file_in(folder: Path) -> Path | None:
    file = folder / _TOKENIZER_FILE
    return file if file.is_file() else None


def _file_of(tokenizer: str) -> Path:
    path = Path(tokenizer)
    return path / _TOKENIZER_FILE if path.is_dir() else path


def _identity_of(tokenizer: str) -> TokenizerIdentity | None:
    return tokenizer_of(HuggingFace(_file_of(tokenizer).parent, tokenizer))


def _mesh_for(abstract_model: Callable[[Mesh], Any]) -> Mesh:
    """Every device: each with a share of the weights, or, where they do not divide, with all."""
    split = make_mesh(fsdp=-1)
    try:
        check_model(abstract_model(split), split)
    except LayoutError:
        return make_mesh(data=-1)
    return split
