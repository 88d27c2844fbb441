"""Imports a model from a Hugging Face folder or a GGUF file, or exports a run to one.

    python -m runner.convert --from=HF_DIR_OR_NAME --to=WORKDIR
    python -m runner.convert --from=WORKDIR[@STEP] --to=HF_DIR --tokenizer=HF_DIR
    python -m runner.convert --from=WORKDIR[@STEP] --to=PEFT_DIR --adapters
    python -m runner.convert --from=model.gguf --to=WORKDIR
    python -m runner.convert --from=WORKDIR[@STEP] --to=model.gguf --dtype=q8_0

Import: WORKDIR gets the config of experiments/from_hf for that model, and a checkpoint at step 0
with its weights. Any run of that model can start with --init_from=WORKDIR, or train in WORKDIR:
python -m runner --fdl_config=WORKDIR --workdir=WORKDIR --fdl.data.path=… --fdl.validation.path=…
A PEFT folder can be imported too: WORKDIR's model has its adapters, which train with the other
weights of the folder. The checkpoint holds only these; the rest of the model stays in its folder.
Export: `from_pretrained` of transformers loads the folder, if the model is one of its families.
Adapters are merged, or, with --adapters, written for PEFT with the other trained weights.
--dtype=int8 and int4 quantize the layers' matrices, in the format compressed-tensors of vLLM.
A GGUF file is for llama.cpp, with tokenizer and chat template; --from may also be a Hugging Face
folder then. Both directions need the package gguf.
The model is held in float32 in this machine's memory. --to is a new or empty folder; an interrupted
conversion leaves nothing there. An export may go to gs://… or s3://…
"""

import dataclasses
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from runner.command_line.command import run, show, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import DTYPES, INIT_FROM, WEIGHTS, loading, model_flags
from runner.command_line.new_folder import destination, made_whole
from runner.errors import ConfigError, user_errors

_FROM = flags.DEFINE_string(
    "from", None, "Hugging Face folder, Hub name, GGUF file, or RUN[@STEP]."
)
_ONLY_GGUF = ("q8_0", "q4_0")
_BITS = {"int8": 8, "int4": 4}  # of folders for serving
_FOUR_BITS = ("nf4", "mxfp4")  # of matrices in folders
_TO = flags.DEFINE_string("to", None, "Folder or GGUF file to create.")
_BASE = flags.DEFINE_string(
    "base", None, "Base model of the adapters; default: the model that they name."
)
_ADAPTERS = flags.DEFINE_bool(
    "adapters", False, "Export the adapters and the other trained weights."
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    [*DTYPES, *_FOUR_BITS, *_BITS, *_ONLY_GGUF],
    "Export: dtype of the files; nf4, mxfp4, int8 and int4 only in folders, q8_0 and q4_0 in GGUF.",
)
_LARGEST_FILE = flags.DEFINE_float(
    "largest_file", 5.0, "Export: approximate maximum size of a file, in GB.", 1e-6
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Export: folder or file of a tokenizer; default: the run's tokenizer."
)
model_flags()

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

import fiddle as fdl
import jax
from jax.sharding import Mesh

from lmlib import hf
from lmlib.adapters.lora import lora
from lmlib.data.chats.chat import put_chat_template
from lmlib.hf.compressed import compress
from lmlib.hf.families import family_of
from lmlib.hf.peft.config import holds_adapters
from lmlib.hf.peft.save import written_whole
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.matrices.lora import has_adapters, without_adapters
from lmlib.models.multi_token import multi_token, without_heads
from lmlib.optim.trainable import adapters
from lmlib.parallel.matrix import number_of_weights
from lmlib.parallel.mesh import make_mesh
from lmlib.state import split_by_training
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import shown
from lmlib.terminal.quantities import count_text, duration_text
from runner.config import configs
from runner.config.references import FolderReference, resolve
from runner.monitoring.progress_line import told
from runner.weights.gguf_files import as_folder, is_gguf, write_gguf
from runner.weights.model_folder import ModelFolder, keep_origin
from runner.weights.models import SavedRun, merged_into_bases, open_model, recipe_of, use_model
from runner.weights.notes import frozen_note, save_weights_alone
from runner.weights.target import PLAIN, LoadOptions, LoadTarget
from runner.weights.texts import TextSources, tokenizer_of

