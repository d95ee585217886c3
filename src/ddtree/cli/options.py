"""Command-line flags made from the fields of settings classes.

A command names a settings class once, as `sampling: Annotated[SamplingParams, Panel(...)]`; names,
types, help texts and defaults of its flags come from the class's fields, and so does the validation.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from ddtree.config import Mode, check, setting
from ddtree.errors import ConfigError, short_repr

FLAG_NAMES = {
    "as_json": ("--json",),
    "budgets": ("--budget",),
    "engines": ("--engine",),
    "max_context_tokens": ("--max-context",),
    "modes": ("--mode",),
    "quiet": ("--quiet", "-q"),
    "sets": ("--set",),
    "stop_token_ids": ("--stop-token-id",),
    "temperatures": ("--temperature",),
    "verbose": ("--verbose", "-v"),
}
METAVARS = {
    "budgets": "N,...",
    "concurrency": "N,...",
    "dtype": "NAME",
    "engines": "NAME,...",
    "logit_bias": "ID=VALUE",
    "modes": "NAME,...",
    "sets": "NAME,...",
    "stop": "TEXT",
    "stop_token_ids": "ID",
    "temperatures": "X,...",
}

ModeFlag = Annotated[
    Mode, typer.Option(help="one token a pass, a drafted chain or a drafted tree", rich_help_panel="Decoding")
]
BudgetFlag = Annotated[
    str,
    typer.Option(
        help="nodes of the tree, root not counted; auto picks by measured cost and acceptance",
        metavar="N|auto",
        rich_help_panel="Decoding",
    ),
]


@dataclass(frozen=True, slots=True)
class Output:
    """What a command writes and where."""

    as_json: bool = setting(False, "write one JSON object to standard output")
    quiet: bool = setting(False, "nothing but errors on standard error")
    verbose: bool = setting(False, "log the engine's decisions to standard error")

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose are both given: give one of them")


@dataclass(frozen=True, slots=True)
class Panel:
    """Marks a parameter whose fields become flags.

    Attributes:
        title: heading of these flags in the help page.
        defaults: an instance of the settings class; its values are the flags' defaults.
        only: fields that become flags; empty means all.
        titles: headings of fields that do not stand under `title`.
    """

    title: str
    defaults: Any
    only: tuple[str, ...] = ()
    titles: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> Iterable[Field[Any]]:
        return [spec for spec in fields(self.defaults) if not self.only or spec.name in self.only]

    def types(self) -> dict[str, Any]:
        return typing.get_type_hints(type(self.defaults))


def expand_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each `Panel` parameter replaced by one flag a field, for typer to read.

    Typer calls commands with keywords only; the flags' values are put back into their settings class,
    whose `ConfigError` is the message for a value that is not allowed, with the flag for the field's name.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    panels = {name: panel for name, parameter in parameters.items() if (panel := _panel_of(parameter))}
    flags: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        expanded = _panel_flags(panels[name]) if name in panels else [parameter]
        flags += [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in expanded]

    names = {name: flag for parameter in flags for name, flag in _flag_names(parameter)}

    def run(**values: Any) -> None:
        plain = {name: values[name] for name in parameters if name not in panels}
        try:
            command(**plain, **{name: _read_settings(panel, values) for name, panel in panels.items()})
        except ConfigError as error:
            error.args = (with_flag(str(error), names),)
            raise

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    # typer reads the flags from here; functions have no such attribute for mypy.
    run.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    return run


def with_flag(message: str, names: Mapping[str, str]) -> str:
    """The message of a value that is not allowed, `field=...`, as of the flag that the user gave."""
    field_name, equals, rest = message.partition("=")
    return names.get(field_name, field_name) + equals + rest


def _flag_names(parameter: inspect.Parameter) -> Iterable[tuple[str, str]]:
    """What a parameter with a flag may be called in messages, and the flag."""
    option = next(iter(getattr(parameter.annotation, "__metadata__", ())), None)
    if isinstance(option, OptionInfo):
        dashed = f"--{parameter.name.replace('_', '-')}"
        # Inside Annotated typer takes what stands first, its default elsewhere, as a name.
        given = [name for name in (option.default, *(option.param_decls or ())) if isinstance(name, str)]
        flag = next((name.strip(" /") for name in given if "--" in name), dashed)
        yield parameter.name, flag
        yield flag.removeprefix("--").replace("-", "_"), flag


def given_flags(context: typer.Context) -> dict[str, str]:
    """The flags that stand on the command line, by the parameter that each of them sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return {
        parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name in given
    }


