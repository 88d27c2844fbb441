"""A server of two models: one chats, the other only continues texts."""

import pytest
from running_server import running_server
from taught_model import write_taught_model

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
