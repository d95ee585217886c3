"""A download goes on where it stopped, whatever the server does. Only 127.0.0.1 is used."""

import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import pytest

from ddtree import resume_download
from ddtree.resume_download import DirectDownloadError, RemoteFile, fetch, find_url

CONTENT = random.Random(0).randbytes(300_000)
HALF = len(CONTENT) // 2
WHEEL = "toy-1.0-py3-none-any.whl"


@dataclass
class Server:
    """What the local server answers, and which bytes it was asked for."""

    url: str = ""
    content: bytes = CONTENT
    takes_ranges: bool = True
    status: int = 200
    drops_after: list[int] = field(default_factory=list)  # bytes of the body, one entry an answer
    stalls: bool = False
    ranges: list[str | None] = field(default_factory=list)
    end: Event = field(default_factory=Event)

    def answer(self, handler):
        self.ranges.append(handler.headers["Range"])
        start = int(self.ranges[-1].removeprefix("bytes=")[:-1]) if self.ranges[-1] else 0
        start = start if self.takes_ranges else 0
        status = self.status if self.status != 200 else 206 if start else 200
        if start and start >= len(self.content):
            status = 416
        body = self.content[start:] if status in (200, 206) else b""
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        if status == 206:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        handler.end_headers()
        sent = self.drops_after.pop(0) if self.drops_after else len(body)
        handler.wfile.write(body[:sent])
        handler.wfile.flush()
        if self.stalls:
            self.end.wait(30)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(resume_download, "pip_settings", dict)
    monkeypatch.setattr(resume_download, "RETRY_S", 0)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.answer(self)

        def log_message(self, *arguments):
            pass

    with serving(Handler) as url:
        state.url = f"{url}/files/{WHEEL}"
        yield state
        state.end.set()


@contextmanager
def serving(handler):
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def remote(server):
    return RemoteFile(server.url, len(CONTENT), sha256(CONTENT).hexdigest())


def fetch_to(part, server):
    """Fetch, and return the sizes that were told on the way."""
    sizes = []
    fetch(remote(server), part, sizes.append)
    return sizes


def test_whole_file_is_fetched_at_once(server, tmp_path):
    part = tmp_path / "part"
    sizes = fetch_to(part, server)
    assert part.read_bytes() == CONTENT
    assert server.ranges == [None]
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(CONTENT)


def test_only_the_rest_is_asked_for(server, tmp_path):
    part = tmp_path / "part"
    part.write_bytes(CONTENT[:HALF])
    sizes = fetch_to(part, server)
    assert part.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={HALF}-"]
    assert min(sizes) > HALF


def test_whole_part_needs_no_request(server, tmp_path):
    part = tmp_path / "part"
    part.write_bytes(CONTENT)
    assert fetch_to(part, server) == []
    assert server.ranges == []


def test_server_without_ranges_starts_over(server, tmp_path):
    part = tmp_path / "part"
    part.write_bytes(CONTENT[:HALF])
    server.takes_ranges = False
    fetch_to(part, server)
    assert part.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={HALF}-"]


def test_dropped_connection_goes_on(server, tmp_path):
    part = tmp_path / "part"
    server.drops_after = [1000, 500]
    fetch_to(part, server)
    assert part.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-", "bytes=1500-"]


@pytest.mark.parametrize(
    ("takes_ranges", "drops_after", "last_bytes"),
    [(True, [1000, 0, 0], 1000), (False, [1000, 1000, 1000], 1000), (False, [1000, 500, 900], 900)],
)
def test_answers_that_bring_nothing_new_end_it(server, tmp_path, takes_ranges, drops_after, last_bytes):
    part = tmp_path / "part"
    server.takes_ranges = takes_ranges
    server.drops_after = [*drops_after]
    with pytest.raises(DirectDownloadError, match=r"the connection ended \(at byte \d+\)"):
        fetch_to(part, server)
    assert len(server.ranges) == 3
    assert part.read_bytes() == CONTENT[:last_bytes]


