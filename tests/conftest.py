"""Every test sees eight CPU devices, or with --real-devices those of this machine, and lmlib with
its shape annotations checked."""

import gc
import os
import tempfile

import compiled_programs
import pytest
from checked_annotations import check_annotations

DEVICES = 8

check_annotations("lmlib")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-devices",
        action="store_true",
        help="leave JAX the devices of this machine, a GPU say, instead of eight simulated ones; "
        "where there are fewer, tests marked several_devices are left out",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports JAX."""
    if config.getoption("--real-devices"):
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # TF32 is no float32
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share a GPU
    else:
        _simulate_devices()
    # Many tests compile the same step, some of them in processes of their own, and those of
    # pytest-xdist find the folder in their environment.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = _folder_of_programs(config)
    os.environ.update(compiled_programs.SETTINGS)


def _folder_of_programs(config: pytest.Config) -> str:
    try:
        return str(compiled_programs.folder_of_programs())
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="compiled_by_tests_")
        config.add_cleanup(folder.cleanup)
        return folder.name


def _simulate_devices() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} {compiled_programs.XLA_FLAGS}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Backwards, since long files come late in the alphabet; those of tests/data, all short, come
    # last, when a process may have none left.
    items.sort(key=lambda item: (item.path.parent.name != "data", item.path), reverse=True)
    if not config.getoption("--real-devices"):
        return
    import jax

    if jax.device_count() >= DEVICES:
        return
    several = [item for item in items if item.get_closest_marker("several_devices")]
    config.hook.pytest_deselected(items=several)
    items[:] = [item for item in items if item not in several]


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
