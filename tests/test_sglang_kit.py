"""The kit of the tests against SGLang, as far as it runs without: its lock, its checks, its doubles."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_kit.checks import check_rounds, heap_accept_len, path_ranks
from sglang_kit.reference import cut, penalise

ROOT = Path(__file__).parents[1]
DOUBLES = Path(__file__).parent / "sglang_kit" / "doubles"
# Two draft positions: the text's tokens 7 and 8 are second, then first choice.
ROUND = {
    "prefix_len": 3,
    "root_token": 6,
    "tokens": [[5, 7], [8, 9]],
    "log_probs": [[math.log(0.6), math.log(0.4)], [math.log(0.9), math.log(0.1)]],
    "accept_len": 3,
}
TEXT = [1, 1, 1, 6, 7, 8, 4, 4]


def requirements(name):
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(r.name): r for r in map(Requirement, (x for x in lines if x and x[0] != "#"))}


def test_the_lock_pins_every_package():
    for requirement in requirements("sglang.lock").values():
        assert [s.operator for s in requirement.specifier] == ["=="], requirement
        assert "+" not in str(requirement.specifier), f"{requirement} names one build"


def test_the_lock_has_what_was_asked_for():
    lock = requirements("sglang.lock")
    for name, asked in requirements("sglang.in").items():
        pin = next(iter(lock[name].specifier)).version
        assert asked.specifier.contains(pin), f"{asked} against the lock's {pin}"


def test_rounds_are_checked_against_the_heap():
    # Nodes best first: 5 (0.6), 5 8 (0.54), 7 (0.4), 7 8 (0.36): the path needs all four.
    assert [heap_accept_len(ROUND, TEXT, budget) for budget in (1, 2, 3, 4)] == [1, 1, 2, 3]
    assert path_ranks(ROUND, TEXT) == [1, 0]
    check_rounds([ROUND], TEXT, node_budget=4, block_size=3)
    for wrong in ({"accept_len": 2}, {"root_token": 5}):
        with pytest.raises(AssertionError):
            check_rounds([ROUND | wrong], TEXT, node_budget=4, block_size=3)
    with pytest.raises(AssertionError):
        check_rounds([ROUND, ROUND], TEXT, node_budget=4, block_size=3)


def test_the_reference_cuts_as_the_parameters_say():
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    # Top-p keeps the token that crosses its bound; top-k and top-p look at the same sorted distribution.
    assert cut(probs, {"top_p": 0.5}).tolist() == pytest.approx([0, 0.4, 0, 0.3])
    assert cut(probs, {"top_k": 3, "top_p": 0.95}).tolist() == pytest.approx([0, 0.4, 0.2, 0.3])
    assert cut(probs, {"min_p": 0.6}).tolist() == pytest.approx([0, 0.4, 0, 0.3])


def test_the_reference_penalises_output():
    logits = torch.tensor([2.0, -2.0, 2.0, 1.0])
    params = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 2.0}
    assert penalise(logits.clone(), params, [0, 0, 1]).tolist() == [0.375, -5.5, 2.0, 1.0]
    assert penalise(logits.clone(), {"min_new_tokens": 2}, [0])[2] == -math.inf
    assert penalise(logits.clone(), {"min_new_tokens": 1}, [0])[2] == 2.0


@pytest.fixture(scope="module")
def sgl_kernel():
    path = DOUBLES / "sgl_kernel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("sgl_kernel_double", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_double_reads_and_writes_rows_of_the_token_table(sgl_kernel):
    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 6])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([11, 12, 13, 14]), 6)
    assert table[2].tolist() == [0, 11, 12, 0, 0, 0]
    assert table[0].tolist() == [0, 0, 0, 0, 13, 14]
    slots = torch.empty(4, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, 6)
    assert slots.tolist() == [11, 12, 13, 14]


def test_the_double_notices_a_row_that_is_too_short(sgl_kernel):
    table, slots = torch.zeros(2, 6, dtype=torch.int32), torch.empty(3, dtype=torch.int64)
    row, start, end = torch.tensor([0]), torch.tensor([4]), torch.tensor([7])
    with pytest.raises(IndexError, match="column 7 of a row of 6"):
        sgl_kernel.assign_extend_cache_locs_cpu(row, table, start, end, slots, 6)
    with pytest.raises(IndexError, match="neighbour"):
        sgl_kernel.assign_req_to_token_pool_cpu(row, table, start, end, slots, 6)


def test_the_double_names_what_it_lacks(sgl_kernel):
    with pytest.raises(NotImplementedError, match="verify_tree_greedy_cpu"):
        sgl_kernel.verify_tree_greedy_cpu()


def test_the_double_copies_rows_that_overlap(sgl_kernel):
    rows = torch.arange(8, dtype=torch.int32).view(4, 2)
    pointers, sizes = torch.tensor([rows.data_ptr()]), torch.tensor([8])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, sizes, torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert rows.tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]
