"""`ddtree serve` refuses in one line, before any model is loaded, and hands its settings on."""

import socket
import sys

import pytest

from ddtree.config import Mode
from ddtree.server import listen


@pytest.fixture
def served(monkeypatch, engine):
    """What the command would serve: (engine settings, server settings, API key)."""
    calls = []

    def serve(loaded, config, api_key, bound, on_ready):
        on_ready(listen.url_of(bound))
        calls.append((engine.config, config, api_key))
        return 15

    monkeypatch.setattr(listen, "serve", serve)
    return calls


def test_settings_are_handed_on(command, served, monkeypatch):
    monkeypatch.setenv("A_KEY", " the-key\n")
    code, out, err = command(
        "serve", "--port", "0", "--served-model-name", "org/name", "--max-queue", "7", "--shutdown-s", "1.5",
        "--api-key-env", "A_KEY", "--mode", "chain", "--max-context", "64",
    )  # fmt: skip
    assert (code, out) == (0, "")
    [(engine_config, config, key)] = served
    assert (config.served_model_name, config.max_queue, config.shutdown_s) == ("org/name", 7, 1.5)
    assert (config.mode, config.node_budget, config.request_timeout_s) == (Mode.CHAIN, "auto", 600.0)
    assert (engine_config.max_context_tokens, key) == (64, "the-key")
    assert err.startswith("smollm2-135m at http://127.0.0.1:")
    assert "the-key" not in err


def test_a_key_from_a_file(command, served, tmp_path):
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    file.chmod(0o640)
    _, _, err = command("serve", "--port", "0", "--api-key-file", str(file))
    assert served[0][2] == "from-a-file"
    assert "mode 0640" in err
    file.chmod(0o600)
    assert "mode 0" not in command("serve", "--port", "0", "--api-key-file", str(file))[2]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_open_door_is_warned_of(command, served, host, monkeypatch):
    if host == "::" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    assert "everyone who reaches" in command("serve", "--port", "0", "--host", host)[2]
    monkeypatch.setenv("A_KEY", "k")
    flags = ("--host", host, "--api-key-env", "A_KEY")
    assert "everyone who reaches" not in command("serve", "--port", "0", *flags)[2]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "65536"], "port=65536"),
        (["--port", "many"], "port"),
        (["--host", ""], "host=''"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
        (["--max-queue", "0"], "--max-queue=0"),
        (["--request-timeout-s", "0"], "--request-timeout-s=0"),
        (["--request-timeout-s", "nan"], "--request-timeout-s=nan"),
        (["--shutdown-s", "-1"], "--shutdown-s=-1"),
        (["--max-body-bytes", "10"], "--max-body-bytes=10"),
        (["--api-key-env", "NOT_SET_ANYWHERE"], "'NOT_SET_ANYWHERE'"),
        (["--api-key-env", "A", "--api-key-file", "b"], "give one of them"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
        (["--budget", "0"], "--budget='0'"),
        (["--budget", "9999"], "--budget='9999'"),
        (["--drafter", "none"], "drafter='none'"),
        (["--api-key", "secret"], "--api-key"),
        (["--json"], "--json"),
    ],
)
def test_mistakes_are_one_line(refused, served, engine, flags, told):
    loaded_before = engine.config
    assert told in refused("serve", "--port", "0", *flags)
    assert served == []
    assert engine.config is loaded_before


@pytest.mark.parametrize("key", ["", " \n", "two words", "schlüssel", "k" * 513, "a\x00b"])
def test_what_is_no_key_is_refused_and_not_shown(refused, served, tmp_path, key):
    file = tmp_path / "key"
    file.write_text(key, encoding="utf-8")
    line = refused("serve", "--port", "0", "--api-key-file", str(file))
    assert "holds no API key" in line
    assert not key.strip() or key not in line


def test_a_port_in_use_is_refused(refused, served):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert "in use" in refused("serve", "--port", port)


@pytest.mark.parametrize("package", ["fastapi", "prometheus_client", "uvicorn"])
def test_a_missing_package_names_its_install_command(refused, monkeypatch, package):
    for name in [name for name in sys.modules if name.startswith("ddtree.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert f"{package} is not installed" in refused("serve", "--port", "0")