# written last: without one of them the folder is not a model
_LAST = ("config.json", "adapter_config.json")
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys of config.json


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be busy with a run
    if arguments or not _FROM.value or not _TO.value:
        raise ConfigError("give --from and --to, as in: --from=HF_DIR --to=WORKDIR; see --help")
    began = time.perf_counter()
    options = LoadOptions(**loading(), show=show)
    if is_gguf(_TO.value) or is_gguf(_FROM.value):
        with user_errors():
            made = _gguf(_FROM.value, _TO.value, options)
        print(f"{_TO.value} holds {made}; it took {duration_text(time.perf_counter() - began)}")
        return FINISHED
    if _DTYPE.value in _ONLY_GGUF:
        raise ConfigError(f"--dtype={_DTYPE.value} is for GGUF files: give --to=FILE.gguf")
    with user_errors(), destination(_TO.value, _LAST, told("sending", show)) as to:
        found = resolve(_FROM.value)
        if isinstance(found, FolderReference):
            outward = (_DTYPE, _LARGEST_FILE, _TOKENIZER, _ADAPTERS, INIT_FROM, WEIGHTS)
            _refuse(f"the import of {found.name}", *outward)
            if not holds_adapters(found.folder):
                _refuse(f"{found.name}, which has no adapters", _BASE)
            if BucketUrl.parsed(_TO.value):
                raise ConfigError(
                    f"--to={_TO.value}: a run's folder is made on a disk; a run in a bucket can "
                    f"begin with --init_from={found.name}"
                )
            made = bring_in(_FROM.value, to, dataclasses.replace(options, init_from=_BASE.value))
        elif _ADAPTERS.value:
            _refuse("--adapters", _LARGEST_FILE, _TOKENIZER)
            dtype = _DTYPE.value or "float32"
            if dtype in _BITS:
                raise ConfigError(f"--dtype={dtype} has no effect on adapters: leave it out")
            made = bring_adapters_out(_FROM.value, to, _BASE.value, dtype, options)
        else:
            _refuse("an export of merged weights", _BASE)
            file_bytes = round(_LARGEST_FILE.value * 1e9)
            made = bring_out(_FROM.value, to, _TOKENIZER.value, _DTYPE.value, file_bytes, options)
    print(f"{_TO.value} holds {made}; it took {duration_text(time.perf_counter() - began)}")
    return FINISHED


def _gguf(reference: str, to: str, options: LoadOptions) -> str:
    """Converts from or to a GGUF file; returns a description."""
    if BucketUrl.parsed(to) or BucketUrl.parsed(reference):
        raise ConfigError("GGUF files are read and written on a disk, not in a bucket")
    _refuse("a GGUF file", _BASE, _ADAPTERS, _LARGEST_FILE)
    if is_gguf(to) and is_gguf(reference):
        raise ConfigError("--from and --to are both GGUF files: one of them must be a folder")
    if is_gguf(to):
        if _DTYPE.value in (*_BITS, *_FOUR_BITS):
            raise ConfigError(f"--dtype={_DTYPE.value} is for folders: give q8_0 or q4_0")
        return bring_gguf_out(
            reference, Path(to).expanduser(), _TOKENIZER.value, _DTYPE.value or "float32", options
        )
    _refuse(f"the import of {reference}", _DTYPE, _TOKENIZER, INIT_FROM, WEIGHTS)
    with as_folder(reference, Path(to).expanduser(), show) as found:
        return bring_in(found, Path(to).expanduser(), options)


def _refuse(what: str, *options: flags.FlagHolder) -> None:
    for each in options:
        if each.present:
            raise ConfigError(f"--{each.name} has no effect on {what}: leave it out")


