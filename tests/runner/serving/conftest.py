"""A server of two models: one chats, the other only continues texts."""

import pytest
from taught_model import write_taught_model

pytest.importorskip("starlette", reason="needs lmlib[serve]")
pytest.importorskip("uvicorn", reason="needs lmlib[serve]")

from running_server import running_server

LENGTH = 256


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "chatty": write_taught_model(folder / "chatty", longest=LENGTH),
        "base": write_taught_model(folder / "base", longest=LENGTH, seed=1, template=False),
    }


@pytest.fixture(scope="module")
def served(models):
    with running_server(models, length=LENGTH) as server:
        yield server
