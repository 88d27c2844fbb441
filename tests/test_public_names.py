"""Every name that tab completion offers exists."""

import importlib

import pytest


@pytest.mark.parametrize("package", ["lmlib", "runner"])
def test_everything_in_dir_is_importable(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in dir(module):
        getattr(module, name)  # imports it


def test_packages_are_listed_before_they_are_imported():
    import lmlib

    assert {"hf", "inspect", "generate", "Inspector", "llama"} <= set(dir(lmlib))
    with pytest.raises(AttributeError, match="no attribute 'lama'"):
        lmlib.lama  # noqa: B018
