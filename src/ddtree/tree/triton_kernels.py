# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""The Triton kernels that build a tree and that walk it: one program of one warp a request.

Import it only where Triton is installed. `build_tree_kernel` is the paper's heap (arXiv 2604.12989,
Algorithm 1) with the order of invariants that `build_torch` sorts by: each node in the tree offers
its best child that is not in the tree yet, and the best offer becomes the next column. An offer is two
int32, both smaller for the better one: the bits of |score| (scores are at most 0), and the tie
depth | parent's column | rank. Parents of one depth have their columns in the order of their level,
so this is the order of the union, and pops come in it since a child and a next sibling are worse.
One warp holds all offers in registers: a pop is two warp-wide minima and two cached reads.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0x7FFFFFFF)  # no offer
INF_BITS = tl.constexpr(0x7F800000)  # of |-inf|
PARENT_SHIFT = tl.constexpr(9)  # of a tie's parts: a column and a rank stay below 2**9 - 1
DEPTH_SHIFT = tl.constexpr(18)
PART_MASK = tl.constexpr((1 << 9) - 1)
PARENT_ONE = tl.constexpr(1 << 9)
DEPTH_ONE = tl.constexpr(1 << 18)


@triton.jit
def _child_bits(scores, steps):
    """Bits of |score| of children, for their parents' scores and their own log-probabilities."""
    steps = tl.where(steps != steps, float("-inf"), tl.minimum(steps, 0.0))
    return (scores + steps).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _pop_nodes(log_probs_ptr, L: tl.constexpr, K: tl.constexpr, B: tl.constexpr, STEPS_PAD: tl.constexpr,
               W_PAD: tl.constexpr):  # fmt: skip
    """Scores, ties, first children and next siblings of all columns, each [W_PAD]; -1 for none."""
    columns = tl.arange(0, W_PAD)
    entries = tl.arange(0, STEPS_PAD)
    # Without a step there is no node. To look brings all steps into the cache, where the pops find them.
    steps = tl.load(log_probs_ptr + entries, mask=entries < L * K, other=float("-inf"))
    num_columns = 1 + B * tl.max((steps > float("-inf")).to(tl.int32), 0)
    scores = tl.where(columns == 0, 0.0, float("-inf"))
    offer_bits = tl.where(columns == 0, _child_bits(scores, tl.load(log_probs_ptr)), NONE)
    offer_ties = tl.where(columns == 0, DEPTH_ONE, NONE)
    ties = tl.full([W_PAD], -1, dtype=tl.int32)
    first_children = tl.full([W_PAD], -1, dtype=tl.int32)
    next_siblings = tl.full([W_PAD], -1, dtype=tl.int32)
    column = 1
    # Not range(): the interpreter of Triton 3.6 takes no tensor for a bound.
    while column < num_columns:
        bits = tl.min(offer_bits, 0)
        tie = tl.min(tl.where(offer_bits == bits, offer_ties, NONE), 0)
        is_node = bits < INF_BITS
        depth, parent, rank = tie >> DEPTH_SHIFT, (tie >> PARENT_SHIFT) & PART_MASK, tie & PART_MASK
        next_step = tl.load(
            log_probs_ptr + (depth - 1) * K + rank + 1, mask=is_node & (rank + 1 < K), other=float("-inf")
        )
        child_step = tl.load(log_probs_ptr + depth * K, mask=is_node & (depth < L), other=float("-inf"))
        score = tl.where(is_node, 0.0 - bits.to(tl.float32, bitcast=True), float("-inf"))
        is_new, is_parent = columns == column, (columns == parent) & is_node
        next_siblings = tl.where(is_node & (ties == tie - 1), column, next_siblings)
        first_children = tl.where(is_parent & (rank == 0), column, first_children)
        offer_bits = tl.where(is_parent, _child_bits(scores, next_step), offer_bits)
        offer_ties = tl.where(is_parent, tie + 1, offer_ties)
        offer_bits = tl.where(is_new, _child_bits(score, child_step), offer_bits)
        offer_ties = tl.where(is_new, (depth + 1) * DEPTH_ONE + column * PARENT_ONE, offer_ties)
        scores = tl.where(is_new, score, scores)
        ties = tl.where(is_new & is_node, tie, ties)
        column += 1
    return scores, ties, first_children, next_siblings


