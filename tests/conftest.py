"""Every test sees eight CPU devices, or with --real-devices those of this machine, and lmlib with
its shape annotations checked."""

import gc
import os
import tempfile

import compiled_programs
import pytest
from checked_annotations import check_annotations
from hypothesis import settings
from turns import left_for_another

DEVICES = 8
MANY_MAPPINGS = 20_000

gc.disable()  # until all is imported, which stays: a sixth of the time that takes
check_annotations("lmlib")
# The time of an example depends on how busy the machine is.
settings.register_profile("without_deadlines", deadline=None)
settings.load_profile("without_deadlines")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-devices",
        action="store_true",
        help="leave JAX the devices of this machine, a GPU say, instead of eight simulated ones; "
        "where there are fewer, tests marked several_devices are left out",
    )
    parser.addoption(
        "--turn",
        metavar="K/N",
        help="of the slow cases one of N parts, number K; without it all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports JAX."""
    if config.getoption("--real-devices"):
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # TF32 differs from float32
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share a GPU
    else:
        _simulate_devices()
    # Many tests compile the same step, some in their own processes. The processes of pytest-xdist
    # find the folder in their environment.
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
    # Backwards, since long files come late in the alphabet. The short files of tests/data come
    # last, when a process may have nothing else left.
    items.sort(key=lambda item: (item.path.parent.name != "data", item.path), reverse=True)
    if turn := config.getoption("--turn"):
        _deselect(config, items, left_for_another(items, turn))
    if not config.getoption("--real-devices"):
        return
    import jax

    if jax.device_count() < DEVICES:
        several = [item for item in items if item.get_closest_marker("several_devices")]
        _deselect(config, items, several)


def _deselect(config: pytest.Config, items: list[pytest.Item], these: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=these)
    these = set(these)
    items[:] = [item for item in items if item not in these]


@pytest.fixture(scope="session")
def stats():
    """scipy's, whose import takes each process a second: here, one that tests with it."""
    from scipy import stats

    return stats


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Deletes compiled programs between files once there are many. Each one uses some memory
    mappings. Linux allows 65,530 per process, and XLA's compiler crashes without any left."""
    if nextitem is not None and nextitem.path != item.path and _mappings() > MANY_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


def _mappings() -> int:
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:  # no Linux
        return 0


def pytest_collection_finish() -> None:
    """Imported modules stay, so the garbage collector need not visit them again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
