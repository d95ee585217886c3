"""The plugin's settings, from the environment variable DDTREE_CONFIG or the file ddtree.toml."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ddtree.config import Mode, PluginConfig
from ddtree.errors import ConfigError, short_repr

VARIABLE = "DDTREE_CONFIG"
FILE_NAME = "ddtree.toml"
TABLE = "sglang"
EXAMPLE = """DDTREE_CONFIG='{"node_budget": 31}'"""


@cache
def plugin_config() -> PluginConfig:
    """The settings of this process, read once (`ConfigError` as `load_config`)."""
    return load_config(os.environ, Path.cwd())


def load_config(environ: Mapping[str, str], cwd: Path) -> PluginConfig:
    """The settings that `DDTREE_CONFIG` gives, as JSON text or as the path of a .json or .toml file, else
    those of the table [sglang] of `ddtree.toml` in `cwd`, else the defaults.

    Raises:
        ConfigError: a file that is missing or cannot be parsed, an unknown setting, a value not allowed.
    """
    given = environ.get(VARIABLE, "").strip()
    try:
        if given.startswith("{"):
            return config_from(parse_json(given, VARIABLE), VARIABLE)
        if given:
            return config_from(read_file(cwd / expand_home(given), VARIABLE), printable(given))
        # A link to nowhere or a folder of that name is a mistake to tell, not a file that is not there.
        if os.path.lexists(path := cwd / FILE_NAME):
            return config_from(read_file(path, FILE_NAME), f"[{TABLE}] of {printable(path)}")
    except RecursionError:
        where = VARIABLE if given else FILE_NAME
        raise ConfigError(f"{where} is nested too deeply: its settings are one flat table") from None
    return PluginConfig()


def pin_config(config: PluginConfig, environ: MutableMapping[str, str]) -> None:
    """Write the settings out in `DDTREE_CONFIG`, so that processes started from here read the same ones even
    if a file has changed since."""
    environ[VARIABLE] = json.dumps(asdict(config))


def config_from(values: Any, where: str) -> PluginConfig:
    """Settings from parsed values; `where` names their place in an error."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} holds {short_repr(values)}, not a table of settings; write {EXAMPLE}")
    names = [field.name for field in fields(PluginConfig)]
    if unknown := sorted(set(values) - set(names)):
        told = ", ".join(map(short_repr, unknown))
        raise ConfigError(f"{where}: unknown setting {told}; known are {', '.join(names)}")
    try:
        config = PluginConfig(**values)
        return replace(config, mode=Mode(config.mode))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_file(path: Path, where: str) -> Any:
    """What a settings file holds: all of a .json, the table [sglang] of a .toml."""
    if path.suffix not in (".json", ".toml"):
        raise ConfigError(
            f"{where}={str(path)!r} is neither JSON text nor the path of a .json or .toml file; "
            f"write {EXAMPLE}"
        )
    if path.suffix == ".json":
        return parse_json(read_text(path, where), printable(path))
    tables = parse_toml(path, where)
    if TABLE not in tables:
        raise ConfigError(
            f"{printable(path)} has no table [{TABLE}]; put the settings below a line [{TABLE}]"
        )
    return tables[TABLE]


def expand_home(given: str) -> Path:
    """The path that was given, a leading ~ or ~user replaced by that home folder."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{VARIABLE}={short_repr(given)} names no home folder: {error}; write the path out"
        ) from None


def printable(path: str | Path) -> str:
    """A path as an error shows it; with escapes where some output could not take it."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def read_text(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: text that is no UTF-8, a path with a NUL byte
        raise ConfigError(f"{where}: {printable(path)} cannot be read: {error}") from None


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # JSONDecodeError too; a number of too many digits is a plain one
        raise ConfigError(f"{where} is no valid JSON: {error}; write {EXAMPLE}") from None


def parse_toml(path: Path, where: str) -> dict[str, Any]:
    text = read_text(path, where)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError too; a number of too many digits is a plain one
        raise ConfigError(f"{printable(path)} is no valid TOML: {error}") from None