@triton.jit
def _clear(mask_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    for start in range(0, SIZE, BLOCK):
        tl.store(mask_ptr + start + block, tl.zeros([BLOCK], dtype=tl.uint8), mask=start + block < SIZE)


@triton.jit
def _mark_ancestors(mask_ptr, parents, depths, W: tl.constexpr, W_PAD: tl.constexpr):
    """Ones at each column's own place and at its ancestors', in a mask of zeros."""
    columns = tl.arange(0, W_PAD)
    ones = tl.full([W_PAD], 1, dtype=tl.uint8)
    ancestors = columns
    num_left = tl.max(depths, 0) + 1
    while num_left > 0:
        is_ancestor = (columns < W) & (ancestors >= 0)
        tl.store(mask_ptr + columns * W + ancestors, ones, mask=is_ancestor)
        above = tl.gather(parents, tl.maximum(ancestors, 0), 0)
        ancestors = tl.where(is_ancestor, above, -1)
        num_left -= 1


@triton.jit
def build_tree_kernel(
    tokens_ptr,  # [bs, L, K] int64
    log_probs_ptr,  # [bs, L, K] float32
    root_tokens_ptr,  # [bs]
    prefix_lens_ptr,  # [bs]
    trees_ptr,  # [3, bs, W] int64: tokens, parents, depths
    tree_log_probs_ptr,  # [bs, W] float32
    layouts_ptr,  # [3, bs, W] int64: positions, next_token, next_sibling
    masks_ptr,  # [bs, W, W] uint8
    L: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    STEPS_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
):
    """Tree, mask, positions and links of request `program_id(0)`."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    W: tl.constexpr = B + 1
    mask_ptr = masks_ptr + row * W * W
    _clear(mask_ptr, W * W, MASK_BLOCK)
    scores, ties, first_children, next_siblings = _pop_nodes(
        log_probs_ptr + row * L * K, L, K, B, STEPS_PAD, W_PAD
    )
    columns = tl.arange(0, W_PAD)
    is_column, is_node, is_root = columns < W, ties >= 0, columns == 0
    parents = tl.where(is_node, (ties >> PARENT_SHIFT) & PART_MASK, -1)
    depths = tl.where(is_node, ties >> DEPTH_SHIFT, 0)
    entries = (depths - 1) * K + (ties & PART_MASK)
    tokens = tl.load(tokens_ptr + row * L * K + entries, mask=is_node, other=0)
    tokens = tl.where(is_root, tl.load(root_tokens_ptr + row).to(tl.int64), tokens)
    tree_ptr, layout_ptr = trees_ptr + row * W + columns, layouts_ptr + row * W + columns
    positions = tl.load(prefix_lens_ptr + row).to(tl.int64) + depths
    tl.store(tree_ptr, tokens, mask=is_column)
    tl.store(tree_ptr + num_rows * W, parents.to(tl.int64), mask=is_column)
    tl.store(tree_ptr + 2 * num_rows * W, depths.to(tl.int64), mask=is_column)
    tl.store(tree_log_probs_ptr + row * W + columns, scores, mask=is_column)
    tl.store(layout_ptr, positions, mask=is_column)
    tl.store(layout_ptr + num_rows * W, first_children.to(tl.int64), mask=is_column)
    tl.store(layout_ptr + 2 * num_rows * W, next_siblings.to(tl.int64), mask=is_column)
    tl.debug_barrier()  # between the zeros of the mask and its ones
    _mark_ancestors(mask_ptr, parents, depths, W, W_PAD)


@triton.jit
def walk_kernel(
    tokens_ptr,  # [bs, W] int64
    parents_ptr,  # [bs, W] int64
    target_tokens_ptr,  # [bs, W] int64
    paths_ptr,  # [2, bs, SLOTS] int64: accept_indices, accept_tokens
    ends_ptr,  # [2, bs] int64: bonus_tokens, num_correct_drafts
    tokens_stride,
    parents_stride,
    targets_stride,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
):
    """From the root to the child that carries the target's choice, while there is one."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    columns, slots = tl.arange(0, W_PAD), tl.arange(0, SLOTS_PAD)
    is_column = columns < W
    tokens = tl.load(tokens_ptr + row * tokens_stride + columns, mask=is_column, other=0)
    parents = tl.load(parents_ptr + row * parents_stride + columns, mask=is_column, other=-1).to(tl.int32)
    targets_ptr = target_tokens_ptr + row * targets_stride
    expected = tl.load(targets_ptr + tl.maximum(parents, 0), mask=is_column, other=0)
    # What a walk can enter: columns that carry the target's choice after their parent.
    parents = tl.where(tokens == expected, parents, -1)
    path = tl.where(slots == 0, 0, -1)
    last, num_correct_drafts = 0, 0
    child = tl.min(tl.where(parents == 0, columns, W_PAD), 0)
    while (child < W_PAD) & (num_correct_drafts < SLOTS - 1):
        num_correct_drafts += 1
        path = tl.where(slots == num_correct_drafts, child, path)
        last = child
        child = tl.min(tl.where(parents == last, columns, W_PAD), 0)
    is_slot, is_path = slots < SLOTS, path >= 0
    accept_tokens = tl.load(targets_ptr + path, mask=is_path, other=-1)
    tl.store(paths_ptr + row * SLOTS + slots, path.to(tl.int64), mask=is_slot)
    tl.store(paths_ptr + (num_rows + row) * SLOTS + slots, accept_tokens, mask=is_slot)
    tl.store(ends_ptr + row, tl.load(targets_ptr + last))
    tl.store(ends_ptr + num_rows + row, num_correct_drafts)
