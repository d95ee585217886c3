"""The hook contract on a real SGLang: reading its source and importing it find the same.

The comparison is in a process of its own, since modules that are imported stay so.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.sglang_plugin import contract_hooks
from ddtree.sglang_plugin.contract_ast import SymbolMissing, class_members, last_name
from ddtree.sglang_plugin.contract_rules import Kind
from ddtree.sglang_plugin.contract_source import installed_package, open_source

pytestmark = pytest.mark.sglang

DOUBLES = Path(__file__).parents[1] / "sglang_kit" / "doubles"
COMPARE = """
import json, sys
from ddtree.sglang_plugin.contract import check_imported, check_installed
from ddtree.sglang_plugin.contract_hooks import TABLE
from ddtree.sglang_plugin.contract_ast import SymbolMissing
from ddtree.sglang_plugin.contract_installed import InstalledSGLang
from ddtree.sglang_plugin.contract_rules import parse_version
from ddtree.sglang_plugin.contract_source import installed_package, open_source

def symbols(lookup):
    release = parse_version(light.version)
    for hook in (hook for hook in TABLE if hook.is_about(release)):
        try:
            yield hook.path, lookup.find(hook.path).parameters
        except SymbolMissing:
            yield hook.path, "missing"

import sglang.srt.plugins
before = set(sys.modules)
light = check_installed({})
imported = sorted(name for name in set(sys.modules) - before if name.startswith("sglang."))
source = dict(symbols(open_source(installed_package())))
full = check_imported({})
live = dict(symbols(InstalledSGLang()))
print(json.dumps({
    "light": light.text, "full": full.text, "is_ok": light.is_ok and full.is_ok, "imported": imported,
    "different": [[path, source[path], live[path]] for path in source if source[path] != live[path]],
}))
"""


@pytest.fixture(scope="module")
def found():
    environ = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(DOUBLES), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", COMPARE], env=environ, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_contract_holds(found):
    assert found["is_ok"], found["light"] + found["full"]


def test_the_check_at_registration_imports_next_to_nothing(found):
    assert set(found["imported"]) <= {"sglang.version"}


def test_source_and_import_agree_on_every_symbol(found):
    assert found["different"] == []


def overridden_members():
    """(base, name) for each member of the plugin's classes whose base in SGLang has one of that name."""
    source = open_source(installed_package())
    for path in Path(contract_hooks.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {
            alias.asname or alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("sglang.")
            for alias in node.names
        }
        for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for base in map(last_name, node.bases):
                for name in class_members(node) if base in modules else ():
                    try:
                        source.find(f"{modules[base]}:{base}.{name}")
                    except SymbolMissing:
                        continue
                    yield f"{base}.{name}"


def test_every_override_is_in_the_table():
    table = {hook.path.partition(":")[2] for hook in contract_hooks.TABLE if hook.kind is Kind.OVERRIDDEN}
    found = set(overridden_members())
    assert "DFlashWorkerV2.forward_batch_generation" in found
    # Constructors are called; the others are attributes that the base sets too.
    allowed = {
        "DFlashWorkerV2.__init__",
        "DFlashWorkerV2._fused_kv_helper",
        "DFlashWorkerV2.server_args",
        "Sampler.__init__",
    }
    assert found - table - allowed == set()
