# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""The Triton kernel of tree building: one program a request, the steps of `build_torch` in order.

Import it only where Triton is installed. Programs talk to themselves through scratch in global
memory, with a barrier wherever one thread reads what another wrote. A candidate is packed as a
pair, parent index << 8 | rank.
"""

import triton
import triton.language as tl


@triton.jit
def _grow_levels(
    log_probs_ptr,  # [L, K] float32
    pairs_ptr,  # [NUM_PAIRS] int32
    keys_ptr,  # [PAIRS_PAD] int64 scratch
    scores_ptr,  # [(L + 1) * B] float32 scratch, level by level, the root's first
    node_pairs_ptr,  # [(L + 1) * B] int32 scratch
    L: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
) -> None:
    """The B best of each level; a candidate's rank is the number of candidates before it."""
    candidates = tl.arange(0, PAIRS_PAD)
    is_candidate = candidates < NUM_PAIRS
    pairs = tl.load(pairs_ptr + candidates, mask=is_candidate, other=0)
    for level in range(L):
        steps = tl.load(log_probs_ptr + level * K + (pairs & 255), mask=is_candidate, other=float("-inf"))
        steps = tl.where(steps != steps, float("-inf"), tl.minimum(steps, 0.0))
        scores = steps + tl.load(scores_ptr + level * B + (pairs >> 8))
        # Scores are at most 0: the bits of |score| ascend as the score descends. The place breaks ties.
        keys = (scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) << 32
        keys = tl.where(is_candidate, keys | candidates.to(tl.int64), 0x7FFFFFFFFFFFFFFF)
        tl.store(keys_ptr + candidates, keys)
        tl.debug_barrier()
        ranks = tl.zeros([PAIRS_PAD], dtype=tl.int32)
        for start in range(0, NUM_PAIRS, 8):
            for offset in tl.static_range(8):
                ranks += (tl.load(keys_ptr + start + offset) < keys).to(tl.int32)
        nodes = (level + 1) * B + ranks
        is_kept = is_candidate & (ranks < B)
        tl.store(scores_ptr + nodes, scores, mask=is_kept)
        tl.store(node_pairs_ptr + nodes, pairs, mask=is_kept)
        tl.debug_barrier()


@triton.jit
def _rank_nodes(
    scores_ptr,
    scores,
    levels,
    places,
    L: tl.constexpr,
    B: tl.constexpr,
    B_BITS: tl.constexpr,
) -> tl.tensor:
    """Each node's rank among all levels: its place in its own, plus a binary search in each other one."""
    ranks = places
    for other in range(L):
        num_ahead = tl.zeros_like(places)
        for bit in tl.static_range(B_BITS):
            probe = num_ahead + (1 << (B_BITS - 1 - bit))
            others = tl.load(scores_ptr + (other + 1) * B + probe - 1, mask=probe <= B, other=float("-inf"))
            is_ahead = (others > scores) | ((others == scores) & (other < levels))
            num_ahead = tl.where((probe <= B) & is_ahead, probe, num_ahead)
        ranks += tl.where(other == levels, 0, num_ahead)
    return ranks


@triton.jit
def _write_tree(
    tokens_ptr,  # [L, K] int64
    scores_ptr,
    node_pairs_ptr,
    columns_ptr,  # [(L + 1) * B] int32 scratch
    tree_tokens_ptr,
    tree_parents_ptr,
    tree_depths_ptr,
    tree_log_probs_ptr,
    L: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    B_BITS: tl.constexpr,
    NODES_PAD: tl.constexpr,
) -> None:
    """The B best nodes of all levels, each at the column of its rank."""
    index = tl.arange(0, NODES_PAD)
    is_real = index < L * B
    levels = index // B
    nodes = index + B  # behind the root's level
    scores = tl.load(scores_ptr + nodes, mask=is_real, other=float("-inf"))
    columns = _rank_nodes(scores_ptr, scores, levels, index % B, L, B, B_BITS) + 1
    is_chosen = is_real & (columns <= B) & (scores > float("-inf"))
    tl.store(columns_ptr + nodes, columns, mask=is_chosen)
    tl.debug_barrier()
    pairs = tl.load(node_pairs_ptr + nodes, mask=is_chosen, other=0)
    parents = tl.load(columns_ptr + levels * B + (pairs >> 8), mask=is_chosen, other=0)
    tokens = tl.load(tokens_ptr + levels * K + (pairs & 255), mask=is_chosen, other=0)
    tl.store(tree_tokens_ptr + columns, tokens, mask=is_chosen)
    tl.store(tree_parents_ptr + columns, parents.to(tl.int64), mask=is_chosen)
    tl.store(tree_depths_ptr + columns, (levels + 1).to(tl.int64), mask=is_chosen)
    tl.store(tree_log_probs_ptr + columns, scores, mask=is_chosen)


