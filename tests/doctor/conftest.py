"""A contract of a few rows, which small fakes of SGLang can keep."""

import pytest

from ddtree.sglang_plugin import contract
from ddtree.sglang_plugin.contract_rules import called, fields, optional, overridden

TABLE = (
    *called("sglang.srt.small:call", "a"),
    *overridden("sglang.srt.speculative.dflash_worker_v2:Worker", "run", "batch"),
    *optional("colours", fields("sglang.srt.other:D", "y")),
)
SMALL = {
    "sglang/srt/small.py": "def call(a, b=1): ...\n",
    "sglang/srt/speculative/dflash_worker_v2.py": "class Worker:\n    def run(self, batch): ...\n",
    "sglang/srt/other.py": "class D:\n    y = 1\n",
}


@pytest.fixture
def small_contract(monkeypatch):
    """Files that keep the contract, which has a few rows only; by name, to be written over a fake package."""
    report = contract.make_report
    monkeypatch.setattr(contract, "make_report", lambda *arguments: report(*arguments, TABLE))
    monkeypatch.delenv(contract.ALLOW_UNTESTED, raising=False)
    return dict(SMALL)
