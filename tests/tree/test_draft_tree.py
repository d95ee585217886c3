import pytest
import torch

from ddtree.errors import ConfigError
from ddtree.tree import DraftTree


def small_tree() -> DraftTree:
    return DraftTree(
        tokens=torch.tensor([[5, 0, 8, 0]]),
        parents=torch.tensor([[-1, 0, 1, -1]]),
        depths=torch.tensor([[0, 1, 2, 0]]),
        log_probs=torch.tensor([[0.0, -0.5, -1.0, float("-inf")]]),
    )


def test_counts_nodes_by_log_prob_not_by_token():
    tree = small_tree()
    assert (tree.node_budget, tree.num_verify_tokens) == (3, 4)
    assert tree.is_node.tolist() == [[True, True, True, False]]
    assert tree.num_nodes.tolist() == [2]


def test_prefix_is_a_view_of_the_first_columns():
    tree = small_tree()
    prefix = tree.prefix(2)
    assert prefix.tokens.tolist() == [[5, 0, 8]]
    assert prefix.node_budget == 2
    assert prefix.parents.data_ptr() == tree.parents.data_ptr()


@pytest.mark.parametrize("node_budget", [0, 4, -1, True])
def test_prefix_refuses_other_budgets(node_budget):
    with pytest.raises(ConfigError, match=r"node_budget.*from 1 to 3"):
        small_tree().prefix(node_budget)