@triton.jit
def _write_layout(
    prefix_len,
    tree_parents_ptr,
    tree_depths_ptr,
    positions_ptr,  # [W] int64
    mask_ptr,  # [W, W] uint8, zeros
    next_token_ptr,  # [W] int64
    next_sibling_ptr,  # [W] int64
    L: tl.constexpr,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
) -> None:
    """Positions, ancestor mask and links of the tree at `tree_parents_ptr`."""
    columns = tl.arange(0, W_PAD)
    is_column = columns < W
    parents = tl.load(tree_parents_ptr + columns, mask=is_column, other=-1).to(tl.int32)
    depths = tl.load(tree_depths_ptr + columns, mask=is_column, other=0)
    tl.store(positions_ptr + columns, prefix_len + depths, mask=is_column)
    ancestors = columns
    for _ in range(L + 1):
        is_ancestor = is_column & (ancestors >= 0)
        ones = tl.full([W_PAD], 1, dtype=tl.uint8)
        tl.store(mask_ptr + columns * W + ancestors, ones, mask=is_ancestor)
        ancestors = tl.load(tree_parents_ptr + ancestors, mask=is_ancestor, other=-1).to(tl.int32)
    next_token = tl.full([W_PAD], -1, dtype=tl.int32)
    next_sibling = tl.full([W_PAD], -1, dtype=tl.int32)
    for back in range(1, W):
        other = W - back  # from the last column down, so that the lowest column is written last
        parent = tl.load(tree_parents_ptr + other).to(tl.int32)
        next_token = tl.where(columns == parent, other, next_token)
        is_sibling = (parents == parent) & (parents >= 0) & (columns < other)
        next_sibling = tl.where(is_sibling, other, next_sibling)
    tl.store(next_token_ptr + columns, next_token.to(tl.int64), mask=is_column)
    tl.store(next_sibling_ptr + columns, next_sibling.to(tl.int64), mask=is_column)


@triton.jit
def _fill(
    root_token,
    scores_ptr,
    columns_ptr,
    tree_tokens_ptr,
    tree_parents_ptr,
    tree_depths_ptr,
    tree_log_probs_ptr,
    mask_ptr,
    B: tl.constexpr,
    NUM_NODES: tl.constexpr,
    W_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A tree of the root alone, levels without nodes, a mask without ancestors."""
    block = tl.arange(0, BLOCK)
    for start in range(0, NUM_NODES, BLOCK):
        nodes = start + block
        tl.store(scores_ptr + nodes, tl.where(nodes == 0, 0.0, float("-inf")), mask=nodes < NUM_NODES)
    for start in range(0, (B + 1) * (B + 1), BLOCK):
        zeros = tl.zeros([BLOCK], dtype=tl.uint8)
        tl.store(mask_ptr + start + block, zeros, mask=start + block < (B + 1) * (B + 1))
    tl.store(columns_ptr, 0)
    columns = tl.arange(0, W_PAD)
    is_column = columns <= B
    is_root = columns == 0
    zeros = tl.zeros([W_PAD], dtype=tl.int64)
    tl.store(tree_tokens_ptr + columns, tl.where(is_root, root_token, zeros), mask=is_column)
    tl.store(tree_parents_ptr + columns, zeros - 1, mask=is_column)
    tl.store(tree_depths_ptr + columns, zeros, mask=is_column)
    tl.store(tree_log_probs_ptr + columns, tl.where(is_root, 0.0, float("-inf")), mask=is_column)
    tl.debug_barrier()


@triton.jit
def build_tree_kernel(
    tokens_ptr,  # [bs, L, K] int64
    log_probs_ptr,  # [bs, L, K] float32
    root_tokens_ptr,  # [bs]
    prefix_lens_ptr,  # [bs]
    pairs_ptr,  # [NUM_PAIRS] int32
    keys_ptr,  # [bs, PAIRS_PAD] int64 scratch
    scores_ptr,  # [bs, (L + 1) * B] float32 scratch
    nodes_ptr,  # [bs, 2, (L + 1) * B] int32 scratch
    trees_ptr,  # [3, bs, W] int64: tokens, parents, depths
    tree_log_probs_ptr,  # [bs, W] float32
    layouts_ptr,  # [3, bs, W] int64: positions, next_token, next_sibling
    masks_ptr,  # [bs, W, W] uint8
    L: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    B_BITS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    NODES_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Tree, mask, positions and links of request `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    W: tl.constexpr = B + 1
    NUM_NODES: tl.constexpr = (L + 1) * B
    scores_ptr += row * NUM_NODES
    node_pairs_ptr = nodes_ptr + row * 2 * NUM_NODES
    columns_ptr = node_pairs_ptr + NUM_NODES
    tree_tokens_ptr = trees_ptr + row * W
    tree_parents_ptr = tree_tokens_ptr + num_rows * W
    tree_depths_ptr = tree_parents_ptr + num_rows * W
    tree_log_probs_ptr += row * W
    positions_ptr = layouts_ptr + row * W
    mask_ptr = masks_ptr + row * W * W
    _fill(
        tl.load(root_tokens_ptr + row).to(tl.int64), scores_ptr, columns_ptr,
        tree_tokens_ptr, tree_parents_ptr, tree_depths_ptr, tree_log_probs_ptr, mask_ptr,
        B, NUM_NODES, W_PAD, BLOCK,
    )  # fmt: skip
    _grow_levels(
        log_probs_ptr + row * L * K, pairs_ptr, keys_ptr + row * PAIRS_PAD, scores_ptr, node_pairs_ptr,
        L, K, B, NUM_PAIRS, PAIRS_PAD,
    )  # fmt: skip
    _write_tree(
        tokens_ptr + row * L * K, scores_ptr, node_pairs_ptr, columns_ptr,
        tree_tokens_ptr, tree_parents_ptr, tree_depths_ptr, tree_log_probs_ptr,
        L, K, B, B_BITS, NODES_PAD,
    )  # fmt: skip
    tl.debug_barrier()
    _write_layout(
        tl.load(prefix_lens_ptr + row).to(tl.int64), tree_parents_ptr, tree_depths_ptr,
        positions_ptr, mask_ptr, positions_ptr + num_rows * W, positions_ptr + 2 * num_rows * W,
        L, W, W_PAD,
    )  # fmt: skip
