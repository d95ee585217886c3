"""What each token of a window sees, and where its keys and values go."""

import pytest
import torch

from ddtree.layers.window import Window
from layer_kit import make_window, random_tree


def seen_by_loop(window, prefix_len, mask, sliding_window):
    """`Window.visible` written as the definition reads."""
    n, positions = window.num_tokens, window.positions.tolist()
    rows = []
    for i in range(n):
        row = []
        for slot in range(window.kv_extent):
            j = slot - prefix_len
            sees = slot < prefix_len or (j < n and (bool(mask[i, j]) if mask is not None else j <= i))
            key_position = slot if j < 0 or j >= n else positions[j]
            if sliding_window is not None:
                sees = sees and abs(positions[i] - key_position) < sliding_window
            row.append(sees)
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("kind", ["causal", "full", "tree"])
@pytest.mark.parametrize("kv_extent", [None, 32])
@pytest.mark.parametrize("sliding_window", [None, 1, 4])
@pytest.mark.parametrize("prefix_len", [0, 11])
def test_visible_is_prefix_and_mask(kind, kv_extent, sliding_window, prefix_len):
    window = make_window(7, prefix_len, kind, kv_extent=kv_extent)
    expected = seen_by_loop(window, prefix_len, window.tree_mask, sliding_window)
    assert torch.equal(window.visible(sliding_window), expected)


def test_siblings_do_not_see_each_other():
    depths, mask = random_tree(9, seed=3)
    window = Window.at(4, 4 + depths, mask)
    visible = window.visible()
    for i in range(9):
        for j in range(9):
            if i != j and depths[i] == depths[j]:
                assert not visible[i, 4 + j]


def test_additive_mask_is_zero_where_visible():
    window = make_window(5, 3, "tree")
    mask = window.additive_mask(torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask == 0, window.visible())
    assert torch.equal(mask == float("-inf"), ~window.visible())


@pytest.mark.parametrize("kv_extent", [None, 16])
def test_write_touches_only_the_windows_slots(kv_extent):
    window = make_window(4, 6, "causal", kv_extent=kv_extent)
    cache = torch.zeros(2, 16, 3)
    rows = torch.randn(2, 4, 3)
    window.write(cache, rows)
    assert torch.equal(cache[:, 6:10], rows)
    cache[:, 6:10] = 0
    assert not cache.any()


def test_slots_follow_the_device_prefix():
    window = make_window(3, 5, "causal", kv_extent=16)
    assert window.slots().tolist() == [5, 6, 7]
    window.prefix_len.fill_(9)  # what a graph's caller does between replays
    assert window.slots().tolist() == [9, 10, 11]
    assert window.visible().sum(1).tolist() == [10, 11, 12]
