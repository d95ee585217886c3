"""Writes tests/data/sglang_signatures/VERSION.json: the symbols of the hook contract in releases of SGLang.

Names and the names of parameters only. Run: python scripts/make_sglang_signatures.py WHEEL_OR_FOLDER...
A folder stands for the wheels of SGLang in it. `make contract` downloads them first.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

from ddtree.sglang_plugin.contract_ast import SymbolMissing
from ddtree.sglang_plugin.contract_hooks import TABLE
from ddtree.sglang_plugin.contract_rules import Kind
from ddtree.sglang_plugin.contract_source import SourceTree, open_source

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "sglang_signatures"

# Of a symbol: None where it is missing, True where it has no parameters that matter, else their names.
Signature = list[str] | bool | None


def signatures(source: SourceTree) -> dict[str, Signature]:
    """The symbols of the table by path."""
    compared = {hook.path for hook in TABLE if hook.kind is not Kind.IMPORTED}
    compared |= {hook.besides for hook in TABLE}
    found: dict[str, Signature] = {}
    for path in sorted({hook.path for hook in TABLE} | compared - {""}):
        try:
            parameters = source.find(path).parameters
        except SymbolMissing:
            found[path] = None
        else:
            found[path] = True if parameters is None or path not in compared else list(parameters)
    return found


def inherited(source: SourceTree) -> dict[str, str]:
    """Overridden members that their class does not define itself, by path, with the base that does."""
    found: dict[str, str] = {}
    for path in sorted({hook.path for hook in TABLE if hook.kind is Kind.OVERRIDDEN}):
        with suppress(SymbolMissing):
            if base := source.find(path).inherited_from:
                found[path] = base
    return found


def render(version: str, symbols: dict[str, Signature], bases: dict[str, str]) -> str:
    """A snapshot as JSON, one line a symbol."""
    rows = ",\n".join(f"    {json.dumps(path)}: {json.dumps(value)}" for path, value in symbols.items())
    head = f'  "sglang": {json.dumps(version)},\n  "inherited": {json.dumps(bases)},\n'
    return f'{{\n{head}  "symbols": {{\n{rows}\n  }}\n}}\n'


def main(arguments: list[str]) -> None:
    given = [Path(argument) for argument in arguments]
    wheels = [wheel for path in given for wheel in (sorted(path.glob("sglang-*.whl")) or [path])]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        source = open_source(wheel)
        version = source.version()
        assert version, f"{wheel} does not say its version"
        page = FOLDER / f"{version}.json"
        page.write_text(render(version, signatures(source), inherited(source)), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main(sys.argv[1:])