def bring_in(reference: str | FolderReference, to: Path, options: LoadOptions = PLAIN) -> str:
    """Makes a workdir from a model folder or from PEFT adapters; returns a description.

    Raises ValueError or OSError if the folder cannot be used, or `to` is not empty.

    Args:
      options: `init_from` is the base of the adapters, if it differs from the one they name.
    """
    with made_whole(to) as unfinished:
        source = open_model(reference, options)
        assert isinstance(source, ModelFolder), reference
        base = source.base
        folder = f"folder={str(base.folder)!r}"
        cfg = configs.load("experiments/from_hf", (), [folder], options.trusted)
        cfg.init_from = str(to.absolute())
        if (held := source.adapters) is not None:
            shapes = source.described.shapes
            cfg.model = fdl.Partial(lora, of=cfg.model, **held.arguments(shapes))
            cfg.trainable = fdl.Config(adapters)
            if besides := held.besides(shapes):
                cfg.trainable.besides = besides
        configs.save(cfg, unfinished)
        keep_origin(base.folder, unfinished)
        recipe = recipe_of(cfg)
        model, name = source.fill(LoadTarget(recipe, _one_device()))
        parts = split_by_training(model, recipe.trained)
        show("writing the checkpoint")
        save_weights_alone(
            parts.trained,
            unfinished,
            tokenizer_of(base.folder, base.name),
            initialised_from=base.name,
            frozen=frozen_note(parts.frozen, recipe),
        )
    what = "weights" if held is None else "adapters"
    return f"the {what} of {name}, {_size(parts.trained)}"


def bring_out(
    reference: str,
    to: Path,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    file_bytes: int = 5_000_000_000,
    options: LoadOptions = PLAIN,
) -> str:
    """Exports a checkpoint as a Hugging Face folder; returns a description.

    Raises ValueError or OSError if the run cannot be used, no family supports its model, or `to` is
    not empty.

    Args:
      tokenizer, dtype, file_bytes: as in `hf.save`; by default the run's own tokenizer. "int8" and
        "int4": see `lmlib.hf.compressed.compress`.
    """

    def write(run: SavedRun | ModelFolder) -> str:
        assert isinstance(run, SavedRun), reference
        families, texts, own = _families(run), run.texts, tokenizer
        with made_whole(to) as unfinished:
            show(f"reading {shown(run.folder)}")
            model = merged_into_bases(run.model(_one_device(), exact=True))
            template = texts.template_of_data() if own is None else None
            if own is None:
                texts.check_tokenizer()
                own = texts.tokenizer_folder
            if own is None and texts.first is not None:
                own = texts.first.tokenizer_path
            if own is None:
                show("WARNING: no tokenizer files found, so the export has none: give --tokenizer")
            if hasattr(model, "predictors") and not families[0].names.heads:
                kind = families[0].model_type
                show(f"WARNING: a folder of {kind} has no heads of multi-token prediction")
                model = without_heads(model)
            whole = unfinished / "whole" if dtype in _BITS else unfinished
            rounded = hf.save(
                model,
                whole,
                tokenizer=own,
                dtype="float32" if dtype in _BITS else dtype,
                longest=texts.longest,
                settings=_settings(texts),
                families=families,
                file_bytes=file_bytes,
                progress=told("writing", show),
            )
            if template is not None and own is not None:
                put_chat_template(whole, template)
            files = str(rounded)
            if dtype in _BITS:
                files = compress(whole, unfinished, _BITS[dtype])
                shutil.rmtree(whole)
        of = "no tokenizer" if own is None else f"the tokenizer of {own}"
        if has_adapters(run.shapes) and dtype not in _BITS:
            known = rounded.dtype if rounded.tensor is None else rounded
            files = f"{known}, each adapter added in float32 to its matrix as the base stores it"
        return f"step {run.step:,} of {shown(run.workdir)}, {_size(model)} in {files}, with {of}"

    return use_model(reference, write, options)


