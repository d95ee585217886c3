"""The drawing of a round's tree: which nodes, which marks, and token text that does no harm."""

import io
import math

from rich.console import Console

from ddtree.cli.tree_view import MAX_NODES, LongestPath, draw_tree, shown_nodes
from ddtree.stats import RoundStats

TEXTS = {0: "root", 1: " a", 2: "[red]", 3: "\n", 4: "\x1b[2J", 9: "end"}


def tree_round(tokens=(0, 1, 2, 3, 4), parents=(-1, 0, 0, 1, 2), accept=(0, 2, 4), mode="tree"):
    return RoundStats(
        mode=mode,
        node_budget=len(tokens) - 1,
        num_nodes=len(tokens) - 1,
        prefix_len=5,
        accept_tokens=(*(tokens[index] for index in accept[1:]), 9),
        round_ms=1.0,
        root_token=tokens[0],
        draft_tokens=tokens,
        parents=parents,
        log_probs=tuple(math.log(0.8) * index for index in range(len(tokens))),
        accept_indices=accept,
    )


def drawn(stats, width=80, encoding="utf-8", color_system=None):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=file, width=width, color_system=color_system, force_terminal=color_system is not None
    )
    console.print(draw_tree(stats, lambda token: TEXTS.get(token, f"t{token}")))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_drawing_marks_the_accepted_path_without_colour():
    assert drawn(tree_round()).splitlines() == [
        "* 'root' root",
        "├──   ' a' 80%",
        "│   └──   '\\n' 51%",
        "└── * '[red]' 64%",
        "    └── * '\\x1b[2J' 41%",
        "        └── + 'end'",
    ]


def test_a_round_without_a_match_hangs_the_bonus_token_on_the_root():
    lines = drawn(tree_round(accept=(0,))).splitlines()
    assert "└── + 'end'" in lines
    assert sum("*" in line for line in lines) == 1


def test_colour_is_only_an_addition():
    coloured = drawn(tree_round(), color_system="standard")
    assert "\x1b[1;32m" in coloured
    assert "\x1b[2J" not in coloured


def test_a_terminal_without_unicode_gets_an_ascii_tree():
    assert drawn(tree_round(), encoding="ascii").isascii()


def wide_round():
    """A root with 39 children in a row below the first of which the path runs at the end of the order."""
    num_nodes = 60
    parents = (-1, *[0] * 39, 39, *range(40, num_nodes))
    accept = (0, 39, 40, 41)
    return tree_round(tuple(range(num_nodes + 1)), parents, accept)


def test_a_large_tree_shows_its_path_and_its_likeliest_nodes():
    stats = wide_round()
    assert shown_nodes(stats) == [*range(MAX_NODES - 3), 39, 40, 41]
    text = drawn(stats)
    assert text.count("*") == 4
    assert f"... and {61 - MAX_NODES} less likely nodes" in text


def test_a_path_longer_than_the_limit_is_shown_whole():
    num_nodes = MAX_NODES + 12
    chain = tree_round(tuple(range(num_nodes)), tuple(range(-1, num_nodes - 1)), tuple(range(num_nodes)))
    assert shown_nodes(chain) == list(range(num_nodes))
    assert all(len(line) <= 60 for line in drawn(chain, width=60).splitlines())


def test_shown_nodes_have_their_parents():
    stats = wide_round()
    shown = shown_nodes(stats)
    assert all(stats.parents[node] in shown for node in shown[1:])


def test_the_longest_path_wins_and_the_first_of_equals():
    observer = LongestPath()
    short, long, other = tree_round(accept=(0, 1)), tree_round(accept=(0, 2, 4)), tree_round(accept=(0, 1, 3))
    chain = tree_round(tuple(range(8)), tuple(range(-1, 7)), tuple(range(8)), mode="chain")
    for stats in (short, chain, long, other):
        observer.on_round(stats)
    assert observer.best is long
    assert observer.round_index == 3
    assert observer.wants_trees
