"""Text files of an SGLang that is not imported: in a folder, or in a wheel."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.contract_ast import PACKAGE
from ddtree.sglang_plugin.contract_rules import Version, parse_version

# Folders below a given one in which the package may lie: the folder itself, and a git checkout's.
ROOTS = ("", "python")
WANTED = "a wheel of sglang, or a folder that holds sglang/"
METADATA = ".dist-info/METADATA"


class SourceFiles(Protocol):
    """Text files below the folder that holds the package.

    Attributes:
        where: the wheel, or the package's own folder.
    """

    where: str

    def read(self, name: str) -> str | None:
        """A file's text by its path with "/", or None where there is no such file.

        Raises:
            ConfigError: the file is there and cannot be read.
        """

    def metadata(self) -> str | None:
        """The text of METADATA of the package's newest distribution, or None."""


class FolderFiles:
    """A site-packages folder, an unpacked wheel or a source tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder / PACKAGE)

    def read(self, name: str) -> str | None:
        path = self.folder / name
        try:
            return decode(path.read_bytes(), str(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(f"SGLang's file {str(path)!r} cannot be read: {error.strerror}") from None

    def metadata(self) -> str | None:
        found = self.folder.glob(f"{PACKAGE}-*{METADATA}")
        name = newest_metadata(path.relative_to(self.folder).as_posix() for path in found)
        return self.read(name) if name else None


class WheelFiles:
    """A wheel, read without unpacking it.

    Raises:
        ConfigError: the file is no wheel.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            self.archive = zipfile.ZipFile(path)
        except Exception as error:  # what zipfile raises depends on where the archive is damaged
            told = " (an incomplete download?)" if is_cut_off(path) else ""
            reason = f"{error or type(error).__name__}{told}"
            raise ConfigError(f"{str(path)!r} cannot be read as a wheel: {reason}; give {WANTED}") from None
        self.names = set(self.archive.namelist())

    def read(self, name: str) -> str | None:
        if name not in self.names:
            return None
        try:
            data = self.archive.read(name)
        except Exception as error:  # what zipfile raises depends on how the member is damaged or packed
            raise ConfigError(
                f"the wheel {self.where!r} is damaged: its member {name} cannot be read: "
                f"{error or type(error).__name__}; download it again"
            ) from None
        return decode(data, f"{self.where}/{name}")

    def metadata(self) -> str | None:
        name = newest_metadata(name for name in self.names if name.endswith(METADATA))
        return self.read(name) if name else None


def open_files(path: Path) -> SourceFiles:
    """The files of a wheel, site-packages, an unpacked wheel, a source tree or `sglang/` itself.

    Raises:
        ConfigError: there is no such file or folder, it cannot be read, or no SGLang is in it.
    """
    mode = file_mode(path)
    if mode is None:
        raise ConfigError(f"{str(path)!r} does not exist: give {WANTED}")
    if stat.S_ISREG(mode):
        files = WheelFiles(path)
        if files.read(f"{PACKAGE}/__init__.py") is None:
            raise ConfigError(f"the wheel {str(path)!r} has no {PACKAGE}/ in it: give {WANTED}")
        return files
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{str(path)!r} is neither a file nor a folder: give {WANTED}")
    whole = path.absolute()
    folders = [path / root for root in ROOTS] + [whole.parent] * (whole.name == PACKAGE)
    for folder in folders:
        if stat.S_ISDIR(file_mode(folder / PACKAGE / "srt") or 0):
            return FolderFiles(folder)
    raise ConfigError(f"no SGLang was found in the folder {str(path)!r}: give {WANTED}")


def file_mode(path: Path) -> int | None:
    """What kind of file a path leads to, as `stat` tells it, or None where there is none.

    Raises:
        ConfigError: a folder on the way cannot be entered, the path is too long, or the like.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}; give {WANTED}") from None


def is_cut_off(path: Path) -> bool:
    """Whether a file that is no whole archive starts as one, or is empty."""
    try:
        with path.open("rb") as file:
            return file.read(2) in (b"", b"PK")
    except OSError:
        return False


def decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"SGLang's file {name!r} is no UTF-8 text: {error}") from None


def newest_metadata(names: Iterable[str]) -> str | None:
    """Of paths of METADATA files, that of the newest release, or None."""
    return max(names, key=metadata_version, default=None)


def metadata_version(name: str) -> tuple[Version, str]:
    version = name.removesuffix(METADATA).rpartition("-")[2]
    return parse_version(version), version
