"""docs/doctor.md has the doctor's own output."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_doctor_docs.py"


def test_the_page_is_current():
    spec = spec_from_file_location("make_doctor_docs", SCRIPT)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.render(page), "run: python scripts/make_doctor_docs.py"
    assert "  warn  3 files differ from the wheel's\n" in page
    assert "| Blackwell workstation (sm120) | flashinfer | yes | triton, flashinfer |" in page