def bring_gguf_out(
    reference: str,
    to: Path,
    tokenizer: str | None = None,
    kind: str = "float32",
    options: LoadOptions = PLAIN,
) -> str:
    """Exports a checkpoint or a Hugging Face folder as a GGUF file; returns a description.

    Raises ValueError or OSError as `lmlib.gguf.save`, or if the model cannot be used.

    Args:
      tokenizer: a tokenizer.json or its folder; by default the model's own tokenizer.
    """

    def write(source: SavedRun | ModelFolder) -> str:
        families, texts = _families(source), source.texts
        show(f"reading {source.name}")
        model = merged_into_bases(source.model(_one_device(), exact=True))
        given = None if tokenizer is None else Path(tokenizer).expanduser()
        settings = _settings(texts)
        own = write_gguf(model, to, texts, given, kind, settings, families, show)
        if own is None:
            show("WARNING: no tokenizer.json found, so the file has none: give --tokenizer")
        of = "no tokenizer" if own is None else f"the tokenizer {own}"
        return f"{source.name}, {_size(model)} in {kind}, with {of}"

    return use_model(reference, write, options)


def bring_adapters_out(
    reference: str,
    to: Path,
    base: str | None = None,
    dtype: str = "float32",
    options: LoadOptions = PLAIN,
) -> str:
    """Exports the adapters in a checkpoint as a PEFT folder; returns a description.

    Raises ValueError or OSError if the run cannot be used, it has no adapters, no family supports
    its model, or `to` is not empty.

    Args:
      base: the base model for `hf.save_adapters`, with all earlier training; `None`: the model that
        the run began with.
      dtype: dtype of the file.
    """

    def write(run: SavedRun | ModelFolder) -> str:
        assert isinstance(run, SavedRun), reference
        if not has_adapters(run.shapes):
            raise ConfigError(
                f"the model of {shown(run.workdir)} has no adapters: leave out --adapters"
            )
        families, device = _families(run), _one_device()
        own, *before = run.trained
        begun = base is None and run.began_with is not None
        trained, whose = sorted(own.union(*before) if begun else own), base or run.began_with
        if whose is None:
            show(
                "WARNING: adapter_config.json names no base, and PEFT will ask for one: give "
                "--base, a name on the Hub or a folder that runner.convert makes of the base"
            )
        elif Path(whose).is_absolute() and not Path(whose).is_dir():
            show(
                f"WARNING: {whose}, which adapter_config.json names as the base, is not there: "
                "give --base, or --init_from if it has moved, or if it held adapters itself"
            )
        with made_whole(to) as unfinished:
            show(f"reading {shown(run.folder)}")
            written = written_whole(run.shapes, trained, None, families)
            there = run.recipe.trained
            alone = there is not None and written <= there  # the base is not needed
            hf.save_adapters(
                run.trained_weights(device) if alone else run.model(device, exact=True),
                unfinished,
                base=whose,
                trained=trained,
                dtype=dtype,
                families=families,
            )
        of_base = "" if whose is None else f", for {whose}"
        return f"the adapters of step {run.step:,} of {shown(run.workdir)} in {dtype}{of_base}"

    return use_model(reference, write, options)


def _families(run: SavedRun | ModelFolder) -> list[Family]:
    """Returns the known families, first the one of the model.

    If several support it, this is the one that made it. Raises ValueError if none does, before
    gigabytes are read.
    """
    if isinstance(run, ModelFolder):
        own = run.described.family
        return [own, *(family for family in run.options.families if family is not own)]
    made_by = run.cfg.model
    while fdl.get_callable(made_by) in (lora, multi_token):
        made_by = made_by.of
    made = fdl.get_callable(made_by)
    families = sorted(run.options.families, key=lambda family: family.build is not made)
    found, _ = family_of(without_adapters(run.recipe.shapes), None, families)
    return sorted(families, key=lambda family: family is not found)


def _settings(texts: TextSources) -> dict[str, Any]:
    """Returns the keys of config.json that do not follow from the model."""
    metadata = texts.first and texts.first.metadata
    ids = {"bos": metadata.bos_id, "eos": metadata.eos_id} if metadata else {}
    known = {f"{name}_token_id": id for name, id in ids.items() if id is not None}
    before = texts.config
    return known | {key: before[key] for key in _KEPT if key in before}


def _one_device() -> Mesh:
    return make_mesh(devices=jax.devices()[:1])


def _size(model: Any) -> str:
    return f"{count_text(number_of_weights(model))} parameters"


if __name__ == "__main__":
    run(main)
