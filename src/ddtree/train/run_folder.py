"""Where a training run keeps its files."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from ddtree.errors import ModelError
from ddtree.provenance import command


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

    def begin(self) -> None:
        """Make the folder and note the command line; raises `ModelError` if it cannot be written."""
        program, *arguments = shlex.split(command())
        name = "ddtree" if Path(program).stem in ("__main__", "ddtree") else program
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._commands.open("a", encoding="utf-8") as file:
                file.write(f"{shlex.join([name, *arguments])}\n")
        except OSError as error:
            raise ModelError(
                f"the folder {str(self.path)!r} cannot be written: {error.strerror or error}; choose another"
            ) from None

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
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; an empty object where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
