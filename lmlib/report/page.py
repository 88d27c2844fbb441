"""One self-contained HTML page for one or several runs. It loads nothing from the network."""

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2

from lmlib.metrics.meanings import MEANINGS
from lmlib.report import curves, specifications, sweep, tables
from lmlib.report.points import AXES
from lmlib.report.runs_table import runs_table
from lmlib.report.seen import Seen, seen
from lmlib.storage.atomic_file import make_folder, write_atomically
from lmlib.storage.local_folder import cache_folder

FILE_NAME = "report.html"
_TEMPLATE = Path(__file__).parent / "template"


def page(
    runs: Sequence[Seen],
    refresh_seconds: int | None = None,
    baseline: str | None = None,
    margin: float = 0.0,
) -> str:
    """Returns the HTML page of `runs`, at least one.

    All text from runs is escaped, and the page's content security policy allows only its own
    script. With `refresh_seconds` the page reloads itself from its server. `baseline` and `margin`
    are for verdicts on several runs, as in `lmlib.verdicts.compare`. Raises ValueError if a file of
    a run is damaged, or there can be no verdict.
    """
    script = "".join(map(_text, ("sweep.js", "table.js", "many.js", "page.js")))
    charting = _library()
    digests = (hashlib.sha256(each.encode()).digest() for each in (charting, script))
    hashes = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    connect = "'none'" if refresh_seconds is None else "'self'"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    several, samples = len(runs) > 1, tables.samples(runs)
    newest = samples.pop(0) if samples and not several else None
    data = tables.data(runs) | sweep.data(runs)
    data["axes"] = curves.shared(data["charts"])
    return environment.from_string(_text("page.html.jinja")).render(
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'",
        css=_text("page.css"),
        library=charting,
        script=script,
        refresh=refresh_seconds,
        live="" if refresh_seconds is None else " data-live",
        title=f"{len(runs)} runs" if several else runs[0].name,
        status=tables.status(runs),
        state=runs[0].run.state.name if not several else "",
        reasons=tables.reasons(runs),
        tiles=[] if several else tables.tiles(runs[0]),
        table=runs_table(runs, tables.shown_numbers(runs)) if several else None,
        verdicts="" if baseline is None or not several else tables.verdicts(runs, baseline, margin),
        axes=AXES.items(),
        constants=tables.constants(runs),
        newest=newest,
        samples=samples,
        wall_times=tables.wall_times(runs),
        all_settings=tables.settings(runs),
        meanings=MEANINGS,
        most=curves.MOST,
        dull=curves.DULL,
        specifications={
            name: getattr(specifications, name)()
            for name in ("curves", "heat", "bars", "logarithmic")
        }
        | {"against": sweep.against(), "parallel": sweep.parallel()}
        | {"colours": specifications.COLOURS, "sequential": specifications.SEQUENTIAL},
        data=data,
    )


def write_page(
    runs: Sequence[Seen],
    path: str | os.PathLike[str],
    baseline: str | None = None,
    margin: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes the page to a file atomically; `check` as in `write_atomically`."""
    made = page(runs, baseline=baseline, margin=margin)
    write_atomically(path, made.encode("utf-8", "backslashreplace"), check)


def try_write_page(
    workdir: Path, tell: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> None:
    """Writes the page of the run in `workdir` into it; a failure only shows a warning."""
    try:
        write_page(seen([workdir]), workdir / FILE_NAME, check=check)
    except Exception as error:
        tell(
            f"WARNING: {FILE_NAME} was not written: {type(error).__name__}: {error}. To try "
            f"again: python -m runner.report {workdir}"
        )


@functools.cache
def _library() -> str:
    """Returns the charting library: Vega, Vega-Lite and vega-embed bundled into one script.

    `vl-convert-python` takes a second to build it, so it is kept in the user's cache folder.
    """
    version, folder = specifications.VERSION, cache_folder()
    name = f"vega-lite-{version}-{importlib.metadata.version('vl-convert-python')}.js"
    file = None if folder is None else folder / "charts" / name
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            return file.read_text("utf-8")
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(vl_version=version)  # type: ignore[call-arg]
    made = bundle.replace("</script", "<\\/script")
    if file is not None:
        with contextlib.suppress(OSError):
            make_folder(file.parent)
            write_atomically(file, made)
    return made


@functools.cache
def _text(name: str) -> str:
    return (_TEMPLATE / name).read_text("utf-8")
