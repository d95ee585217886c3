"""Reads symbols of SGLang from its source text, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.contract_ast import (
    ALL_METHODS,
    DATACLASS,
    LIST_CALL,
    PACKAGE,
    FunctionNode,
    Symbol,
    SymbolMissing,
    class_members,
    decorator_name,
    definitions,
    last_name,
    list_call_arguments,
    method_symbol,
    names_assigned,
    parameters_of,
    public_methods,
    record_parameters,
    statements,
)
from ddtree.sglang_plugin.contract_files import SourceFiles, open_files

# Bases that make a constructor from the fields of every class below them.
RECORD_BASES = {"NamedTuple", "Struct"}
MAX_IMPORT_STEPS = 8


def open_source(path: Path) -> SourceTree:
    """SGLang's sources in a wheel, site-packages, an unpacked wheel, a source tree or `sglang/` itself.

    Raises:
        ConfigError: there is no such file or folder, it cannot be read, or no SGLang is in it.
    """
    return SourceTree(open_files(path))


def installed_package() -> Path | None:
    """The folder that `import sglang` takes the package from, or None; nothing is imported."""
    try:
        spec = find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


@dataclass(frozen=True, slots=True)
class ClassSource:
    """A class and the module whose names its bases are written in."""

    module: str
    node: ast.ClassDef


class SourceTree:
    """Looks up symbols by path, `package.module:Class.attribute`, in source text."""

    def __init__(self, files: SourceFiles) -> None:
        self.files = files
        self._modules: dict[str, ast.Module | None] = {}
        self._names: dict[str, dict[str, ast.stmt]] = {}
        self._class_members: dict[ast.ClassDef, dict[str, ast.AST]] = {}

    def version(self) -> str | None:
        """The version that `sglang/_version.py` or the distribution gives; None where neither does."""
        module = self.module(f"{PACKAGE}._version")
        for node in module.body if module else ():
            if isinstance(node, ast.Assign) and "__version__" in names_assigned(node):
                return str(getattr(node.value, "value", "")) or None
        found: str | None = HeaderParser().parsestr(self.files.metadata() or "")["Version"]
        return found

    def find(self, path: str) -> Symbol:
        """What a path leads to, through imports between modules and the bases of classes.

        Raises:
            SymbolMissing: it leads nowhere.
            ConfigError: a file on the way cannot be read or parsed.
        """
        try:
            return self._find(path)
        except RecursionError:
            raise ConfigError(f"SGLang's {path} is nested too deeply to be read") from None

    def _find(self, path: str) -> Symbol:
        module, _, name = path.partition(":")
        if self.module(module) is None:
            raise SymbolMissing(f"there is no module {module}")
        if not name:
            return Symbol()
        outer, _, member = name.partition(".")
        place = self._definition(module, outer)
        if place is None:
            raise SymbolMissing(f"{module} has no {outer}")
        if not member:
            return self._symbol(*place)
        if not isinstance(place[1], ast.ClassDef):
            raise SymbolMissing(f"{outer} is no class")
        if path.endswith(ALL_METHODS):
            return Symbol(public_methods(place[1]))
        if path.endswith(LIST_CALL):
            return Symbol(list_call_arguments(place[1], path))
        return self._member(ClassSource(place[0], place[1]), member)

    def module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            text = self.files.read(path)
            if text is None:
                continue
            try:
                return ast.parse(text)
            except (SyntaxError, ValueError) as error:
                raise ConfigError(f"SGLang's file {path} is no Python source: {error}") from None
            except (RecursionError, MemoryError):
                raise ConfigError(f"SGLang's file {path} is nested too deeply to be parsed") from None
        return None

    def _definition(self, module: str, name: str, steps: int = 0) -> tuple[str, ast.stmt] | None:
        """The statement that gives a module's name its value, and the module it stands in."""
        tree = self.module(module)
        if tree is None or steps > MAX_IMPORT_STEPS:
            return None
        if module not in self._names:
            self._names[module] = definitions(tree)
        found = self._names[module].get(name)
        if isinstance(found, ast.ImportFrom):
            return self._imported(module, found, name, steps)
        if found is not None:
            return module, found
        places = (self._definition(origin, name, steps + 1) for origin in self._star_origins(module, tree))
        return next((place for place in places if place), None)

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str, steps: int
    ) -> tuple[str, ast.stmt] | None:
        """Where an imported name is defined; the import itself for submodules and other packages' names."""
        origin = self._origin(module, node)
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        if origin.partition(".")[0] != PACKAGE or self.module(f"{origin}.{original}") is not None:
            return module, node
        return self._definition(origin, original, steps + 1)

    def _star_origins(self, module: str, tree: ast.Module) -> list[str]:
        imports = [node for node in statements(tree.body) if isinstance(node, ast.ImportFrom)]
        return [self._origin(module, node) for node in imports if node.names[0].name == "*"]

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The absolute name of the module that `from ... import` reads."""
        if not node.level:
            return node.module or ""
        is_package = self.files.read(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _symbol(self, module: str, node: ast.stmt) -> Symbol:
        if isinstance(node, FunctionNode):
            return Symbol(parameters_of(node.args))
        if isinstance(node, ast.ClassDef):
            return Symbol(self._constructor(ClassSource(module, node)))
        return Symbol()

    def _member(self, owner: ClassSource, name: str) -> Symbol:
        for source in self._lineage(owner):
            node = self._members(source.node).get(name)
            if node is not None:
                symbol = method_symbol(node) if isinstance(node, FunctionNode) else Symbol()
                base = "" if source.node is owner.node else source.node.name
                return replace(symbol, inherited_from=base)
        raise SymbolMissing(f"{owner.node.name} has no {name}")

    def _members(self, node: ast.ClassDef) -> dict[str, ast.AST]:
        if node not in self._class_members:
            self._class_members[node] = class_members(node)
        return self._class_members[node]

    def _constructor(self, owner: ClassSource) -> tuple[str, ...] | None:
        """Parameters of a class: of its `__init__`, or of the fields of a dataclass, Struct or NamedTuple."""
        lineage = list(self._lineage(owner))
        for source in lineage:
            init = self._members(source.node).get("__init__")
            if isinstance(init, FunctionNode):
                return parameters_of(init.args, skip=1)
            if self._is_record(source):
                records = [base.node for base in self._lineage(source) if self._is_record(base)]
                return record_parameters(records[::-1])
        bases = [self._base(source.module, base) for source in lineage for base in source.node.bases]
        return () if all(bases) else None

    def _is_record(self, source: ClassSource) -> bool:
        """Whether a class makes its own constructor from its fields."""
        if any(decorator_name(decorator) == DATACLASS for decorator in source.node.decorator_list):
            return True
        return any(last_name(base) in RECORD_BASES for s in self._lineage(source) for base in s.node.bases)

    def _lineage(
        self, owner: ClassSource, below: frozenset[ast.ClassDef] = frozenset()
    ) -> Iterator[ClassSource]:
        """The class, then its bases within SGLang, depth first; `below` are classes on the way to it.

        Names are not followed as of the line that they stand in, so a class can seem to be its own base.
        """
        yield owner
        below = below | {owner.node}
        for base in owner.node.bases:
            found = self._base(owner.module, base)
            if found is not None and found.node not in below:
                yield from self._lineage(found, below)

    def _base(self, module: str, base: ast.expr) -> ClassSource | None:
        place = self._definition(module, base.id) if isinstance(base, ast.Name) else None
        return ClassSource(place[0], place[1]) if place and isinstance(place[1], ast.ClassDef) else None
