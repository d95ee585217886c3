"""Reads symbols of the SGLang of this process, with `inspect`."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import sys
import textwrap
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import Any

from ddtree.sglang_plugin.contract_ast import (
    ALL_METHODS,
    LIST_CALL,
    PACKAGE,
    Symbol,
    SymbolMissing,
    class_members,
    list_call_arguments,
    public_methods,
)
from ddtree.sglang_plugin.contract_source import SourceTree

DESCRIPTORS = (property, cached_property)


class InstalledSGLang:
    """Looks up symbols by path, `package.module:Class.attribute`, in imported modules.

    Args:
        source: where to look for symbols of modules that are not imported yet; without it they are imported.
    """

    def __init__(self, source: SourceTree | None = None) -> None:
        self.source = source
        self._failures: dict[str, str] = {}
        self._members: dict[type, set[str]] = {}

    def version(self) -> str | None:
        try:
            return str(importlib.import_module(f"{PACKAGE}.version").__version__)
        except (ImportError, AttributeError):
            return None

    def find(self, path: str) -> Symbol:
        """What a path leads to.

        Raises:
            SymbolMissing: it leads nowhere, or the module cannot be imported.
        """
        module_name, _, name = path.partition(":")
        if self.source is not None and not is_imported(module_name):
            return self.source.find(path)
        module = self._import(module_name)
        if not name:
            return Symbol()
        outer, _, member = name.partition(".")
        try:
            found = getattr(module, outer)
        except AttributeError:
            raise SymbolMissing(f"{module_name} has no {outer}") from None
        if not member:
            return symbol_of(found)
        if not isinstance(found, type):
            raise SymbolMissing(f"{outer} is no class")
        if path.endswith(ALL_METHODS):
            return Symbol(public_methods(class_source(found)))
        if path.endswith(LIST_CALL):
            return Symbol(list_call_arguments(class_source(found), path))
        return self._member(found, member)

    def _import(self, name: str) -> ModuleType:
        if name in self._failures:
            raise SymbolMissing(self._failures[name])
        try:
            return importlib.import_module(name)
        except Exception as error:  # whatever a module does when it is imported, the report names it
            self._failures[name] = f"{name} cannot be imported: {type(error).__name__}: {error}"
            raise SymbolMissing(self._failures[name]) from error

    def _member(self, owner: type, name: str) -> Symbol:
        for base in owner.__mro__:
            inherited_from = "" if base is owner else base.__name__
            if name in vars(base):
                return replace(method_symbol(vars(base)[name]), inherited_from=inherited_from)
            if name in self._source_members(base):
                return Symbol(inherited_from=inherited_from)
        raise SymbolMissing(f"{owner.__name__} has no {name}")

    def _source_members(self, owner: type) -> set[str]:
        """Attributes that the class's methods set, and fields without a default: read from its source."""
        if not owner.__module__.startswith(f"{PACKAGE}."):
            return set()
        if owner not in self._members:
            self._members[owner] = set(class_members(class_source(owner)))
        return self._members[owner]


def is_imported(name: str) -> bool:
    """Whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def class_source(owner: type) -> ast.ClassDef:
    """The statement that defines a class; without members where its source is not at hand."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    except (OSError, TypeError):
        node = ast.Pass()
    return node if isinstance(node, ast.ClassDef) else ast.ClassDef(owner.__name__, [], [], [], [])


def symbol_of(value: Any) -> Symbol:
    """A function with its parameters, a class with its constructor's, anything else without."""
    if isinstance(value, enum.EnumType) or not callable(value):
        return Symbol()
    try:
        return Symbol(parameters_of(inspect.signature(value)))
    except (TypeError, ValueError):
        return Symbol()


def method_symbol(value: Any) -> Symbol:
    """A member as its class holds it: a method without `self`, a property or value without parameters."""
    if isinstance(value, DESCRIPTORS):
        return Symbol()
    if isinstance(value, staticmethod):
        return symbol_of(value.__func__)
    function = value.__func__ if isinstance(value, classmethod) else value
    if not inspect.isroutine(function) and not hasattr(function, "__wrapped__"):
        return Symbol()
    symbol = symbol_of(function)
    if symbol.parameters is None:
        return symbol
    return Symbol(tuple(text for text in symbol.parameters if text != "/")[1:])


def parameters_of(signature: inspect.Signature) -> tuple[str, ...]:
    """A signature in the words of `Symbol.parameters`."""
    found: list[str] = []
    parameters = list(signature.parameters.values())
    for index, parameter in enumerate(parameters):
        kind = parameter.kind
        if kind is inspect.Parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in found):
            found.append("*")
        prefix = (
            "**"
            if kind is inspect.Parameter.VAR_KEYWORD
            else "*" * (kind is inspect.Parameter.VAR_POSITIONAL)
        )
        found.append(prefix + parameter.name + "=" * (parameter.default is not inspect.Parameter.empty))
        following = parameters[index + 1].kind if index + 1 < len(parameters) else None
        if kind is inspect.Parameter.POSITIONAL_ONLY and following is not kind:
            found.append("/")
    return tuple(found)
