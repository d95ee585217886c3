"""What a row of the hook contract asks of a symbol, and how a symbol differs from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from ddtree.sglang_plugin.contract_ast import ALL_METHODS, LIST_CALL, Symbol

Version = tuple[int, ...]


class Kind(StrEnum):
    """How the plugin touches a symbol."""

    IMPORTED = "imported"  # by name; it must exist
    FIELD = "field"  # read or set on an object that SGLang made; it must exist
    CALLED = "called"  # our arguments must bind
    OVERRIDDEN = "overridden"  # by a method of ours; the class itself has it, of equal parameters, in order
    COVERED = "covered"  # a class in whose place SGLang calls ours, which must have all its methods
    HOOKED = "hooked"  # wrapped through HookRegistry; parameters must be the same, in order
    CALLBACK = "callback"  # a list that we add functions to; SGLang must call them with these arguments


@dataclass(frozen=True, slots=True)
class Hook:
    """One row of the contract.

    Attributes:
        path: `package.module:Class.attribute`, `package.module:name` or `package.module`.
        kind: how it is touched.
        parameters: of an overridden or hooked function its parameters' names; of a called one our arguments,
            a name that is given by keyword with a trailing "="; of a covered class, whose path ends with
            ".*", the methods that we have; of a callback, whose path is a class's with the list's name and
            "()", the arguments that the class calls it with. None: an attribute or property.
        loses: empty for what is needed; else what does not work without it.
        besides: of a covered class, another path whose methods ours inherits.
        may_inherit: of an overridden member, whether it may come from a base of the class.
        since, until: first and last version that the row is about; empty means no limit.
    """

    path: str
    kind: Kind
    parameters: tuple[str, ...] | None = None
    loses: str = ""
    besides: str = ""
    may_inherit: bool = False
    since: str = ""
    until: str = ""

    def is_about(self, version: Version) -> bool:
        starts = not self.since or parse_version(self.since) <= version
        return starts and (not self.until or version <= parse_version(self.until))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return re.split(r"[:.]", self.path.removesuffix(ALL_METHODS).removesuffix(LIST_CALL))[-1]


def parse_version(text: str) -> Version:
    """Major, minor and patch; suffixes such as rc1, post1 or dev5 are dropped. Empty where there are none."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def difference(hook: Hook, symbol: Symbol, inherited: tuple[str, ...] = ()) -> str | None:
    """How a symbol that exists differs from what a row asks for: "expected .., found ..", or None.

    `inherited` are the methods behind `hook.besides`.
    """
    if hook.kind is Kind.OVERRIDDEN and symbol.inherited_from and not hook.may_inherit:
        return f"expected it in the class itself, found it only in its base {symbol.inherited_from}"
    if hook.parameters is None:
        if hook.kind is Kind.IMPORTED or symbol.parameters is None:
            return None
        return f"expected an attribute, found a function with the parameters {show(symbol.parameters)}"
    if symbol.parameters is None:
        return f"expected parameters {show(hook.parameters)}, found nothing that takes any"
    if hook.kind is Kind.COVERED:
        unknown = [name for name in symbol.parameters if name not in hook.parameters + inherited]
        return f"it has methods that the plugin lacks: {', '.join(unknown)}" if unknown else None
    if hook.kind is Kind.CALLED:
        reason = call_difference(hook.parameters, symbol.parameters)
    else:
        found = tuple(parameter_names(symbol.parameters))
        reason = None if found == hook.parameters else "the parameters differ"
    return reason and f"expected {show(hook.parameters)}, found {show(symbol.parameters)}: {reason}"


