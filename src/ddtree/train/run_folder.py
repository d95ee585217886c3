"""Where a training run keeps its files."""

from __future__ import annotations

import fcntl
import json
import shlex
from pathlib import Path
from typing import IO, Any

from ddtree.errors import CheckpointError, ConfigError, ModelError, first_line
from ddtree.provenance import command
from ddtree.train.whole_file import write_whole


class RunFolder:
    """The files of one run, by what they hold.

    Attributes:
        data: shards of the corpus.
        generation: figures of its generation.
        checkpoints: drafter and optimiser.
        log, plot: the training log and its picture.
        acceptance: measured at the end.
        texts: the target's answers on which acceptance is measured.
        drafter: the exported drafter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data, self.generation = path / "data", path / "generation.json"
        self.checkpoints, self.log, self.plot = path / "checkpoints", path / "log.csv", path / "log.png"
        self.acceptance, self.drafter = path / "acceptance.json", path / "drafter"
        self.texts = path / "texts"
        self._commands = path / "commands.txt"
        self._lock: IO[str] | None = None

    def begin(self) -> None:
        """Make the folder, take it for this run alone, and note the command line.

        Raises:
            ModelError: it cannot be written.
            ConfigError: another run is at work in it.
        """
        program, *arguments = shlex.split(command())
        name = "ddtree" if Path(program).stem in ("__main__", "ddtree") else program
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")  # held until the process ends
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._commands.open("a", encoding="utf-8") as file:
                file.write(f"{shlex.join([name, *arguments])}\n")
        except BlockingIOError:
            raise ConfigError(
                f"another run is at work in {str(self.path)!r}: wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise ModelError(
                f"the folder {str(self.path)!r} cannot be written: {error.strerror or error}; choose another"
            ) from None

    def end(self) -> None:
        """Let other runs use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def clear_corpus(self) -> None:
        """Delete the corpus and its figures, and nothing else that may lie there."""
        for file in [*self.data.glob("shard-*.safetensors"), self.generation]:
            file.unlink(missing_ok=True)

    def clear_training(self) -> None:
        """Delete checkpoints and what was measured of them."""
        for file in [*self.checkpoints.glob("step-*.pt"), self.acceptance]:
            file.unlink(missing_ok=True)

    def files(self) -> dict[str, Path]:
        """What stands in the folder, by name."""
        found = {
            "corpus": self.data,
            "log": self.log,
            "plot": self.plot,
            "acceptance": self.acceptance,
            "drafter": self.drafter,
        }
        return {name: path for name, path in found.items() if path.exists()}

    def commands(self) -> list[str]:
        """The command lines that worked in this folder, oldest first."""
        return self._commands.read_text(encoding="utf-8").splitlines() if self._commands.exists() else []


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as a whole."""
    write_whole(path, lambda file: file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8"))


def read_json(path: Path) -> Any:
    """What `write_json` wrote; an empty object where there is no file.

    Raises:
        CheckpointError: the file is broken.
    """
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}); delete it") from None
