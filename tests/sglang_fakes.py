"""Stands in for SGLang's modules where none is installed: just the names that a module under test imports."""

import importlib
import sys
from types import ModuleType


def fake_modules(monkeypatch, modules):
    """Put modules with the given attributes, {dotted name: {attribute: value}}, in place of any others."""
    for name, attributes in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            outer = ".".join(parts[:depth])
            if not isinstance(sys.modules.get(outer), Fake):
                monkeypatch.setitem(sys.modules, outer, Fake(outer))
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[outer])
        vars(sys.modules[name]).update(attributes)


class Fake(ModuleType):
    """A module, and a package too, since anything may be below it."""

    __path__ = ()


def import_fresh(monkeypatch, name):
    """Import one of our modules anew, against what stands in for SGLang now, for the time of a test."""
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return importlib.import_module(name)
