"""Where the API key comes from: an environment variable or a file, never the command line."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ddtree.config import ServerConfig
from ddtree.errors import ConfigError

MAX_KEY_CHARACTERS = 512


def load_api_key(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key that the settings name, or None where they name none.

    Raises:
        ConfigError: the variable is not set, the file cannot be read, or what they hold is no key.
    """
    if config.api_key_env:
        key = environment.get(config.api_key_env)
        if key is None:
            raise ConfigError(f"the environment variable {config.api_key_env!r} of --api-key-env is not set")
        return _checked(key, f"environment variable {config.api_key_env!r}")
    if config.api_key_file:
        try:
            key = Path(config.api_key_file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text"
            raise ConfigError(f"--api-key-file {config.api_key_file!r} cannot be read: {reason}") from None
        return _checked(key, f"file {config.api_key_file!r}")
    return None


def _checked(text: str, source: str) -> str:
    key = text.strip()
    if not key or len(key) > MAX_KEY_CHARACTERS or not (key.isascii() and key.isprintable()) or " " in key:
        # The key itself stays out of the message.
        raise ConfigError(
            f"the {source} holds no API key: from 1 to {MAX_KEY_CHARACTERS} printable ASCII characters "
            "without spaces are allowed"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def exposure_warnings(config: ServerConfig, api_key: str | None) -> list[str]:
    """What about the settings lets in more people than was perhaps meant."""
    warnings = []
    if api_key is None and not is_loopback(config.host):
        warnings.append(
            f"everyone who reaches {config.host} can use this server: give an API key "
            "(--api-key-env or --api-key-file), or listen on 127.0.0.1"
        )
    if config.api_key_file:
        mode = stat.S_IMODE(Path(config.api_key_file).stat().st_mode)
        if mode & 0o077:
            warnings.append(f"{config.api_key_file} has mode {mode:04o}, so others can read it: chmod 600 it")
    return warnings
