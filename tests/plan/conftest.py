"""Marks the tests of plans: CI runs the slow ones with the newest compilers only. Plans for CPUs
run with both."""

from pathlib import Path

import pytest

ON_CPUS = ("test_teachers.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:  # of the whole session
        if item.path.parent == here and item.path.name not in ON_CPUS:
            item.add_marker("aot")
