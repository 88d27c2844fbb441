"""What is planned is marked: CI asks the slow ones of the newest compilers alone, but for those of
CPUs, which are here."""

from pathlib import Path

import pytest

ON_CPUS = ("test_mesh_search.py", "test_search.py", "test_teachers.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path.name not in ON_CPUS:
            item.add_marker("absent_hardware")
