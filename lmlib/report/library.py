"""The charting library of the page: Vega, Vega-Lite and vega-embed as one script.

`vl-convert-python` holds them; to make one script of them takes it a second, so that is kept in the
user's cache folder.
"""

import contextlib
import functools
import importlib.metadata

from lmlib.report.specifications import VERSION
from lmlib.storage.cache_folder import cache_folder
from lmlib.storage.whole_file import make_folder, write_whole


@functools.cache
def library() -> str:
    """The script, which defines `vegaEmbed`; it can stand in an HTML page.

    Raises:
      ImportError: without vl-convert-python.
    """
    packaged = importlib.metadata.version("vl-convert-python")
    folder = cache_folder()
    file = None if folder is None else folder / "charts" / f"vega-lite-{VERSION}-{packaged}.js"
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            return file.read_text("utf-8")
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(vl_version=VERSION)  # type: ignore[call-arg]
    made = bundle.replace("</script", "<\\/script")
    if file is not None:
        with contextlib.suppress(OSError):
            make_folder(file.parent)
            write_whole(file, made)
    return made
