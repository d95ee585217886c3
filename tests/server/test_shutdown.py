"""How a server ends: signals, what becomes of streams, exit codes; and what comes over raw connections."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from ddtree.config import ServerConfig
from ddtree.errors import ConfigError
from ddtree.server.exchange import sse
from ddtree.server.listen import bind, serve
from server_kit import MAX_CONTEXT, HeldEngine, live_server, sample, wait_for, write_pair

SOURCE = Path(__file__).parents[2] / "src"
READY = re.compile(r"(\S+) at (http://\S+), one request at a time")
LONG = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def start_process(pair):
    """Start `ddtree serve` on the tiny pair; returns the process and the server's address."""
    processes = []

    def start(*flags, **environment):
        target, drafter = pair
        command = [
            sys.executable, "-m", "ddtree", "serve", "--port", "0", "--model", str(target),
            "--drafter", str(drafter), "--device", "cpu", "--dtype", "float32", "--threads", "1",
            "--max-context", str(MAX_CONTEXT), "--budget", "4", *flags,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"} | environment,
        )  # fmt: skip
        processes.append(process)
        lines = []
        for line in process.stderr:
            lines.append(line)
            if ready := READY.match(line):
                return process, ready[2], lines
        raise AssertionError("".join(lines))

    yield start
    for process in processes:
        process.kill()
        process.wait(10)
        process.stderr.close()


@contextlib.contextmanager
def a_stream(url, seen, begun, headers=None):
    """A client that reads a long answer in a thread of its own; `seen` gets the events."""

    def read():
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    seen.append(line.removeprefix("data: "))
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    yield
    thread.join(60)
    assert not thread.is_alive()


def text_of(events):
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def until_refused(url):
    """What a new request gets once the signal has arrived."""
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 503, "the signal to arrive")
    return httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})


def test_a_process_finishes_its_stream_at_sigterm(start_process):
    process, url, _ = start_process("--shutdown-s", "60", "--verbose")
    whole = httpx.post(f"{url}/v1/completions", json=LONG | {"stream": False}, timeout=60)
    seen = []
    with a_stream(url, seen, threading.Event()):
        process.send_signal(signal.SIGTERM)
        refused = until_refused(url)
    assert seen[-1] == "[DONE]"
    assert text_of(seen[:-1]) == whole.json()["choices"][0]["text"]
    assert refused.json()["error"]["code"] == "shutting_down"
    assert refused.headers["retry-after"] == "10"
    assert process.wait(30) == 0
    log = process.stderr.read()
    assert f"{whole.headers['x-request-id']} POST '/v1/completions': 200" in log
    assert "SIGTERM: no more requests are taken; 1 inside get 60 s to finish" in log
    assert "Traceback" not in log


def test_a_process_cuts_its_stream_short_with_an_error(start_process):
    process, url, _ = start_process("--shutdown-s", "0", "--api-key-env", "A_KEY", A_KEY="very-secret")
    assert httpx.get(f"{url}/v1/models").status_code == 401
    seen, headers = [], {"Authorization": "Bearer very-secret"}
    with a_stream(url, seen, threading.Event(), headers):
        process.send_signal(signal.SIGINT)
    *chunks, error, done = seen
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "shutting_down"
    assert chunks
    assert process.wait(30) == 130
    log = process.stderr.read()
    assert "Traceback" not in log
    assert "very-secret" not in log


def test_a_second_signal_does_not_wait(tiny_engine_of_server):
    with live_server(tiny_engine_of_server, shutdown_s=600.0) as live:
        seen = []
        with a_stream(live.url, seen, threading.Event()):
            live.engine.may_run.clear()
            live.server.handle_exit(signal.SIGTERM, None)
            until_refused(live.url)
            live.server.handle_exit(signal.SIGTERM, None)
        assert json.loads(seen[-2])["error"]["code"] == "shutting_down"
        assert live.server.exit_signal == signal.SIGTERM


def test_time_that_runs_out_ends_what_is_inside(tiny_engine_of_server):
    with live_server(tiny_engine_of_server, shutdown_s=0.2) as live:
        seen = []
        with a_stream(live.url, seen, threading.Event()):
            live.engine.may_run.clear()
            live.server.handle_exit(signal.SIGTERM, None)
        assert json.loads(seen[-2])["error"]["code"] == "shutting_down"


def test_raw_connections(tiny_engine_of_server):
    """What no HTTP library would send: nonsense, half a request, a chunked body without end."""
    with live_server(tiny_engine_of_server, max_body_bytes=2000) as live:
        address = ("127.0.0.1", int(live.url.rpartition(":")[2]))
        for nonsense in (
            b"\x16\x03\x01\x02\x00\r\n\r\n",
            b"GET\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        ):
            assert say(address, nonsense).startswith(b"HTTP/1.1 400"), nonsense
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
        assert say(address, head + chunk + chunk).startswith(b"HTTP/1.1 413")
        with socket.create_connection(address, 10) as half:
            half.sendall(head + b"10\r\n{")
        assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
        wait_for(lambda: cancelled(live) == 1, "the half request to be counted")


def cancelled(live):
    return sample(live.service, "requests_total", endpoint="completions", outcome="cancelled")


def say(address, data):
    with socket.create_connection(address, 10) as connection:
        connection.sendall(data)
        return connection.recv(1000)


def test_of_two_servers_on_one_port_the_second_says_so(tiny_engine_of_server):
    """Both may bind while neither listens, since a port is to be free again at once after its server."""
    first = bind(ServerConfig(port=0))
    config = ServerConfig(port=first.getsockname()[1])
    with first, bind(config) as second:
        first.listen()
        with pytest.raises(ConfigError, match="cannot be listened on: Address already in use"):
            serve(HeldEngine(tiny_engine_of_server), config, None, second, print)


def test_events_are_lines_to_clients_that_split_at_every_kind_of_line_end():
    event = sse({"text": "a\u2028b\u2029c\x85d\né"})
    assert event.decode().splitlines() == [event.decode().strip(), ""]
    assert json.loads(event.removeprefix(b"data: ")) == {"text": "a\u2028b\u2029c\x85d\né"}
