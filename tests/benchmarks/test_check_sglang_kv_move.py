"""check_sglang_kv_move passes the plugin's move and finds wrong ones."""

import pytest
import torch

import check_sglang_kv_move
from check_sglang_kv_move import as_bytes, check

CPU = torch.device("cpu")


def nothing():
    return None


def test_the_plugins_move_passes():
    found = check(25, 0, CPU, nothing)
    assert found["different"] == []
    assert found["planted_fault_found"]
    assert found["rows_moved"] > 100


def move_nothing(buffers, window, accept_indices):
    return None


def move_one_column_less(buffers, window, accept_indices):
    move_accept_kv(buffers, window, accept_indices[:, :-1])


def touch_another_slot(buffers, window, accept_indices):
    move_accept_kv(buffers, window, accept_indices)
    as_bytes(buffers[-1])[window[0, -1], -1] ^= 1


move_accept_kv = check_sglang_kv_move.move_accept_kv


@pytest.mark.parametrize("fault", [move_nothing, move_one_column_less, touch_another_slot])
def test_a_wrong_move_is_found(fault, monkeypatch):
    monkeypatch.setattr(check_sglang_kv_move, "move_accept_kv", fault)
    assert check(10, 0, CPU, nothing)["different"]
