"""Memory that a step frees stays with the process, on CPUs.

XLA allocates the temporaries of each step anew. glibc asks the kernel for arrays of more than 32 MB
one by one and gives them back when they are freed, so each step waits until the kernel has zeroed
a hundred thousand pages: a tenth of the time of a small model.
"""

import ctypes
import os
import platform

# <malloc.h>: the parameters of mallopt, which its manual page explains.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Has glibc take every array from one heap, of which the kernel gets nothing back.

    Does nothing with another C library, or where the user has set glibc's own variables.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "GLIBC_TUNABLES" in os.environ or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    # Other heaps than the first end at 64 MB, and threads would each take one of their own.
    mallopt(_M_ARENA_MAX, 1)
