"""Free memory as reported by Linux's files and by devices, and arrays that take more."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from lmlib.hardware.free_memory import check_fits, check_fits_host, host_bytes

MEMINFO = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  800 kB\nSwapFree:  100 kB\n"
KB = 1024


def files(folder, contents):
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return host_bytes(folder / "proc", folder / "groups")


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 900 * KB),
        # Version 2: the limit of a group above it is that of this process, which has 30 kB.
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "groups/job/step/memory.max": "max\n",
                "groups/job/memory.max": f"{200 * KB}\n",
            },
            170 * KB,
        ),
        # Version 1, in a container, whose own group is the root.
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n2:hugetlb,memory:/elsewhere/x\n0::/\n",
                "groups/memory/memory.limit_in_bytes": f"{20 * KB}\n",
            },
            0,
        ),
        (
            {
                "proc/self/cgroup": "2:memory:/x\n",
                "groups/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
            },
            900 * KB,
        ),
    ],
    ids=["nothing", "machine", "version 2", "version 1", "no limit"],
)
def test_free_memory_of_a_process(tmp_path, contents, expected):
    if contents:
        contents = {"proc/meminfo": MEMINFO, "proc/self/status": "VmRSS:  30 kB\n"} | contents
    assert files(tmp_path, contents) == expected


def test_this_machine_says():
    free = host_bytes()
    assert free is not None and 1e6 < free < 1e15


def test_devices_of_one_machine_share_its_memory():
    free = host_bytes()
    assert free is not None
    quarter = jax.ShapeDtypeStruct((free // 4,), jnp.int8)
    check_fits("a quarter", quarter, jax.devices()[:2])
    with pytest.raises(MemoryError, match=r"^8 quarters would take .* of memory, and this machine"):
        check_fits("8 quarters", quarter, jax.devices()[:1] * 8)
    with pytest.raises(MemoryError, match=r"^all and more would take .* GB of memory"):
        check_fits_host("all and more", 2 * free)


def test_an_accelerator_has_its_own():
    def device(process_index=0, **stats):
        return SimpleNamespace(
            platform="gpu",
            device_kind="NVIDIA H100",
            process_index=process_index,
            memory_stats=lambda: stats or None,
        )

    gigabyte = jax.ShapeDtypeStruct((2**28,), jnp.float32)
    has = device(bytes_limit=3 * 10**9, bytes_in_use=2 * 10**9)
    message = r"^2 would take 1\.07 GB of memory, and each NVIDIA H100 has 1\.00 GB free$"
    with pytest.raises(MemoryError, match=message):
        check_fits("2", gigabyte, [has, has])
    check_fits("all", [gigabyte] * 2, [device(bytes_limit=3 * 10**9, bytes_in_use=0)] * 2)
    check_fits("unknown", [gigabyte] * 1000, [device()])
    check_fits("another process's", [gigabyte] * 1000, [device(1, bytes_limit=1, bytes_in_use=0)])