def refuse_unread(given: Mapping[str, str], unread: Container[str], why: str) -> None:
    """Raise `ConfigError` for flags that would change nothing.

    Args:
        given: flags of the command line by parameter, see `given_flags`.
        unread: parameters that nothing reads.
        why: where that is so, such as "without --gpu".
    """
    flags = [flag for name, flag in given.items() if name in unread]
    if flags:
        are = "is" if len(flags) == 1 else "are"
        raise ConfigError(f"{', '.join(flags)} {are} not read {why}: leave out what is not read")


def _panel_of(parameter: inspect.Parameter) -> Panel | None:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, Panel)), None)


def _panel_flags(panel: Panel) -> list[inspect.Parameter]:
    types = panel.types()
    return [_flag(spec, types[spec.name], panel) for spec in panel.fields()]


def _flag(spec: Field[Any], kind: Any, panel: Panel) -> inspect.Parameter:
    default = getattr(panel.defaults, spec.name)
    dashed = spec.name.replace("_", "-")
    # A switch that is on has only the flag that turns it off; typer writes such a flag after a slash.
    names = (f" /--no-{dashed}",) if default is True else FLAG_NAMES.get(spec.name, (f"--{dashed}",))
    option = typer.Option(
        *names,
        help=f"do not {spec.metadata['help']}" if default is True else spec.metadata["help"],
        metavar=METAVARS.get(spec.name),
        rich_help_panel=panel.titles.get(spec.name, panel.title),
        show_default=default is not True,
    )
    if _is_one_text(kind, default):
        kind, default = str, ",".join(map(str, default))
    elif get_origin(kind) in (tuple, Mapping):
        default = []
    return inspect.Parameter(
        spec.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[_flag_type(kind), option],
    )


def _is_one_text(kind: Any, default: Any) -> bool:
    """Whether a list is given as one text with commas: one that has values where none are given."""
    return get_origin(kind) is tuple and bool(default)


def _flag_type(kind: Any) -> Any:
    if get_origin(kind) is tuple:
        # A type made at run time, which mypy does not take as one.
        return list[get_args(kind)[0]]  # type: ignore[misc]
    return list[str] if get_origin(kind) is Mapping else kind


def _read_settings(panel: Panel, values: Mapping[str, Any]) -> Any:
    types = panel.types()
    read = {spec.name: _read_value(spec.name, types[spec.name], values[spec.name]) for spec in panel.fields()}
    return replace(panel.defaults, **read)


def _read_value(name: str, kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:
        return _read_list(name, get_args(kind)[0], value) if isinstance(value, str) else tuple(value)
    return _read_pairs(name, value) if get_origin(kind) is Mapping else value


def _read_list(name: str, kind: Any, text: str) -> tuple[Any, ...]:
    """The values of a text such as "16,32,auto", each of the first of its kinds that takes it."""
    return tuple(_read_item(name, get_args(kind) or (kind,), item.strip()) for item in text.split(","))


def _read_item(name: str, kinds: Iterable[Any], item: str) -> Any:
    for kind in kinds:
        try:
            return kind(item)
        except ValueError:
            continue
    raise ConfigError(f"{name}={short_repr(item)} is not allowed: values with commas between them")


def _read_pairs(name: str, texts: Iterable[str]) -> dict[int, float]:
    """Token ids and numbers from texts such as "42=-1.5"."""
    pairs: dict[int, float] = {}
    for text in texts:
        token, _, number = text.partition("=")
        try:
            pair = int(token), float(number)
        except ValueError:
            allowed = "ID=VALUE, a token id and a number, such as 42=-1.5"
            raise ConfigError(f"{name}={text!r} is not allowed: {allowed}") from None
        check(pair[0] not in pairs, name, text, "each token id once")
        pairs[pair[0]] = pair[1]
    return pairs
