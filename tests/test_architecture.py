"""The rooms of `docs/architecture.md` and who may import whom, read from the import statements."""

import ast
import re
import sys
from pathlib import Path

import pytest

import ddtree

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ddtree"

LEAVES = {
    "bench_config",
    "config",
    "dequantise",
    "errors",
    "model_cache",
    "models",
    "provenance",
    "resume_download",
    "stats",
    "trace_format",
    "tune_config",
}
PUBLIC = "names in ddtree.__all__"
ROOMS = {
    "tree": set(),
    "layers": set(),
    "draft": {"layers"},
    "engine": {"tree", "layers", "draft"},
    "server": {"engine"},
    "sglang_plugin": {"tree"},
    "doctor": {"tree", "sglang_plugin", "draft"},
    "trace": {PUBLIC},
    "bench": {"tree", "trace", PUBLIC},
    "train": {"tree", "draft", PUBLIC},
    "cli": {
        "tree",
        "layers",
        "draft",
        "engine",
        "server",
        "sglang_plugin",
        "doctor",
        "trace",
        "bench",
        "train",
        PUBLIC,
    },
}
HEAVY_LEAVES = {"dequantise", "model_cache", "models"}
CLI_TOP_LEVEL = {"typer", "rich", *sys.stdlib_module_names}
MAX_FUNCTION_LINES = 100
MAX_FILE_LINES = 400
MAX_WORKER_LINES = 800


def python_files():
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    """The room of a file: its folder, the stem of a leaf, or "" for the package's own two files."""
    parts = path.relative_to(PACKAGE).parts
    if len(parts) > 1:
        return parts[0]
    return "" if path.stem in ("__init__", "__main__") else path.stem


def imports_of(tree):
    """Every import as (module, names, inside a function)."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [], id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module, [alias.name for alias in node.names], id(node) in inside


def for_types_only(tree):
    """The imports under `if TYPE_CHECKING`."""
    blocks = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]  # fmt: skip
    return {found[0] for block in blocks for found in imports_of(ast.Module(block.body, []))}


def rooms_imported(module, names):
    """The rooms that `from module import names` reaches; PUBLIC for names of the package itself."""
    if module != "ddtree":
        return {module.split(".")[1]}
    return {name if name in ROOMS or name in LEAVES else PUBLIC for name in names} or {PUBLIC}


def problems_of(room, source):
    """What the rules for a room forbid in a source text."""
    tree = ast.parse(source)
    types_only = for_types_only(tree)
    is_light = room in LEAVES | {""}
    for module, names, is_inside in imports_of(tree):
        top = module.split(".")[0]
        at_start = not is_inside and module not in types_only
        if top == "ddtree":
            yield from own_problems(room, module, names, at_start)
        elif top == "sglang" and room != "sglang_plugin":
            yield f"{room}: only sglang_plugin imports sglang"
        elif room == "tree" and top == "transformers":
            yield "tree: no transformers"
        elif room == "cli" and at_start and top not in CLI_TOP_LEVEL:
            yield f"cli: {module} is imported outside a function"
        elif top in sys.stdlib_module_names or module in types_only:
            continue
        elif is_light and (at_start or room not in HEAVY_LEAVES):
            yield f"{room}: a leaf imports {module}"


def own_problems(room, module, names, at_start):
    reached = rooms_imported(module, names) - LEAVES
    if room == "cli" and at_start:
        reached -= {"cli"}
        yield from (f"cli: {other} is imported outside a function" for other in reached)
    elif room == "":
        yield from (f"the package: {other} is imported at start" for other in reached - {"cli"} if at_start)
    else:
        allowed = ROOMS.get(room, set()) | {room}
        yield from (f"{room}: imports {other}" for other in reached - allowed)
        if PUBLIC in reached and module == "ddtree":
            unknown = set(names) - set(ddtree.__all__) - LEAVES - set(ROOMS)
            yield from (f"{room}: ddtree.{name} is not public" for name in unknown)


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_rooms(path):
    assert list(problems_of(room_of(path), path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("tree", "from ddtree.engine.engine import Engine"),
        ("tree", "def f():\n    import transformers"),
        ("tree", "from ddtree import Engine"),
        ("layers", "from ddtree.tree.layout import TreeLayout"),
        ("draft", "from ddtree import engine"),
        ("engine", "import sglang.srt"),
        ("server", "from ddtree.tree import verify"),
        ("sglang_plugin", "from ddtree.engine.sampling import draw"),
        ("bench", "from ddtree.engine.engine import Engine"),
        ("bench", "from ddtree import Hidden"),
        ("trace", "from ddtree.tree.draft_tree import DraftTree"),
        ("doctor", "import sglang"),
        ("doctor", "from ddtree.engine.engine import Engine"),
        ("cli", "from ddtree import Engine"),
        ("cli", "import torch"),
        ("stats", "def f():\n    import torch"),
        ("models", "import torch"),
        ("config", "from ddtree.tree.budget import B"),
        ("", "import torch"),
        ("", "from ddtree.engine.engine import Engine"),
    ],
)  # fmt: skip
def test_a_forbidden_import_is_found(room, source):
    assert list(problems_of(room, source))


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("tree", "import torch\nfrom ddtree.errors import ConfigError"),
        ("engine", "import transformers\nfrom ddtree.draft.load import load\nfrom ddtree.tree import layout"),
        ("sglang_plugin", "import sglang.srt\nfrom ddtree.tree.layout import TreeLayout"),
        ("bench", "from ddtree import Engine, SamplingParams\nfrom ddtree.provenance import provenance"),
        ("cli", "import typer\nfrom ddtree.cli.output import show\ndef f():\n    from ddtree import Engine"),
        ("cli", "def f():\n    import torch"),
        ("models", "def f():\n    import torch"),
        ("", "if TYPE_CHECKING:\n    from ddtree.engine.engine import Engine"),
    ],
)  # fmt: skip
def test_an_allowed_import_passes(room, source):
    assert list(problems_of(room, source)) == []


def test_every_file_is_in_a_known_room():
    rooms = {room_of(path) for path in python_files()}
    assert rooms <= set(ROOMS) | LEAVES | {""}


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes(path):
    source = path.read_text(encoding="utf-8")
    limit = MAX_WORKER_LINES if path.stem.startswith("worker") else MAX_FILE_LINES
    assert len(source.splitlines()) <= limit
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"


def test_the_architecture_page_has_every_folder_and_leaf():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)(?:/|\.py)`", page, flags=re.MULTILINE))
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders | LEAVES <= named
    assert named <= set(ROOMS) | LEAVES | {"data"}
