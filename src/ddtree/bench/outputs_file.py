"""Finished outputs of a run, in the form that `ddtree replay` reads (docs/compare.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddtree.bench.measure import Answer
from ddtree.bench.plan import Group
from ddtree.bench.run_format import Arm
from ddtree.bench_config import EMBEDDED, SGLANG
from ddtree.config import Mode, check
from ddtree.errors import ConfigError, short_repr

FINISHES = ("stop", "length", "cancel", "abort")
BEGIN = b'{"prompt_tokens":['  # of each line that is written here


@dataclass(slots=True)
class OutputsFile:
    """Appends the outputs of cells; of several engines a file each, since a file is of one engine.

    Attributes:
        path: of the one engine, or what the names of the files are made from.
        model: the target's name.
        num_left_out: outputs whose token ids are not known.
    """

    path: Path
    engines: Sequence[str]
    model: str
    num_left_out: int = field(default=0, init=False)

    def begin(self, *, is_resumed: bool) -> None:
        """Make sure that outputs can be appended; a last line that broke off is cut.

        Raises:
            ConfigError: a file is there though the run is new, or cannot be written.
        """
        for path in self.paths:
            if not is_resumed and path.exists() and path.stat().st_size:
                raise ConfigError(
                    f"outputs={short_repr(str(path))} is not allowed: it is there already, of another run; "
                    "name another file"
                )
            self._write(path, b"")
            check(path.is_file(), "outputs", str(path), "a file, not a device")
            data = path.read_bytes()
            check(
                data.startswith(BEGIN) or BEGIN.startswith(data),
                "outputs", str(path), "a file of finished outputs, which this one is not", "name another",
            )  # fmt: skip
            if not data.endswith(b"\n"):
                with path.open("r+b") as file:
                    file.truncate(data.rfind(b"\n") + 1)

    @property
    def paths(self) -> list[Path]:
        """The files of all engines."""
        return [self.path_of(engine) for engine in self.engines]

    def path_of(self, engine: str) -> Path:
        """The file of an engine, such as `outputs-sglang.jsonl`; with one engine `path` itself."""
        if len(self.engines) == 1:
            return self.path
        parts = urlsplit(engine)
        short = f"{parts.hostname}-{parts.port or parts.scheme}" if parts.hostname else engine
        return self.path.with_name(f"{self.path.stem}-{short}{self.path.suffix}")

    def add(
        self, arm: Arm, group: Group, answers: Sequence[Answer], sampling: Sequence[Mapping[str, Any]],
        dtype: str | None,
    ) -> None:  # fmt: skip
        """Append a cell's outputs; those without token ids are counted and left out.

        Args:
            sampling: parameters of each answer's request.
            dtype: the target's number format, where it is known.

        Raises:
            ConfigError: the file cannot be written.
        """
        facts = self._facts(arm, group) | ({} if dtype is None else {"dtype": dtype})
        lines = []
        for answer, parameters in zip(answers, sampling, strict=True):
            if answer.tokens and answer.prompt:
                lines.append(_line(answer, parameters) | facts)
            else:
                self.num_left_out += 1
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        self._write(self.path_of(arm.engine), text.encode("ascii"))

    def _facts(self, arm: Arm, group: Group) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "engine": EMBEDDED if arm.engine == EMBEDDED else SGLANG,
            "model": self.model,
            "prompt_set": group.prompt_set,
            "concurrency": group.concurrency,
            "repeat": group.repeat,
        }
        if arm.mode is not None:
            facts["mode"] = arm.mode.value
        if arm.mode is Mode.TREE:
            facts["node_budget"] = arm.node_budget
        return facts

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise ConfigError(
                f"the outputs {short_repr(str(path))} cannot be written: {error.strerror}"
            ) from error


def _line(answer: Answer, sampling: Mapping[str, Any]) -> dict[str, Any]:
    line = {"prompt_tokens": answer.prompt, "tokens": answer.tokens, "sampling": sampling}
    return line | ({"finish_reason": answer.finish_reason} if answer.finish_reason in FINISHES else {})
