"""The errors that `ddtree` raises on purpose.

    DDTreeError
    ├── ConfigError               a setting or request field with a value that is not allowed
    │   └── ContextLengthError    a prompt or request that does not fit the context
    ├── ModelError                a model that cannot be used
    │   ├── ModelNotFoundError    a name or path that leads to no model
    │   ├── CheckpointError       files that are missing, broken or of the wrong kind
    │   ├── DrafterMismatchError  a drafter that does not fit its target
    │   └── UnsupportedModelError an architecture that draft trees cannot be used with
    └── MissingExtraError         an optional dependency that is not installed

Each message says what is wrong, the value, what is allowed and what to do.
"""

MAX_SHOWN = 200  # characters of a value in a message


class DDTreeError(Exception):
    """Base of all errors that are the caller's to fix; the command line prints it in one line."""


class ConfigError(DDTreeError, ValueError):
    """A setting or request field has a value that is not allowed."""


class ContextLengthError(ConfigError):
    """A prompt, or prompt plus new tokens, does not fit the context."""


class ModelError(DDTreeError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError):
    """A name or path leads to no model, here or where it could be downloaded from."""


class CheckpointError(ModelError):
    """A checkpoint's files are missing, broken or of another kind."""


class DrafterMismatchError(ModelError):
    """A drafter does not fit the target it should draft for."""


class UnsupportedModelError(ModelError):
    """An architecture cannot be used with draft trees here."""


class MissingExtraError(DDTreeError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; install it with: pip install 'sglang-ddtree[{extra}]'")


def short_repr(value: object) -> str:
    """A value as an error message shows it: cut short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        return "a number beyond all limits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def counted(number: int, noun: str) -> str:
    """A number and its noun, as a message says it."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(error: Exception) -> str:
    """What another library's error says, in one line: with the next line after a colon, or its name.

    A `KeyError` says only the key, so its name goes before.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text
