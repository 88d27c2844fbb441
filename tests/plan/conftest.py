"""What is planned is marked: CI asks the slow ones of the newest compilers alone, but for those of
CPUs, which are here."""

from pathlib import Path

import pytest

ON_CPUS = ("test_teachers.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:  # of the whole session
        if item.path.parent == here and item.path.name not in ON_CPUS:
            item.add_marker("aot")
