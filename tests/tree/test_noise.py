import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.tree.noise import draw, keyed_gumbel, keyed_uniform, reference_uniform

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(seed=INT64, position=st.integers(0, 2**40), token=st.integers(0, 2**20))
def test_uniforms_follow_the_recipe(seed, position, token):
    uniform = keyed_uniform(torch.tensor(seed), torch.tensor(position), torch.tensor([token]))
    assert uniform.tolist() == [reference_uniform(seed, position, token)]


def test_the_recipe_does_not_change():
    """A seed must give the same text in every version and in every engine."""
    assert reference_uniform(0, 0, 0) == 0.33805245419550556
    assert reference_uniform(42, 1000, 49151) == 0.47587572790687405
    assert reference_uniform(-1, 7, 0) == 0.0371896722462296


def test_noise_does_not_depend_on_the_batch():
    seeds, positions, tokens = torch.tensor([[3], [3], [9]]), torch.tensor([[5, 6, 7]]), torch.arange(50)
    together = keyed_gumbel(seeds, positions, tokens)
    assert together.shape == (3, 3, 50)
    for i in range(3):
        for j in range(3):
            alone = keyed_gumbel(seeds[i, 0], positions[0, j], tokens.flip(0)[:20])
            assert torch.equal(alone, together[i, j].flip(0)[:20])
    assert torch.equal(together[0], together[1])


def test_noise_leaves_its_keys_alone():
    seeds, positions, tokens = torch.tensor([1, 2]), torch.tensor([3, 4]), torch.arange(5)
    keyed_gumbel(seeds, positions, tokens)
    assert (seeds.tolist(), positions.tolist(), tokens.tolist()) == ([1, 2], [3, 4], [0, 1, 2, 3, 4])


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """(G - dof) / sqrt(2 dof): about standard normal if `counts` are draws from `expected`."""
    seen = counts > 0
    g = 2 * (counts[seen] * np.log(counts[seen] / expected[seen])).sum()
    dof = len(expected) - 1
    return float((g - dof) / np.sqrt(2 * dof))


def test_uniforms_are_uniform_along_every_key():
    fixed = torch.tensor(17)
    many = torch.arange(1 << 17)
    along_tokens = keyed_uniform(fixed, fixed, many)
    along_positions = keyed_uniform(fixed, many, torch.tensor([17]))[:, 0]
    along_seeds = keyed_uniform(many, fixed, torch.tensor([17]))[:, 0]
    for uniforms in (along_tokens, along_positions, along_seeds):
        assert uniforms.min() > 0
        assert uniforms.max() < 1
        pairs = (uniforms[:-1] * 16).long() * 16 + (uniforms[1:] * 16).long()
        counts = torch.bincount(pairs, minlength=256).double().numpy()
        assert abs(chi_square(counts, np.full(256, counts.sum() / 256))) < 5


def test_draws_have_the_targets_distribution():
    """A G-test that noise of one rank too many, or of the wrong scale, fails by far."""
    probs = torch.tensor([0.45, 0.0, 0.2, 0.15, 0.1, 0.06, 0.03, 0.01])
    log_probs = probs.log().expand(200_000, -1)
    seeds = torch.arange(200_000) % 1000
    positions = torch.arange(200_000) // 1000
    counts = torch.bincount(draw(log_probs, seeds, positions), minlength=8).double().numpy()
    assert counts[1] == 0
    keep = probs.numpy() > 0
    assert abs(chi_square(counts[keep], probs.numpy()[keep] * 200_000)) < 5
    biased = torch.bincount(draw(log_probs * 0.95, seeds, positions), minlength=8).double().numpy()
    assert chi_square(biased[keep], probs.numpy()[keep] * 200_000) > 20


def test_a_certain_token_is_always_drawn():
    log_probs = torch.full((100, 9), float("-inf"))
    log_probs[:, 4] = 0.0
    assert (draw(log_probs, torch.arange(100), torch.arange(100)) == 4).all()


def test_a_draw_is_the_argmax_of_log_prob_plus_noise():
    log_probs = torch.log_softmax(torch.randn(6, 40, generator=torch.Generator().manual_seed(2)), -1)
    tokens = draw(log_probs, torch.tensor(5), torch.arange(6))
    for row in range(6):
        uniforms = np.array([reference_uniform(5, row, token) for token in range(40)])
        assert tokens[row] == (log_probs[row].double().numpy() - np.log(-np.log(uniforms))).argmax()
