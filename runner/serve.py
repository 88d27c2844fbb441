"""Serves models on a chat page and behind OpenAI's API.

    python -m runner.serve --from=RUN
    python -m runner.serve --from=RUN@1000 --from=RUN@2000
    python -m runner.serve --from=MODEL --adapter=NAME=ADAPTERS

Only this machine can open the page; from another one, use ssh -L 8000:localhost:8000 HOST. Needs
lmlib[serve]. See docs/serving.md.
"""

import asyncio
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from absl import flags

from runner.command_line.command import run, show, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import DTYPES, MOST, loading, model_flags
from runner.errors import ConfigError, chosen_sizes, user_errors

_FROM = flags.DEFINE_multi_string("from", [], "RUN, RUN@STEP, Hugging Face folder, or Hub name.")
_ADAPTER = flags.DEFINE_multi_string(
    "adapter", [], "NAME=FOLDER: adapters of the first --from, a model by that name."
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for the network.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0 for any.", 0, 65_535)
_PUBLIC_NAME = flags.DEFINE_multi_string(
    "public_name", [], "Further name of this server in the address bar, such as a proxy's."
)
_API_KEY_FILE = flags.DEFINE_string(
    "api_key_file", None, "File with the API key; without it, the key is in LMLIB_API_KEY."
)
_SLOTS = flags.DEFINE_integer("slots", 8, "Answers generated at once, per model.", 1, 1024)
_WAITING = flags.DEFINE_integer("waiting", 256, "Requests that may wait for a slot.", 1, MOST)
_PREFIX_ROWS = flags.DEFINE_integer(
    "prefix_rows", 8, "Beginnings of prompts kept for reuse, per model.", 0, MOST
)
_LENGTH = flags.DEFINE_integer("length", None, "Maximum tokens of prompt and answer.", 2, MOST)
_DEVICES = flags.DEFINE_integer("devices", 1, "Devices over which each model is split.", 1, MOST)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, DTYPES, "Compute dtype; default: bfloat16, on CPUs float32."
)
_INT8 = flags.DEFINE_bool("int8", False, "Keep matrices in 8 bits, which saves memory.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of another tokenizer than the model's.")
model_flags()

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

from lmlib.generate import usual_dtype
from lmlib.models.multi_token import without_heads
from lmlib.parallel.mesh import make_mesh
from lmlib.serve.engine import Engine
from lmlib.serve.service import Service
from lmlib.terminal.quantities import bytes_text
from runner.inference.loaded import Loaded, load
from runner.inference.prompts import Reader
from runner.jax_settings.devices import start_devices

if TYPE_CHECKING:  # needs starlette
    from runner.serving.served import Served

_USUAL_LENGTH = 4096
_KEY = "LMLIB_API_KEY"


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    if arguments or not _FROM.value:
        raise ConfigError("give --from, as in: python -m runner.serve --from=WORKDIR; see --help")
    try:
        from runner.serving.connections import bound
    except ImportError as error:
        raise ConfigError(
            f"runner.serve needs starlette and uvicorn: pip install 'lmlib[serve]' ({error})"
        ) from error
    names, adapters, key = _names(_FROM.value), _adapters(), _api_key()
    if twice := names.keys() & adapters.keys():
        raise ConfigError(f"--adapter={min(twice)}=… is the name of a --from: give another")
    try:
        with bound(_HOST.value, _PORT.value) as listening:
            _serve(names, adapters, key, listening)
    except KeyboardInterrupt:
        show("stopped")
    return FINISHED


def _names(references: Sequence[str]) -> dict[str, str]:
    """Returns the references by the names of their models: the last parts of their paths."""
    short = [PurePath(reference).name or reference for reference in references]
    names = short if len(set(short)) == len(short) else references
    if len(set(names)) < len(names):
        raise ConfigError(f"--from={max(names, key=list(names).count)} is given twice")
    return dict(zip(names, references, strict=True))


def _adapters() -> dict[str, str]:
    """Returns the references of adapters by their names."""
    found: dict[str, str] = {}
    for text in _ADAPTER.value:
        name, _, reference = text.partition("=")
        if not name or not reference or name in found:
            raise ConfigError(f"--adapter={text}: write NAME=FOLDER, each NAME once")
        found[name] = reference
    return found


