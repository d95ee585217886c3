"""A tiny engine for a file's tests, and an application over it."""

from contextlib import ExitStack

import pytest

from ddtree.config import ServerConfig
from ddtree.server.app import create_app
from server_kit import Client, HeldEngine, live_server, served_engine


@pytest.fixture(scope="session")
def tiny_engine_of_server(tmp_path_factory):
    return served_engine(tmp_path_factory.mktemp("served"))


@pytest.fixture
def engine(tiny_engine_of_server):
    """The engine, free and without faults."""
    return HeldEngine(tiny_engine_of_server)


@pytest.fixture
def open_client(engine):
    """Start an application over the engine; settings of the server as keywords."""
    with ExitStack() as opened:

        def start(api_key=None, **settings):
            config = ServerConfig(**({"node_budget": 6} | settings))
            return opened.enter_context(Client(create_app(engine, config, api_key)))

        yield start


@pytest.fixture
def client(open_client):
    return open_client()


@pytest.fixture
def live(tiny_engine_of_server):
    """A server on a free port."""
    with live_server(tiny_engine_of_server, node_budget=6) as server:
        yield server
