"""Symbols read from source text are those that `inspect` sees after an import, whatever they look like."""

import importlib
import sys
import textwrap
import zipfile

import pytest

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.contract_ast import Symbol, SymbolMissing
from ddtree.sglang_plugin.contract_installed import InstalledSGLang
from ddtree.sglang_plugin.contract_source import open_source

# A package with every way to define a symbol that SGLang uses, and some more.
FILES = {
    "sglang/__init__.py": "",
    "sglang/version.py": "__version__ = '0.5.23'",
    "sglang/_version.py": "__version__: str\n__version__ = version = '0.5.23'",
    "sglang/srt/__init__.py": "",
    "sglang/srt/shapes.py": """
        from __future__ import annotations

        import contextlib
        import functools
        from collections import OrderedDict
        from dataclasses import KW_ONLY, dataclass, field
        from enum import Enum
        from functools import cached_property
        from typing import TYPE_CHECKING, ClassVar, NamedTuple

        from sglang.srt import pool as pool_module
        from sglang.srt.pool import Pool
        from sglang.srt.pool import move as move_rows
        from .stars import *

        if TYPE_CHECKING:
            from sglang.srt.pool import OnlyForTypes

        LIMIT = 3
        first, second = 1, 2

        def plain(a, b=1, *, c, d=None): ...
        def marked(a, /, b, *rest, c=1, **others): ...
        def only_keywords(*, c): ...
        async def later(a): ...

        @contextlib.contextmanager
        def scope(a, b=2):
            yield

        @functools.lru_cache(maxsize=None)
        def cached(a): ...

        try:
            import nothing_of_that_name
        except ImportError:
            def fallback(a, b): ...

        if LIMIT > 2:
            def branch(yes): ...
        else:
            def branch(no): ...

        class Plain:
            \"\"\"Text.\"\"\"
            kind = "plain"
            hint: int

            def __init__(self, a, b=1):
                self.a, self._b = a, b
                if a:
                    self.deep: int = 3

            def method(self, x, *, y=2):
                self.late = x

            @classmethod
            def make(cls, a): ...

            @staticmethod
            def free(a, b=1): ...

            @property
            def width(self):
                return 1

            @cached_property
            def height(self):
                return 2

            @contextlib.contextmanager
            def held(self, source, **values):
                yield

            def _hidden(this, z):
                this.own_word = z

            def tell(self, out):
                def once():
                    for text in self.texts:
                        print(text)
                    for hook in self.owner.listeners:
                        print(hook)
                        hook(self, out, size=len(out))
                return once

        class Child(Plain, pool_module.Mixin):
            def method(self, x, *, y=2, z=3): ...

        class Silent: ...

        @dataclass
        class Record:
            a: int
            b: int = 1
            c: list = field(default_factory=list)
            d: int = field(init=False, default=4)
            shared: ClassVar[int] = 5
            _: KW_ONLY
            e: int
            f: int = field(default=2)

        @dataclass(kw_only=True)
        class ChildRecord(Record, Pool):
            b: int = 7
            g: int

        class ChildOfRecord(Record):
            def total(self): ...

        class Pair(NamedTuple):
            left: int
            right: int = 2

        class Color(Enum):
            RED = 1

            @classmethod
            def parse(cls, text): ...

        class Queue(OrderedDict):
            size: int = 0
    """,
    "sglang/srt/pool.py": """
        class Mixin:
            def mixed(self, m): ...

        class Pool:
            size: int
            def __init__(self, size): self.size = size

        class OnlyForTypes: ...

        def move(target, source): ...
    """,
    "sglang/srt/stars.py": "def starred(s): ...\nclass Star:\n    def shine(self, n=1): ...",
    "sglang/srt/package/__init__.py": "from .inner import function\nfrom ..pool import move",
    "sglang/srt/package/inner.py": "def function(deep): ...",
}
PATHS = {
    "sglang.srt.shapes": None,
    "sglang.srt.shapes:LIMIT": None,
    "sglang.srt.shapes:second": None,
    "sglang.srt.shapes:plain": ("a", "b=", "*", "c", "d="),
    "sglang.srt.shapes:marked": ("a", "/", "b", "*rest", "c=", "**others"),
    "sglang.srt.shapes:only_keywords": ("*", "c"),
    "sglang.srt.shapes:later": ("a",),
    "sglang.srt.shapes:scope": ("a", "b="),
    "sglang.srt.shapes:cached": ("a",),
    "sglang.srt.shapes:fallback": ("a", "b"),
    "sglang.srt.shapes:branch": ("yes",),
    "sglang.srt.shapes:pool_module": None,
    "sglang.srt.shapes:Pool": ("size",),
    "sglang.srt.shapes:move_rows": ("target", "source"),
    "sglang.srt.shapes:starred": ("s",),
    "sglang.srt.shapes:Star.shine": ("n=",),
    "sglang.srt.shapes:Plain": ("a", "b="),
    "sglang.srt.shapes:Plain.kind": None,
    "sglang.srt.shapes:Plain.hint": None,
    "sglang.srt.shapes:Plain.a": None,
    "sglang.srt.shapes:Plain._b": None,
    "sglang.srt.shapes:Plain.deep": None,
    "sglang.srt.shapes:Plain.late": None,
    "sglang.srt.shapes:Plain.own_word": None,
    "sglang.srt.shapes:Plain.method": ("x", "*", "y="),
    "sglang.srt.shapes:Plain.make": ("a",),
    "sglang.srt.shapes:Plain.free": ("a", "b="),
    "sglang.srt.shapes:Plain.width": None,
    "sglang.srt.shapes:Plain.height": None,
    "sglang.srt.shapes:Plain.held": ("source", "**values"),
    "sglang.srt.shapes:Plain.*": ("method", "make", "free", "width", "height", "held", "tell"),
    "sglang.srt.shapes:Plain.listeners()": ("self", "out", "size="),
    "sglang.srt.shapes:Child": ("a", "b="),
    "sglang.srt.shapes:Child.method": ("x", "*", "y=", "z="),
    "sglang.srt.shapes:Child.late": None,
    "sglang.srt.shapes:Child.*": ("method",),
    "sglang.srt.shapes:Silent": (),
    "sglang.srt.shapes:Record": ("a", "b=", "c=", "*", "e", "f="),
    "sglang.srt.shapes:Record.e": None,
    "sglang.srt.shapes:ChildRecord": ("a", "c=", "*", "b=", "e", "f=", "g"),
    "sglang.srt.shapes:ChildRecord.size": None,
    "sglang.srt.shapes:ChildOfRecord": ("a", "b=", "c=", "*", "e", "f="),
    "sglang.srt.shapes:ChildOfRecord.total": (),
    "sglang.srt.shapes:Pair": ("left", "right="),
    "sglang.srt.shapes:Pair.left": None,
    "sglang.srt.shapes:Color": None,
    "sglang.srt.shapes:Color.RED": None,
    "sglang.srt.shapes:Color.parse": ("text",),
    "sglang.srt.shapes:Queue.size": None,
    "sglang.srt.package:function": ("deep",),
    "sglang.srt.package:move": ("target", "source"),
}
MISSING = {
    "sglang.srt.nowhere": "sglang.srt.nowhere",
    "sglang.srt.nowhere:plain": "sglang.srt.nowhere",
    "sglang.srt.shapes:absent": "sglang.srt.shapes has no absent",
    "sglang.srt.shapes:absent.method": "sglang.srt.shapes has no absent",
    "sglang.srt.shapes:OnlyForTypes": "sglang.srt.shapes has no OnlyForTypes",
    "sglang.srt.shapes:Plain.absent": "Plain has no absent",
    "sglang.srt.shapes:plain.absent": "plain is no class",
    "sglang.srt.shapes:Plain.texts()": "Plain calls no functions of a list texts",
    "sglang.srt.shapes:Child.listeners()": "Child calls no functions of a list listeners",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


@pytest.fixture
def wheel(folder):
    path = folder / "sglang-0.5.23-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in FILES:
            archive.write(folder / name, name)
    return path


@pytest.fixture
def installed(folder, monkeypatch):
    """The package as this process would import it; whatever SGLang was imported before comes back after."""
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "sglang"}
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield InstalledSGLang()
    for name in list(sys.modules):
        if name.partition(".")[0] == "sglang":
            del sys.modules[name]
    sys.modules.update(real)