def _api_key() -> str | None:
    """Returns the key of the file, or else of the environment, or `None`."""
    key, where = os.environ.get(_KEY) or None, _KEY
    if _API_KEY_FILE.value is not None:
        where = f"--api_key_file={_API_KEY_FILE.value}"
        with user_errors():
            key = Path(_API_KEY_FILE.value).read_text("utf-8").strip()
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise ConfigError(f"{where} must hold one key of printable ASCII characters")
    return key


def _serve(
    names: Mapping[str, str], adapters: Mapping[str, str], key: str | None, listening: socket.socket
) -> None:
    from runner.serving.app import application
    from runner.serving.connections import EndingServer
    from runner.serving.guard import LOOPBACK

    port, is_local = listening.getsockname()[1], _HOST.value in LOOPBACK
    if not is_local and key is None:
        show(
            f"WARNING: --host={_HOST.value} lets everyone on the network use these models: set a "
            f"key in {_KEY}, or give --api_key_file"
        )
    start_devices()
    engines, models = _engines(names, adapters)
    host = socket.gethostname().lower()
    hosts = {*LOOPBACK, *_PUBLIC_NAME.value, *(() if is_local else (host, _HOST.value.lower()))}
    service = Service(engines, _WAITING.value)
    app = application(service, models, hosts, not is_local, key)
    url = f"http://{'localhost' if is_local else host}:{port}/  (Ctrl-C to stop)"
    server = EndingServer(
        app,
        started=lambda: print(url, flush=True),
        stopping=lambda: service.close(finish=True),
        show=show,
    )
    try:
        asyncio.run(server.serve([listening]))
    finally:
        service.close(finish=False)


def _engines(
    names: Mapping[str, str], adapters: Mapping[str, str]
) -> tuple[dict[str, Engine], list["Served"]]:
    """Loads the models, and the adapters of the first; only the engines keep their weights."""
    from runner.serving.served import Served

    engines, models = dict[str, Engine](), list[Served]()
    every = {name: _load(reference) for name, reference in names.items()}
    beside = {name: _load(reference) for name, reference in adapters.items()}
    for name in names:
        loaded, beside = every.pop(name), {} if engines else beside
        engine = engines[name] = _engine(loaded, beside)
        for each, model in {name: loaded, **beside}.items():
            reader = Reader(each, model.model.vocab, model.codec, model.chat_template)
            adapter = None if each == name else each
            models.append(Served(each, name, adapter, reader, model.answer_ends, engine.length))
        what = "continues texts" if loaded.chat_template is None else "chats"
        rows = f"{engine.slots} answers at once of {engine.length:,} tokens"
        adapted = f", and {', '.join(beside)}" * bool(beside)
        show(f"{name}{adapted}: {what}, {rows}; its cache has {bytes_text(engine.cache_bytes)}")
    return engines, models


def _load(reference: str) -> Loaded:
    with user_errors():
        mesh = make_mesh(tensor=_DEVICES.value)
    dtype = _DTYPE.value or usual_dtype()
    settings = {"mesh": mesh, "dtype": dtype, "tokenizer": _TOKENIZER.value, **loading()}
    return load(reference, **settings, show=show)


def _engine(loaded: Loaded, adapters: Mapping[str, Loaded]) -> Engine:
    length = _LENGTH.value or min(loaded.longest or _USUAL_LENGTH, _USUAL_LENGTH)
    if warning := loaded.beyond_training(length):
        show(f"WARNING: {warning}")
    with user_errors(), chosen_sizes("give a smaller --length, --slots or --prefix_rows"):
        return Engine(
            without_heads(loaded.model),
            loaded.mesh,
            loaded.compute,
            slots=_SLOTS.value,
            length=length,
            prefix_rows=_PREFIX_ROWS.value,
            int8=_INT8.value,
            adapters={name: without_heads(each.model) for name, each in adapters.items()},
        )


if __name__ == "__main__":
    run(main)
