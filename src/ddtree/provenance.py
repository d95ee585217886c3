"""Where a figure comes from: versions, machine, commit and command of the run that made it."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "sglang")
SOURCE = Path(__file__).parent


def provenance() -> dict[str, Any]:
    """What a results file says about its run, ready for JSON; neither host nor user names are in it."""
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "ddtree": {"version": package_version("sglang-ddtree"), **source_state()},
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "machine": machine(),
    }


def command() -> str:
    """The command line, with paths below the working directory made relative to it."""
    here = f"{Path.cwd()}{os.sep}"
    return shlex.join(argument.removeprefix(here) for argument in sys.argv)


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def source_state() -> dict[str, Any]:
    """Commit of the source tree and whether tracked files differ from it; None outside a git checkout."""
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": None if commit is None else bool(changes)}


def git(*arguments: str) -> str | None:
    if not (SOURCE.parents[1] / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory and, where torch is loaded, its threads and GPUs."""
    return {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **torch_state(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def torch_state() -> dict[str, Any]:
    """Threads and GPUs of the torch that the run uses; nothing where it uses none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"threads": torch.get_num_threads(), "cuda": torch.version.cuda, "gpus": gpus}