def test_the_source_says_what_is_there(folder):
    source = open_source(folder)
    assert {path: source.find(path).parameters for path in PATHS} == PATHS


def test_an_import_says_the_same(installed):
    assert {path: installed.find(path).parameters for path in PATHS} == PATHS


INHERITED = {
    "sglang.srt.shapes:Child.late": "Plain",
    "sglang.srt.shapes:Child.held": "Plain",
    "sglang.srt.shapes:Child.method": "",
    "sglang.srt.shapes:ChildRecord.size": "Pool",
    "sglang.srt.shapes:ChildRecord.g": "",
    "sglang.srt.shapes:ChildOfRecord.e": "Record",
}


@pytest.mark.parametrize("path", INHERITED)
def test_a_member_of_a_base_is_told_from_the_class_s_own(folder, installed, path):
    for symbols in (open_source(folder), installed):
        assert symbols.find(path).inherited_from == INHERITED[path]


@pytest.mark.parametrize(
    "text",
    [
        "class A(A):\n    def f(self, a): ...",
        "class A(B):\n    def f(self, a): ...\nclass B(A): ...",
        "from sglang.srt.turn import B\nclass A(B):\n    def f(self, a): ...",
    ],
)
def test_a_class_that_seems_to_be_its_own_base_ends(folder, text):
    (folder / "sglang/srt/turn.py").write_text("from sglang.srt.circle import A\nclass B(A): ...")
    (folder / "sglang/srt/circle.py").write_text(text, encoding="utf-8")
    source = open_source(folder)
    assert source.find("sglang.srt.circle:A.f") == Symbol(("a",))
    assert source.find("sglang.srt.circle:A").parameters == ()
    with pytest.raises(SymbolMissing, match="A has no g"):
        source.find("sglang.srt.circle:A.g")


