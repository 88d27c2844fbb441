"""What becomes of memory that a run's steps on CPUs have freed.

Each step takes its temporaries from malloc and frees them. glibc maps large ones anew each time, or
takes them from an arena of the thread, and gives both back at once. The kernel then clears every
page again at every step, which was a fifth of the quickstart's CPU time. In one arena that is never
trimmed most steps find the pages of the steps before. That takes up to twice the memory: a hole is
reused only where something fits, and a step that finds none gets new pages.
"""

import ctypes
import os
from collections.abc import Mapping

# Parameters of mallopt(3), and what they are set to: nothing is given back but what is larger than
# 256 MiB, and all threads share an arena, since those of further threads hold 64 MiB at most.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 2**28, _ARENA_MAX: 1}


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
