"""Keeps compiled programs in the user's cache folder, so that the next start can reuse them.

The user's own JAX settings take precedence: JAX_COMPILATION_CACHE_DIR names another folder, and
JAX_ENABLE_COMPILATION_CACHE=false disables the cache.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from lmlib.storage.local_folder import NO_HOME, cache_folder


def keep_compiled_programs() -> Path | None:
    """Enables the compilation cache; call it after JAX has started and before anything compiles.

    A cache without a writable folder is disabled, with a message on stderr. With several CPU
    devices, JAX 0.10 and 0.11 use a cache only if the user names its folder, since cached programs
    lose the order of their collectives and may deadlock.

    Returns:
      The cache folder, or `None`.
    """
    settings: Any = jax.config  # type checkers don't see its attributes
    if not settings.jax_enable_compilation_cache:
        return None
    folder, cache = settings.jax_compilation_cache_dir, cache_folder()
    several_cpus = jax.default_backend() == "cpu" and jax.device_count() > 1
    if folder is None and several_cpus and jax.__version_info__ < (0, 12):
        return None
    if folder is None and cache is not None:
        folder = str(cache / "compiled")
    try:
        if folder is None:
            raise FileNotFoundError(NO_HOME)
        if "://" not in folder:  # JAX itself writes to buckets
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"{folder} cannot be written ({error.strerror})" if folder else error
        jax.config.update("jax_enable_compilation_cache", False)
        print(
            f"compiled programs are not cached: {reason}; JAX_COMPILATION_CACHE_DIR names another "
            "folder",
            file=sys.stderr,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return Path(folder)
