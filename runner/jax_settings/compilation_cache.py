"""Compiled programs are kept in the user's cache folder, so that the next start need not compile.

JAX's own settings are left as they are where the user has made them: JAX_COMPILATION_CACHE_DIR says
where the programs go, JAX_ENABLE_COMPILATION_CACHE=false that nowhere.
"""

import os
from pathlib import Path
from typing import Any

import jax


def keep_compiled_programs() -> Path | None:
    """Call it before anything compiles; returns the folder, `None` if nothing is kept."""
    settings: Any = jax.config  # its attributes are made as it is imported
    if not settings.jax_enable_compilation_cache:
        return None
    if settings.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "lmlib" / "compiled"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return Path(settings.jax_compilation_cache_dir)