def test_stalled_server_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(resume_download, "NETWORK_TIMEOUT_S", 0.2)
    server.drops_after = [1000, 0, 0]
    server.stalls = True
    with pytest.raises(DirectDownloadError, match=r"TimeoutError: .*\(at byte 1000\)"):
        fetch_to(tmp_path / "part", server)
    assert (tmp_path / "part").read_bytes() == CONTENT[:1000]


def test_wrong_part_is_fetched_once_more(server, tmp_path):
    part = tmp_path / "part"
    part.write_bytes(b"x" * HALF)
    fetch_to(part, server)
    assert part.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={HALF}-", None]


@pytest.mark.parametrize("content", [b"y" * len(CONTENT), CONTENT + b"more"])
def test_wrong_file_on_the_server_is_not_kept(server, tmp_path, content):
    server.content = content
    with pytest.raises(DirectDownloadError, match=r"the server's file has sha256 [0-9a-f]{64}, expected"):
        fetch_to(tmp_path / "part", server)
    assert server.ranges == [None, None]
    assert not (tmp_path / "part").exists()


def test_file_that_is_too_long_is_not_fetched_to_its_end(server, tmp_path):
    sizes = []
    server.content = CONTENT + bytes(4 * resume_download.CHUNK_BYTES)
    with pytest.raises(DirectDownloadError, match="the server's file has sha256"):
        fetch(remote(server), tmp_path / "part", sizes.append)
    assert max(sizes) <= len(CONTENT) + resume_download.CHUNK_BYTES


def test_range_that_the_server_does_not_have_starts_over(server, tmp_path):
    part = tmp_path / "part"
    part.write_bytes(CONTENT[:HALF])
    server.content = CONTENT[:HALF]
    with pytest.raises(DirectDownloadError):
        fetch_to(part, server)
    assert server.ranges[:2] == [f"bytes={HALF}-", None]


def test_server_says_no(server, tmp_path):
    server.status = 403
    with pytest.raises(DirectDownloadError, match=r"HTTPError: HTTP Error 403: Forbidden \(at byte 0\)"):
        fetch_to(tmp_path / "part", server)


def test_no_server(server, tmp_path):
    nowhere = RemoteFile("http://127.0.0.1:9/toy.whl", 9, "")
    with pytest.raises(DirectDownloadError, match=r"URLError: .*refused"):
        fetch(nowhere, tmp_path / "part", lambda done_bytes: None)


def test_part_that_cannot_be_written_is_no_network_error(server, tmp_path):
    with pytest.raises(NotADirectoryError):
        fetch_to(Path("/dev/null/part"), server)


def test_killed_process_leaves_a_part_to_go_on_from(server, tmp_path):
    part = tmp_path / "part"
    server.drops_after = [HALF]
    server.stalls = True
    code = (
        "import pathlib, sys\nfrom ddtree import resume_download as r\nr.pip_settings = dict\n"
        f"file = r.RemoteFile(sys.argv[1], {len(CONTENT)}, '')\n"
        "r.fetch(file, pathlib.Path(sys.argv[2]), lambda size: None)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(resume_download.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", code, server.url, str(part)], env=environment)
    while resume_download.size_of(part) == 0:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    have_bytes = resume_download.size_of(part)
    assert 0 < have_bytes <= HALF
    server.stalls = False
    fetch_to(part, server)
    assert part.read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={have_bytes}-"]


INDEX_PAGE = """<!DOCTYPE html><html><body>
<a href="../../files/toy-0.9-py3-none-any.whl">toy-0.9-py3-none-any.whl</a>
<a href="../../files/toy-1.0-py3-none-any.whl#sha256=00">toy-1.0-py3-none-any.whl</a>
</body></html>"""


@pytest.fixture
def index(monkeypatch):
    """A package index that only pip's settings lead to; what was asked of it."""
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_response(200 if self.path == "/simple/toy/" else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(INDEX_PAGE.encode() if self.path == "/simple/toy/" else b"")

        def log_message(self, *arguments):
            pass

    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(Handler) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
        yield url, paths


needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="needs pip")


