"""Keeps the memory that a run's steps on CPUs have freed.

XLA asks malloc for all temporaries of a step as one block, and frees it after the step. By default
glibc maps a large block anew each time, or takes it from an arena of the thread, and returns both
to the kernel at once. The kernel then clears every page again at every step: 123,000 page faults
and 7 to 17 % of a step whose temporaries take 504 MB, a fifth of the quickstart's CPU time. In one
arena that is never trimmed, most steps find the pages of the steps before. A run can then hold up
to twice the memory, since a hole is used again only by a block that fits.
"""

import ctypes
import os
from collections.abc import Mapping

# Parameters of mallopt(3) and their values. Only blocks of 2 GiB and more return to the kernel, the
# largest threshold that mallopt takes. All threads share one arena, since the arenas of
# further threads hold 64 MiB at most.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 2**31 - 1, _ARENA_MAX: 1}


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Has malloc keep what is freed for the next that asks; call it before any thread is started.

    An arena that a thread has by then stays in use, for later threads too.

    Returns:
      Whether malloc will: what the user has set of it stays, and only glibc has these parameters.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*each) for each in _SETTINGS.items()])