def call_difference(arguments: Iterable[str], parameters: Iterable[str]) -> str | None:
    """Why a call would fail or bind its arguments to other parameters than we mean, or None."""
    signature = Signature.read(parameters)
    given = list(arguments)
    by_place = [name for name in given if not name.endswith("=")]
    by_keyword = [name.removesuffix("=") for name in given if name.endswith("=")]
    for index, name in enumerate(by_place):
        if index >= len(signature.positional):
            return None if signature.takes_more else f"{name} is one positional argument too many"
        if signature.positional[index] != name:
            return f"{name} would be taken for {signature.positional[index]}"
    for name in by_keyword:
        if name not in signature.keyword and not signature.takes_any_keyword:
            return f"it takes no {name}"
    missing = sorted(signature.required - {*by_place, *by_keyword})
    return f"it also requires {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters by the ways in which they can be given."""

    positional: tuple[str, ...]
    keyword: frozenset[str]
    required: frozenset[str]
    takes_more: bool
    takes_any_keyword: bool

    @staticmethod
    def read(parameters: Iterable[str]) -> Signature:
        """From the words of `Symbol.parameters`."""
        texts = list(parameters)
        marks = [index for index, text in enumerate(texts) if text.startswith("*") and text[1:2] != "*"]
        end = marks[0] if marks else len(texts)
        slash = texts.index("/") if "/" in texts else -1
        plain = [text for text in texts if text != "/" and not text.startswith("*")]
        positional_only = {text.removesuffix("=") for text in texts[: max(slash, 0)]}
        names = {text.removesuffix("=") for text in plain}
        before = [text for text in texts[:end] if text in plain]
        return Signature(
            positional=tuple(text.removesuffix("=") for text in before),
            keyword=frozenset(names - positional_only),
            required=frozenset(text for text in plain if not text.endswith("=")),
            takes_more=any(text != "*" for text in texts[end : end + 1]),
            takes_any_keyword=any(text.startswith("**") for text in texts),
        )


def parameter_names(parameters: Iterable[str]) -> list[str]:
    """Names alone, without defaults and the marks "/" and "*"."""
    return [text.removesuffix("=") for text in parameters if text not in ("/", "*")]


def show(parameters: Iterable[str]) -> str:
    return f"({', '.join(parameters)})"


# The table is written with these; each returns rows, so that limits can be put around any of them.
Rows = tuple[Hook, ...]


def imported(module: str, names: str) -> Rows:
    """Names that are imported from a module."""
    return tuple(Hook(f"{module}:{name}", Kind.IMPORTED) for name in names.split())


def modules(paths: str) -> Rows:
    """Modules that are imported as a whole."""
    return tuple(Hook(path, Kind.IMPORTED) for path in paths.split())


def fields(owner: str, names: str) -> Rows:
    """Attributes of a class."""
    return tuple(Hook(f"{owner}.{name}", Kind.FIELD) for name in names.split())


def called(path: str, arguments: str = "") -> Rows:
    """A call: "a, b=" gives `a` by place and `b` by keyword."""
    return (Hook(path, Kind.CALLED, _split(arguments)),)


def overridden(owner: str, names: str, parameters: str = "") -> Rows:
    """Methods of equal parameters that a class of ours overrides."""
    return tuple(Hook(f"{owner}.{name}", Kind.OVERRIDDEN, _split(parameters)) for name in names.split())


def or_inherited(*rows: Rows) -> Rows:
    """Rows about overridden members that a base may define: what it would do is not needed."""
    return tuple(replace(hook, may_inherit=True) for group in rows for hook in group)


def overridden_properties(owner: str, names: str) -> Rows:
    """Properties that a class of ours overrides."""
    return tuple(Hook(f"{owner}.{name}", Kind.OVERRIDDEN) for name in names.split())


def hooked(path: str, parameters: str = "") -> Rows:
    """A function that is wrapped through `HookRegistry`."""
    return (Hook(path, Kind.HOOKED, _split(parameters)),)


def callback(owner: str, name: str, arguments: str) -> Rows:
    """A list of functions that `owner` calls with these arguments, wherever the list is kept."""
    return (Hook(f"{owner}.{name}{LIST_CALL}", Kind.CALLBACK, _split(arguments)),)


def covered(owner: str, methods: str, inherited: str) -> Rows:
    """A class in whose place ours is called: it has `methods`, and inherits those of `inherited`."""
    path, besides = f"{owner}{ALL_METHODS}", f"{inherited}{ALL_METHODS}"
    return (Hook(path, Kind.COVERED, tuple(methods.split()), besides=besides),)


def since(version: str, *rows: Rows) -> Rows:
    """Rows about this version and later ones."""
    return tuple(replace(hook, since=version) for group in rows for hook in group)


def until(version: str, *rows: Rows) -> Rows:
    """Rows about this version and earlier ones."""
    return tuple(replace(hook, until=version) for group in rows for hook in group)


def optional(loses: str, *rows: Rows) -> Rows:
    """Rows that the plugin works without; `loses` says what does not work then."""
    return tuple(replace(hook, loses=loses) for group in rows for hook in group)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