@needs_pip
def test_pip_says_where_the_file_is_without_fetching_it(index, tmp_path):
    url, paths = index
    assert find_url("toy", WHEEL, tmp_path) == f"{url}/files/{WHEEL}"
    assert set(paths) == {"/simple/toy/"}
    assert list(tmp_path.iterdir()) == []


@needs_pip
def test_file_that_pip_finds_here_is_left_to_pip(index, tmp_path, monkeypatch):
    (tmp_path / WHEEL).write_bytes(b"")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DirectDownloadError, match="on this machine"):
        find_url("toy", WHEEL, tmp_path)


@needs_pip
@pytest.mark.parametrize(
    ("project", "name", "reason"),
    [("toy", "toy-1.1-py3-none-any.whl", "pip names no address"), ("none", WHEEL, "ERROR: No matching")],
)
def test_file_that_pip_does_not_find(index, tmp_path, project, name, reason):
    with pytest.raises(DirectDownloadError, match=reason):
        find_url(project, name, tmp_path)


@needs_pip
def test_settings_of_the_environment_win(index, tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text(
        "[global]\ncert = /a\nproxy = http://a\n[download]\ncert = /b\n[install]\ncert = /c\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    found = resume_download.pip_settings()
    assert (found["cert"], found["proxy"]) == ("/b", "http://a")
    monkeypatch.setenv("PIP_CERT", "/d")
    assert resume_download.pip_settings()["cert"] == "/d"


def fake_log(monkeypatch, line):
    """pip writes this line into its log and does nothing else."""

    def run_pip(*arguments):
        Path(arguments[arguments.index("--log") + 1]).write_text(f"2026-01-01T00:00:00,1   {line}\n")
        return ""

    monkeypatch.setattr(resume_download, "run_pip", run_pip)


@pytest.mark.parametrize("suffix", ["", "#sha256=00", "?key=1", "?key=1#sha256=00"])
@pytest.mark.parametrize("origin", ["", " (from http://a/simple/toy/)"])
def test_address_in_the_log(monkeypatch, tmp_path, suffix, origin):
    fake_log(monkeypatch, f"Found link http://a/{WHEEL}{suffix}{origin}, version: 1.0")
    assert find_url("toy", WHEEL, tmp_path) == f"http://a/{WHEEL}{suffix.partition('#')[0]}"


@pytest.mark.parametrize("suffix", [".metadata", "x"])
def test_address_of_another_file(monkeypatch, tmp_path, suffix):
    fake_log(monkeypatch, f"Found link http://a/{WHEEL}{suffix}, version: 1.0")
    with pytest.raises(DirectDownloadError, match="pip names no address"):
        find_url("toy", WHEEL, tmp_path)


def test_address_with_a_hidden_password_is_left_to_pip(monkeypatch, tmp_path):
    fake_log(monkeypatch, f"Found link http://me:****@a/{WHEEL} (from http://a/simple), version: 1.0")
    with pytest.raises(DirectDownloadError, match="needs a password"):
        find_url("toy", WHEEL, tmp_path)


def test_slow_pip_is_given_up(monkeypatch):
    monkeypatch.setattr(resume_download, "PIP_TIMEOUT_S", 0.01)
    with pytest.raises(DirectDownloadError, match=r"pip does not answer within 0\.01 s"):
        resume_download.run_pip("--version")


def test_unreadable_certificates_are_named(tmp_path):
    with pytest.raises(DirectDownloadError, match=r"pip's certificates in .*no\.pem cannot be read"):
        resume_download.make_opener({"cert": str(tmp_path / "no.pem")})


def test_proxy_of_pip_is_used(server, tmp_path, monkeypatch):
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    proxy = server.url.partition("/files")[0]
    monkeypatch.setattr(resume_download, "pip_settings", lambda: {"proxy": proxy})
    away = RemoteFile("http://index.invalid/toy.whl", len(CONTENT), sha256(CONTENT).hexdigest())
    fetch(away, tmp_path / "part", lambda done_bytes: None)
    assert (tmp_path / "part").read_bytes() == CONTENT
