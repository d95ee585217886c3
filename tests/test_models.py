"""Names lead to folders here, or to an error that says what to do. No network is used."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree import models
from ddtree.errors import CheckpointError, ModelError, ModelNotFoundError


def raises(error):
    def function(*args, **kwargs):
        raise error

    return function


def test_known_name_is_prepared(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "prepare", lambda package: tmp_path / package.name)
    assert models.resolve_target("smollm2-135m") == tmp_path / "smollm2-135m"


def test_local_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve_target(str(tmp_path)) == tmp_path
    assert models.resolve_drafter(str(tmp_path), "smollm2-135m") == tmp_path


def test_local_path_that_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        models.resolve_target(str(tmp_path))
    (tmp_path / "a.gguf").write_text("")
    with pytest.raises(CheckpointError, match="is a file: give the folder"):
        models.resolve_target(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing-folder", "a/b/c"])
def test_path_that_is_missing_is_not_looked_up(name, monkeypatch):
    monkeypatch.setattr(models, "download_from_hub", raises(AssertionError("looked up")))
    with pytest.raises(ModelNotFoundError, match=r"no such folder; give a known name \(smollm2-135m\)"):
        models.resolve_target(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("~nosuchuser/model", "'~nosuchuser/model': no home folder is known for the part with ~; write the"),
        ("x" * 300, "File name too long; give a known name"),
    ],
)
def test_path_that_cannot_be_looked_at_is_refused(name, words):
    with pytest.raises(ModelNotFoundError, match=words):
        models.resolve_target(name)


def test_path_without_permission_is_refused(monkeypatch):
    error = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(models.Path, "is_dir", raises(error))
    with pytest.raises(ModelNotFoundError, match="'/locked/model': Permission denied; give a known name"):
        models.resolve_target("/locked/model")


def test_shipped_drafter_is_found():
    for target in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        drafter = models.resolve_drafter("auto", target)
        config = json.loads((drafter / "config.json").read_text())
        assert config["architectures"] == ["DFlashDraftModel"]
        assert config["block_size"] == 16


def test_no_drafter():
    assert models.resolve_drafter("none", "anything") is None


def test_no_shipped_drafter_for_another_target():
    with pytest.raises(
        ModelNotFoundError, match="no drafter ships for 'my/model', only for smollm2-135m; name a"
    ):
        models.resolve_drafter("auto", "my/model")


@pytest.fixture
def hub(monkeypatch):
    """Sets what the hub's download does."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    return lambda function: monkeypatch.setattr(huggingface_hub, "snapshot_download", function)


def test_hub_name_is_downloaded_without_other_formats(hub, tmp_path):
    calls = []

    def snapshot(name, allow_patterns):
        calls.append((name, allow_patterns))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    hub(snapshot)
    assert models.resolve_target("org/model") == tmp_path
    assert calls[0][0] == "org/model"
    assert "*.safetensors" in calls[0][1]
    assert not {"*", "*.bin"} & set(calls[0][1])


@pytest.mark.parametrize("error", [ConnectionError("offline"), TimeoutError("slow"), OSError("cut")])
def test_unreachable_hub_says_what_to_do(hub, error):
    hub(raises(error))
    with pytest.raises(
        ModelNotFoundError,
        match=r"'smollm2-136m' is no folder here, and the Hugging Face hub cannot be reached "
        r"\(\w+\); did you mean smollm2-135m\?; give a known name \(smollm2-135m\), or a folder",
    ):
        models.resolve_target("smollm2-136m")


def test_name_that_cannot_be_one_of_the_hub():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ModelNotFoundError, match="is no folder here and no model of the Hugging Face hub"):
        models.resolve_target("no good name!")


def test_full_disk_is_no_network_error(hub):
    hub(raises(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ModelError, match="no space is left on the disk"):
        models.resolve_target("org/model")


def test_hub_snapshot_without_config_is_refused(hub, tmp_path):
    hub(lambda name, allow_patterns: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        models.resolve_target("org/model")


def test_offline_hub_answers_at_once(tmp_path):
    pytest.importorskip("huggingface_hub")
    code = (
        "from ddtree import ModelNotFoundError\nfrom ddtree.models import resolve_target\n"
        "try:\n    resolve_target('org/model')\nexcept ModelNotFoundError as error:\n    print(error)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(models.__file__).parents[1]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert "'org/model' is no folder here, and the Hugging Face hub cannot be reached" in result.stdout