def test_a_diamond_of_records_has_the_fields_in_the_order_of_python(folder, installed):
    heads = ("A:\n    a: int", "B(A):\n    b: int", "C(A):\n    c: int", "D(B, C):\n    d: int")
    text = "".join(f"@dataclass\nclass {head}\n" for head in heads)
    (folder / "sglang/srt/diamond.py").write_text(f"from dataclasses import dataclass\n{text}")
    for symbols in (open_source(folder), installed):
        assert symbols.find("sglang.srt.diamond:D").parameters == ("a", "c", "b", "d")


@pytest.mark.parametrize("path", MISSING)
def test_a_path_that_leads_nowhere_says_why(folder, installed, path):
    for symbols in (open_source(folder), installed):
        with pytest.raises(SymbolMissing, match=MISSING[path]):
            symbols.find(path)


def test_a_module_that_fails_to_import_is_named_each_time(folder, installed):
    (folder / "sglang" / "srt" / "broken.py").write_text("raise RuntimeError('no driver')", encoding="utf-8")
    for name in ("a", "b"):
        with pytest.raises(SymbolMissing, match="broken cannot be imported: RuntimeError: no driver"):
            installed.find(f"sglang.srt.broken:{name}")


def test_names_of_other_packages_exist_without_parameters(folder):
    assert open_source(folder).find("sglang.srt.shapes:OrderedDict") == Symbol()


def test_a_wheel_is_read_like_the_folder(wheel):
    source = open_source(wheel)
    assert source.version() == "0.5.23"
    assert {path: source.find(path).parameters for path in PATHS} == PATHS


def test_an_imported_package_says_its_version(installed):
    assert installed.version() == "0.5.23"


@pytest.mark.parametrize("place", ["", "sglang"])
def test_the_package_is_found_in_and_as_a_folder(folder, place):
    assert open_source(folder / place).find("sglang.srt.pool:move").parameters == ("target", "source")


def test_the_package_is_found_in_a_git_checkout(folder):
    (folder / "python").mkdir()
    (folder / "sglang").rename(folder / "python" / "sglang")
    assert open_source(folder).find("sglang.srt.pool:Pool").parameters == ("size",)


def test_the_version_comes_from_the_distribution_where_the_package_names_none(folder):
    (folder / "sglang" / "_version.py").unlink()
    assert open_source(folder).version() is None
    (folder / "sglang-0.5.19.dist-info").mkdir()
    (folder / "sglang-0.5.19.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.19\n\nText")
    assert open_source(folder).version() == "0.5.19"


def test_paths_without_sglang_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        open_source(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no SGLang was found"):
        open_source(tmp_path)
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="cannot be read as a wheel"):
        open_source(broken)
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(ConfigError, match="has no sglang/"):
        open_source(other)
