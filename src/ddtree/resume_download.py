"""Fetches a file of the Python package index such that an interrupted run goes on where it stopped.

pip fetches a file from zero each time, so it is only asked where the file is, with the index and the mirrors
of its settings. The report of a dry run says so too, but many releases of pip download the file for it.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

PIP_TIMEOUT_S = 60
NETWORK_TIMEOUT_S = 15
RETRY_S = 1
MAX_USELESS_ANSWERS = 2
CHUNK_BYTES = 1 << 20
# Sections of pip's settings that bear on a download, the strongest first.
PIP_SECTIONS = (":env:", "download", "global")


class DirectDownloadError(Exception):
    """The file cannot be fetched without pip; the text says why."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Where a file is, and what it must be."""

    url: str
    size_bytes: int
    sha256: str


def find_url(project: str, file_name: str, scratch: Path) -> str:
    """The address from which pip would fetch a file; pip's log goes into the folder `scratch`.

    Raises:
        DirectDownloadError: pip finds no such address, or the file on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="pip-", dir=scratch) as folder:
        log = Path(folder) / "log"
        run_pip("--retries", "0", "--no-cache-dir", "--log", str(log), "index", "versions", project)
        text = log.read_text(encoding="utf-8", errors="replace")
    pattern = rf"Found link (\w+)(://[^\s#?]*/{re.escape(file_name)}(?:\?[^\s#,]*)?)(?=[\s#,])"
    links: list[tuple[str, str]] = re.findall(pattern, text)
    schemes = {scheme for scheme, _ in links}
    if not links:
        raise DirectDownloadError(f"pip names no address of {file_name}")
    if not schemes <= {"http", "https"}:
        raise DirectDownloadError(f"pip finds {file_name} on this machine")
    if "****@" in links[0][1]:
        raise DirectDownloadError("pip's package index needs a password")
    return "".join(links[0])


def run_pip(*arguments: str) -> str:
    """What pip prints."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=PIP_TIMEOUT_S,
            encoding="utf-8", errors="replace",
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DirectDownloadError(f"pip does not answer within {PIP_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR:")]
        raise DirectDownloadError(lines[-1] if lines else f"pip has exit status {error.returncode}") from None


def fetch(file: RemoteFile, part: Path, on_progress: Callable[[int], None]) -> None:
    """Complete `part`, whose bytes so far are kept; `on_progress` is told its size.

    Raises:
        DirectDownloadError: the server cannot be reached, or its file is not the recorded one.
        OSError: `part` cannot be written.
    """
    opener = make_opener(pip_settings())
    # The first time a part of another run may be to blame, the second time only the server's file.
    for _ in range(2):
        fetch_until_whole(opener, file, part, on_progress)
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found == file.sha256:
            return
        part.unlink()
    raise DirectDownloadError(f"the server's file has sha256 {found}, expected {file.sha256}")


def fetch_until_whole(
    opener: OpenerDirector, file: RemoteFile, part: Path, on_progress: Callable[[int], None]
) -> None:
    """Ask for the rest of the file as often as the answers bring some of it."""
    most_bytes = size_of(part)
    num_useless = 0
    while (have_bytes := size_of(part)) < file.size_bytes:
        reason = fetch_rest(opener, file, part, on_progress)
        num_useless = 0 if size_of(part) > most_bytes else num_useless + 1
        if num_useless == MAX_USELESS_ANSWERS:
            raise DirectDownloadError(f"{reason or 'the connection ended'} (at byte {have_bytes})")
        most_bytes = max(most_bytes, size_of(part))
        time.sleep(num_useless * RETRY_S)


def fetch_rest(
    opener: OpenerDirector, file: RemoteFile, part: Path, on_progress: Callable[[int], None]
) -> str:
    """One request for what `part` lacks; returns what ended it early, where that is known."""
    have_bytes = size_of(part)
    request = Request(file.url, headers={"Range": f"bytes={have_bytes}-"} if have_bytes else {})
    try:
        with open_url(opener, request) as response:
            is_rest = (
                response.status == HTTPStatus.PARTIAL_CONTENT
                and response.headers.get("Content-Range", "").startswith(f"bytes {have_bytes}-")
            )  # fmt: skip
            with part.open("ab" if is_rest else "wb") as target:
                for chunk in chunks(response):
                    target.write(chunk)
                    on_progress(target.tell())
                    if target.tell() > file.size_bytes:
                        return "the server's file is too long"
    except ConnectionEndedError as error:
        if error.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)
        return str(error)
    return ""


class ConnectionEndedError(Exception):
    """What the network or the server did; never what the disk did."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.status = error.code if isinstance(error, HTTPError) else None


def open_url(opener: OpenerDirector, request: Request) -> HTTPResponse:
    try:
        response = opener.open(request, timeout=NETWORK_TIMEOUT_S)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise ConnectionEndedError(error) from error
    if not isinstance(response, HTTPResponse):
        raise ConnectionEndedError(HTTPException(f"{request.full_url} leads away from HTTP"))
    return response


def chunks(response: HTTPResponse) -> Iterator[bytes]:
    """The body as it comes in, so that little is lost when the connection breaks."""
    try:
        while chunk := response.read1(CHUNK_BYTES):
            yield chunk
    except (OSError, HTTPException, ValueError) as error:
        raise ConnectionEndedError(error) from error


def make_opener(settings: dict[str, str]) -> OpenerDirector:
    """Opens addresses through pip's proxy with pip's certificates, else those of the environment."""
    cert = settings.get("cert")
    try:
        context = ssl.create_default_context(
            cafile=cert if cert and not Path(cert).is_dir() else None,
            capath=cert if cert and Path(cert).is_dir() else None,
        )
    except OSError as error:
        raise DirectDownloadError(f"pip's certificates in {cert} cannot be read: {error}") from error
    proxy = settings.get("proxy")
    proxies = {"http": proxy, "https": proxy} if proxy else None
    return build_opener(HTTPSHandler(context=context), ProxyHandler(proxies))


def pip_settings() -> dict[str, str]:
    """pip's settings from its files and the environment that bear on a download, by their short names."""
    found: dict[str, dict[str, str]] = {section: {} for section in PIP_SECTIONS}
    for line in run_pip("config", "list").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found and value:
            found[section][name] = value.strip("'\"")
    return found["global"] | found["download"] | found[":env:"]


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
