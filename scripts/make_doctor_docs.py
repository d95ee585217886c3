"""Writes the doctor's output and the table of backends in docs/doctor.md from the doctor itself.

The installations that it looks at are the fakes of `tests/doctor_kit.py`.

Run: python scripts/make_doctor_docs.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ddtree.doctor.backends import default_backend, family_of, usable_backends
from ddtree.doctor.examine import examine
from ddtree.doctor.plan import Plan
from ddtree.doctor.report import Finding, Section
from ddtree.doctor.text import section_lines

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

# Behind the line that makes it importable: the page shows the installations of the tests.
from doctor_kit import RTX_PRO_6000, around, install_plugin, install_wheel, users_layout  # noqa: E402

PAGE = ROOT / "docs" / "doctor.md"
HOME = "/home/user"
WIDTH = 100
CUDA = (12, 8)
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))


def render(page: str) -> str:
    """The page with its generated parts made anew."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        source, site = users_layout(home)
        parts = {
            "source tree": shown(home, source, site),
            "site-packages": shown(home, site, names=("installation", "dflash")),
        }
        shutil.rmtree(site)
        install_wheel(site)
        install_plugin(site)
        parts["upgraded"] = shown(home, site, names=("installation", "dflash"))
    parts["backends"] = backends_table()
    for name, text in parts.items():
        page = replace_part(page, name, text)
    return page


def shown(
    home: Path, *entries: Path, names: tuple[str, ...] = ("installation", "sglang", "dflash", "backends")
) -> str:
    """Some sections of a report on a path of these folders, without the table of the contract."""
    report = examine(Plan(), around(*entries, cwd=home, gpus=[RTX_PRO_6000] * 8))
    lines: list[str] = []
    for section in report.sections:
        if section.name in names:
            told = section if section.name != "sglang" else replace(section, lines=())
            lines += [*map(plain, section_lines(without(home, told), WIDTH)), ""]
    return "\n".join(["```", *lines[:-1], "```", ""])


def plain(line: tuple[str | None, str]) -> str:
    level, text = line
    return f"  {level:<6}{text[8:]}" if level else text


def without(home: Path, section: Section) -> Section:
    """The section with the folder that it was made in called `HOME`."""

    def told(finding: Finding) -> Finding:
        texts = (finding.what, finding.why, finding.todo)
        what, why, todo = (text.replace(str(home), HOME) for text in texts)
        return replace(finding, what=what, why=why, todo=todo)

    return replace(section, findings=tuple(map(told, section.findings)))


def backends_table() -> str:
    """One row a GPU family: what SGLang chooses for a plain target, and what fits a tree."""
    rows = ["| GPU | SGLang chooses | it fits | fit a tree |", "| --- | --- | --- | --- |"]
    for capability in CAPABILITIES:
        default = default_backend(capability, CUDA, None, has_flashinfer=True)
        fits = [u.name for u in usable_backends(capability, has_flashinfer=True) if u.is_usable]
        is_fit = "yes" if default in fits else "no"
        rows.append(f"| {family_of(capability)} | {default} | {is_fit} | {', '.join(fits)} |")
    return "\n".join([*rows, ""])


def replace_part(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}: made by scripts/make_doctor_docs.py -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + text + end + after


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
