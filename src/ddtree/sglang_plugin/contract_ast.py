"""What Python source says of names, members and parameters: pure functions over syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

PACKAGE = "sglang"
# Ends a path that stands for the names of a class's public methods.
ALL_METHODS = ".*"
# Ends a path that stands for the arguments with which a class calls the functions of a list of that name.
LIST_CALL = "()"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DATACLASS = "dataclass"
PROPERTIES = {"property", "cached_property", "setter"}


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that exists in SGLang.

    Attributes:
        parameters: of a function, or of the constructor of a class, without `self`; a default is a trailing
            "=", and "/", "*", "*args" and "**kwargs" stand as in Python. Of a path that ends with ".*", the
            names of the class's public methods; with "()", the names of the arguments that the functions of
            a list are called with. None for all else.
        inherited_from: of a member that its class does not define itself, the name of the base that does.
    """

    parameters: tuple[str, ...] | None = None
    inherited_from: str = ""


class SymbolMissing(LookupError):
    """A path leads nowhere; the message says why."""


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Names of a module by the statement that defines them first; branches of `if` and `try` included."""
    found: dict[str, ast.stmt] = {}
    for node in statements(tree.body):
        for name in names_defined(node):
            found.setdefault(name, node)
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported; blocks for type checkers alone are left out."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and last_name(node.test) != "TYPE_CHECKING":
            yield from statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handled = [inner for handler in node.handlers for inner in handler.body]
            yield from statements([*node.body, *handled, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from statements(node.body)


def names_defined(node: ast.stmt) -> set[str]:
    if isinstance(node, FunctionNode | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return names_assigned(node)


def names_assigned(node: ast.stmt) -> set[str]:
    """Plain names that an assignment sets; annotations without a value count, since fields have none."""
    targets = assignment_targets(node)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def assignment_targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        pairs = [t.elts if isinstance(t, ast.Tuple | ast.List) else [t] for t in node.targets]
        return [target for elements in pairs for target in elements]
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def class_members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Names that a class body or its methods give to instances: functions, fields, `self.x = ...`."""
    found: dict[str, ast.AST] = {}
    for statement in statements(node.body):
        for name in names_defined(statement):
            found.setdefault(name, statement)
    for method in list(found.values()):
        if isinstance(method, FunctionNode) and (owner := first_parameter(method)):
            for inner in nested_statements(method):
                for target in assignment_targets(inner):
                    if isinstance(target, ast.Attribute) and last_name(target.value) == owner:
                        found.setdefault(target.attr, inner)
    return found


def nested_statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements below a statement, at any depth; expressions are not entered."""
    for block in ("body", "handlers", "cases", "orelse", "finalbody"):
        for inner in getattr(node, block, ()):
            yield inner
            yield from nested_statements(inner)


def public_methods(node: ast.ClassDef) -> tuple[str, ...]:
    """Names of the methods that a class itself defines for others to call, in order."""
    members = class_members(node).items()
    return tuple(n for n, m in members if isinstance(m, FunctionNode) and not n.startswith("_"))


def list_call_arguments(node: ast.ClassDef, path: str) -> tuple[str, ...]:
    """Arguments of the call in a class's first loop over the list of functions that `path` names.

    Raises:
        SymbolMissing: there is no such loop.
    """
    name = path.removesuffix(LIST_CALL).rpartition(".")[2]
    for loop in ast.walk(node):
        if isinstance(loop, ast.For) and last_name(loop.iter) == name:
            calls = [inner for inner in ast.walk(loop) if isinstance(inner, ast.Call)]
            for call in calls:
                if last_name(call.func) == last_name(loop.target):
                    return (*map(last_name, call.args), *(f"{keyword.arg}=" for keyword in call.keywords))
    raise SymbolMissing(f"{node.name} calls no functions of a list {name}")


def first_parameter(node: FunctionNode) -> str:
    arguments = [*node.args.posonlyargs, *node.args.args]
    return arguments[0].arg if arguments else ""


def method_symbol(node: FunctionNode) -> Symbol:
    """A method's parameters without `self`; a property has none."""
    decorators = {decorator_name(decorator) for decorator in node.decorator_list}
    if decorators & PROPERTIES:
        return Symbol()
    return Symbol(parameters_of(node.args, skip=0 if "staticmethod" in decorators else 1))


def parameters_of(arguments: ast.arguments, skip: int = 0) -> tuple[str, ...]:
    """A signature in the words of `Symbol.parameters`, without its first `skip` parameters."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [a.arg + "=" * (index >= first_default) for index, a in enumerate(positional)]
    if arguments.posonlyargs:
        found.insert(len(arguments.posonlyargs), "/")
    found = found[skip:]
    if arguments.vararg:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [a.arg + "=" * (default is not None) for a, default in pairs]
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return tuple(found)


def record_parameters(lineage: list[ast.ClassDef]) -> tuple[str, ...]:
    """Constructor of a dataclass or Struct from its fields, those of bases first."""
    fields: dict[str, tuple[str, bool]] = {}
    for node in lineage:
        is_keyword_only = any(flag_of(call, "kw_only") for call in record_options(node))
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            kind = last_name(statement.annotation)
            if kind == "KW_ONLY":
                is_keyword_only = True
            elif kind != "ClassVar" and not is_hidden(statement.value):
                name = statement.target.id
                text = name + "=" * has_default(statement.value)
                fields[name] = text, is_keyword_only or flag_of(statement.value, "kw_only")
    positional = [text for text, is_keyword in fields.values() if not is_keyword]
    keyword = [text for text, is_keyword in fields.values() if is_keyword]
    return (*positional, *(["*", *keyword] if keyword else []))


def record_options(node: ast.ClassDef) -> list[ast.expr]:
    """The calls that carry a record's options: the decorator, or the class statement's keywords."""
    statement = ast.Call(ast.Name(node.name), [], node.keywords)
    return [statement, *(d for d in node.decorator_list if decorator_name(d) == DATACLASS)]


def has_default(value: ast.expr | None) -> bool:
    if not is_field_call(value):
        return value is not None
    assert isinstance(value, ast.Call)
    return bool(value.args) or any(k.arg in ("default", "default_factory") for k in value.keywords)


def is_hidden(value: ast.expr | None) -> bool:
    """Whether a field is no parameter: `field(init=False)`."""
    if not is_field_call(value):
        return False
    assert isinstance(value, ast.Call)
    return any(k.arg == "init" and getattr(k.value, "value", None) is False for k in value.keywords)


def is_field_call(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and last_name(value.func) == "field"


def flag_of(call: ast.expr | None, name: str) -> bool:
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return any(k.arg == name and getattr(k.value, "value", None) is True for k in keywords)


def decorator_name(node: ast.expr) -> str:
    return last_name(node.func if isinstance(node, ast.Call) else node)


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name; a subscript counts as what is subscripted, all else as ""."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
