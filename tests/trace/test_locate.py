"""Where requests go wrong first, and what follows from it, on rounds that are known."""

from dataclasses import replace

import pytest
import torch

from ddtree.trace.causes import ignored_parameters, without_each
from ddtree.trace.figures import FigureCheck
from ddtree.trace.findings import kinds_of
from ddtree.trace.locate import FirstWrong, located, places_of
from ddtree.trace.outputs import Output, Sampling
from ddtree.trace.replay import Violation
from ddtree.trace.run_file import Answer
from ddtree.trace_format import TraceRound

PROMPT = (1, 2, 3)
PARENTS = (-1, 0, 0, 1, 2)  # nodes 1 and 2 are siblings; 3 is the first child of 1, in column 3 at depth 2
FRONT, FIRST_CHILDREN, SIBLING = (0, 1), (0, 1, 3), (0, 2, 4)


def answer(*paths, has_trees=True, name="r0"):
    """An output of rounds with these paths."""
    rounds, position = [], len(PROMPT)
    for number, path in enumerate(paths, 1):
        tree = {"tokens": (9,) * 5, "parents": PARENTS, "log_probs": (0.0,) * 5} if has_trees else {}
        rounds.append(TraceRound("r0", number, position, 9, "tree", 4, (9,) * len(path), path, 1.0, **tree))
        position += len(path)
    tokens = (9,) * (position - len(PROMPT) + 1)
    return Answer(Output(PROMPT, tokens, {"temperature": 0.0}, name), rounds=tuple(rounds))


def test_every_token_has_the_node_that_gave_it():
    places = dict(places_of(answer(FRONT, FIRST_CHILDREN, SIBLING)))
    assert sorted(places) == list(range(9))
    assert [(p.round_index, p.depth, p.column) for p in places.values()] == [
        (-1, 0, 0), (0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1), (1, 2, 3), (2, 0, 0), (2, 1, 2), (2, 2, 4),
    ]  # fmt: skip
    assert [number for number, p in places.items() if p.has_sibling] == [7, 8]
    assert [number for number, p in places.items() if p.has_moved] == [6, 7, 8]


@pytest.mark.parametrize(
    ("wrong", "kinds"),
    [
        # A sibling's node is wrong, while one off its column without a sibling was right before.
        ([(answer(FIRST_CHILDREN, SIBLING), 5)], ["verify_mask"]),
        # The same without that one: mask and positions look alike.
        ([(answer(FRONT, SIBLING), 4)], ["verify_window"]),
        ([(answer(SIBLING, has_trees=False), 2)], ["verify_window"]),
        ([(answer(FIRST_CHILDREN), 3)], ["verify_positions"]),
        # Positions explain the one with a sibling, too.
        ([(answer(FIRST_CHILDREN), 3), (answer(SIBLING), 2)], ["verify_positions"]),
        ([(answer(FRONT, SIBLING, FRONT), 6)], ["commit_kv"]),
        ([(answer(FRONT, FRONT), 3)], ["foreign_kv"]),
        # What overwrites KV where nothing moved may have done it where something did.
        ([(answer(FRONT, FRONT), 3), (answer(SIBLING, FRONT), 4)], ["foreign_kv"]),
        ([(answer(FRONT), 0)], ["first_token"]),
        ([(answer(FRONT), 1)], ["first_token"]),
        ([(answer(FRONT), 2)], ["verify_window"]),
        ([(answer(FRONT), None)], []),
    ],
)
def test_where_requests_are_first_wrong_says_what_is(wrong, kinds):
    assert kinds_of(located([FirstWrong(*each) for each in wrong])) == kinds


def test_what_tells_kinds_apart_is_in_the_sentence():
    (found,) = located([FirstWrong(answer(FIRST_CHILDREN, SIBLING), 5), FirstWrong(answer(FRONT), None)])
    assert (
        "1 of 1 wrong request first wrong there, as r0 at token 5, round 2, depth 1, column 2" in found.text
    )
    (found,) = located([FirstWrong(answer(SIBLING, FRONT), 4)])
    assert "foreign_kv is possible, too" in found.text


def test_figures_are_compared_token_by_token():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    own = logits.log_softmax(-1)[:, 9].tolist()
    told = [None, (own[1] + 0.05, 1.0), (float("nan"), 1.0)]
    output = Output(PROMPT, (9, 9, 9), {"temperature": 0.0}, "r3")
    for slack, off in ((0.01, [1]), (0.1, [])):
        check = FigureCheck([Answer(output, margins=tuple(told))], slack)
        check.add(0, logits)
        assert (check.off, check.largest) == ({0: off}, pytest.approx(0.05, abs=1e-5))
        assert kinds_of(list(check.findings())) == ["figures"] * len(off)
    check = FigureCheck([Answer(output)], 0.01)
    check.add(0, logits)
    assert check.off == {}


# -- parameters ------------------------------------------------------------------------------------


def test_each_parameter_with_an_effect_is_left_out_alone():
    kept = Sampling(temperature=0.7, top_k=5, min_p=0.1, seed=3)
    sampling = replace(kept, frequency_penalty=1.0, presence_penalty=1.0)
    tried = dict(without_each(sampling))
    assert list(tried) == [
        "top_k", "min_p", "presence_penalty", "frequency_penalty", "penalties", "temperature",
        "temperature (greedy instead)",
    ]  # fmt: skip
    assert tried["penalties"] == kept
    assert tried["temperature"].temperature == 1.0
    assert list(without_each(Sampling(temperature=0.0))) == []


class Explained:
    """A replayer by which outputs' wrong tokens follow without the parameters that they are told to."""

    def __init__(self, without):
        self.without = without

    def logits(self, outputs):
        return ((number, torch.zeros(4, 8)) for number in range(len(outputs)))

    def gaps(self, output, eps, logits, sampling):
        full = output.read_sampling()
        left = {name for name in ("min_p", "top_k") if getattr(sampling, name) != getattr(full, name)}
        return torch.full((4,), 0.0 if left & self.without[output.name] else 1.0), None


def ignored(*outputs):
    """For each output its sampling, and the parameters that explain it."""
    answers = [
        Answer(Output(PROMPT, (9,) * 4, {"temperature": 1.0, "seed": 1, **sampling}, f"r{number}"))
        for number, (sampling, _) in enumerate(outputs)
    ]
    replayer = Explained({f"r{number}": without for number, (_, without) in enumerate(outputs)})
    wrong = {index: [Violation(2, 5, 9, 8, 1.0)] for index in range(len(answers))}
    return ignored_parameters(replayer, answers, wrong, 1e-3)


def test_a_parameter_is_named_where_it_explains_most_outputs_that_have_it():
    both = {"min_p": 0.1, "top_k": 5}
    assert ignored(({"min_p": 0.1}, {"min_p"}), ({"top_k": 5}, set())) == {"min_p": [0]}
    assert ignored((both, {"min_p", "top_k"}), ({"min_p": 0.1}, {"min_p"})) == {"min_p": [0, 1]}
    by_chance = [({"min_p": 0.1}, {"min_p"} if number < 3 else set()) for number in range(9)]
    assert ignored(*by_chance) == {}
