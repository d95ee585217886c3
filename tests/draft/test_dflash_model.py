"""The drafter against a plain reference that concatenates context and block and caches nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.dflash_model import DFlashDrafter
from ddtree.layers.decoder import DecoderStack
from ddtree.layers.window import Window
from tiny_models import load_tiny_drafter, tiny_llama, tiny_qwen3, write_tiny_drafter

CONTEXT_LEN = 21
CAPACITY = 64
ROOT = 17
VARIANTS = {
    "plain": {},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
    },
    "sliding not causal": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 9, "is_causal": False},
    "full causal": {"is_causal": True},
    "bias": {"attention_bias": True},
    "yarn": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "block 3": {"block_size": 3},
    "block 16": {"block_size": 16},
    "one layer": {"num_hidden_layers": 1, "layer_types": None},
}  # fmt: skip


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """Rotate x [n, heads, head_dim] as the two halves of complex numbers."""
    angles = positions[:, None, None] * inv_freq
    real, imaginary = x.chunk(2, -1)
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)


def visible(config: DFlashConfig, layer: int, query: int, key: int, context_len: int) -> bool:
    window = config.sliding_windows[layer]
    if window is not None and abs(query - key) >= window:
        return False
    return key < context_len or not config.causal_layers[layer] or key <= query


class Reference:
    """DFlash's forward pass written out layer by layer and head by head, in float32."""

    def __init__(self, path: Path, target: PreTrainedModel, inv_freq: Tensor, scaling: float) -> None:
        self.config = DFlashConfig.from_path(path)
        self.weights = load_file(path / "model.safetensors")
        self.target = target
        self.rope = (inv_freq, scaling)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def heads(self, layer: int, kind: str, x: Tensor, positions: Tensor) -> Tensor:
        """Projected heads [n, heads, head_dim], normed and rotated unless they are values."""
        name = f"layers.{layer}.self_attn.{kind}"
        heads = self.linear(f"{name}_proj", x).view(x.shape[0], -1, self.config.head_dim)
        if kind == "v":
            return heads
        heads = norm(heads, self.weights[f"{name}_norm.weight"], self.config.rms_norm_eps)
        return rotate(heads, positions, *self.rope)

    def attend(self, layer: int, block: Tensor, features: Tensor) -> Tensor:
        config, n, m = self.config, features.shape[0], block.shape[0]
        positions = torch.arange(n + m)
        query = self.heads(layer, "q", block, positions[n:])
        both = torch.cat((features, block))
        key, value = self.heads(layer, "k", both, positions), self.heads(layer, "v", both, positions)
        seen = torch.tensor([[visible(config, layer, n + i, j, n) for j in range(n + m)] for i in range(m)])
        group = config.num_heads // config.num_kv_heads
        outs = []
        for head in range(config.num_heads):
            scores = query[:, head] @ key[:, head // group].T / config.head_dim**0.5
            outs.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value[:, head // group])
        return self.linear(f"layers.{layer}.self_attn.o_proj", torch.cat(outs, -1))

    def draft_logits(self, root: int, taps: Tensor) -> Tensor:
        config, weights, eps = self.config, self.weights, self.config.rms_norm_eps
        features = norm(self.linear("fc", taps), weights["hidden_norm.weight"], eps)
        block = torch.tensor([root] + [config.mask_token_id] * (config.block_size - 1))
        hidden = self.target.get_input_embeddings()(block)
        for i in range(config.num_layers):
            normed = norm(hidden, weights[f"layers.{i}.input_layernorm.weight"], eps)
            hidden = hidden + self.attend(i, normed, features)
            normed = norm(hidden, weights[f"layers.{i}.post_attention_layernorm.weight"], eps)
            gate = F.silu(self.linear(f"layers.{i}.mlp.gate_proj", normed))
            up = self.linear(f"layers.{i}.mlp.up_proj", normed)
            hidden = hidden + self.linear(f"layers.{i}.mlp.down_proj", gate * up)
        logits: Tensor = self.target.get_output_embeddings()(norm(hidden, weights["norm.weight"], eps))
        return logits[1:]


def inv_freq_of(target: PreTrainedModel, path: Path) -> tuple[Tensor, float]:
    """Frequencies as a transformers Qwen3 with the drafter's rope would use them."""
    fields = json.loads((path / "config.json").read_text())
    names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta",
             "rope_scaling", "rope_parameters")  # fmt: skip
    rotary = Qwen3RotaryEmbedding(Qwen3Config(**{name: fields[name] for name in names if name in fields}))
    return rotary.inv_freq, rotary.attention_scaling


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


@pytest.fixture
def pair(tmp_path: Path, target: PreTrainedModel) -> tuple[DFlashDrafter, Reference]:
    return make_pair(tmp_path, target)


def make_pair(path: Path, target: PreTrainedModel, **overrides) -> tuple[DFlashDrafter, Reference]:
    write_tiny_drafter(path, target, **overrides)
    return load_tiny_drafter(path, target), Reference(path, target, *inv_freq_of(target, path))


def random_taps(n: int, width: int = 96, seed: int = 1) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def draft(drafter: DFlashDrafter, taps: Tensor, root: int = ROOT, pieces: tuple[int, ...] = ()) -> Tensor:
    """Logits after appending taps in pieces of the given lengths (default: all at once)."""
    context, start = drafter.new_context(CAPACITY), 0
    for n in pieces or (taps.shape[0],):
        drafter.append(
            context, taps[start : start + n], Window.at(start, torch.arange(start, start + n), None)
        )
        start += n
    return drafter.draft_logits(torch.tensor([root]), context, drafter.draft_window(start))


def graph_window(prefix_len: int, num_tokens: int, tree_mask: Tensor | None) -> Window:
    """A window as a captured graph sees it: the host does not know where it starts."""
    prefix = torch.tensor([prefix_len])
    return Window(prefix + torch.arange(num_tokens), prefix, CAPACITY, tree_mask, None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_reference(variant: str, tmp_path: Path, target: PreTrainedModel) -> None:
    drafter, reference = make_pair(tmp_path, target, **VARIANTS[variant])
    taps = random_taps(CONTEXT_LEN)
    logits = draft(drafter, taps)
    assert logits.shape == (drafter.block_size - 1, target.config.vocab_size)
    torch.testing.assert_close(logits, reference.draft_logits(ROOT, taps), atol=1e-5, rtol=1e-5)


def test_matches_reference_with_qwen3_target(tmp_path: Path) -> None:
    target = tiny_qwen3(tie_word_embeddings=False)
    drafter, reference = make_pair(tmp_path, target)
    taps = random_taps(CONTEXT_LEN)
    expected = reference.draft_logits(ROOT, taps)
    torch.testing.assert_close(draft(drafter, taps), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "variant", ["sliding", "sliding not causal", "full causal", "bias", "yarn", "llama3"]
)
def test_variants_differ_from_plain(variant: str, tmp_path: Path, target: PreTrainedModel) -> None:
    """The reference test of a variant means something only if the variant changes the logits."""
    drafter, _ = make_pair(tmp_path / "variant", target, **VARIANTS[variant])
    plain, _ = make_pair(tmp_path / "plain", target)
    taps = random_taps(CONTEXT_LEN)
    assert (draft(drafter, taps) - draft(plain, taps)).abs().max() > 1e-3


@pytest.mark.parametrize("pieces", [(1, 20), (7, 7, 7), (20, 1), (1,) * 21])
def test_append_in_pieces_is_append_at_once(pieces: tuple[int, ...], pair) -> None:
    taps = random_taps(CONTEXT_LEN)
    in_pieces = draft(pair[0], taps, pieces=pieces)
    torch.testing.assert_close(in_pieces, draft(pair[0], taps), atol=1e-5, rtol=1e-5)


def test_root_embedding_stands_at_slot_0(pair) -> None:
    """Planted fault: with the mask's embedding at slot 0 the drafter does not know the root."""
    drafter, reference = pair
    taps = random_taps(CONTEXT_LEN)
    logits = draft(drafter, taps)
    masked = draft(drafter, taps, root=drafter.config.mask_token_id)
    assert (logits - masked).abs().max() > 1e-2
    torch.testing.assert_close(logits, reference.draft_logits(ROOT, taps), atol=1e-5, rtol=1e-5)


def test_positions_matter(pair) -> None:
    """Planted fault: a block one position too early (field report 24: rope out of step)."""
    drafter, _ = pair
    taps, context = random_taps(CONTEXT_LEN), drafter.new_context(CAPACITY)
    drafter.append(context, taps, Window.at(0, torch.arange(CONTEXT_LEN), None))
    window = drafter.draft_window(CONTEXT_LEN)
    shifted = Window.at(CONTEXT_LEN, window.positions - 1, window.tree_mask)
    root = torch.tensor([ROOT])
    logits = drafter.draft_logits(root, context, window)
    assert (logits - drafter.draft_logits(root, context, shifted)).abs().max() > 1e-3


def test_append_rotates_at_the_window_positions(pair) -> None:
    drafter, _ = pair
    taps = random_taps(4)
    right, wrong = drafter.new_context(CAPACITY), drafter.new_context(CAPACITY)
    drafter.append(right, taps, Window.at(0, torch.arange(4), None))
    drafter.append(wrong, taps, Window.at(0, torch.zeros(4, dtype=torch.int64), None))
    keys, values = (right.kv_data - wrong.kv_data).abs().amax((0, 2, 4)).unbind(0)
    assert keys[0] == 0
    assert (keys[1:4] > 1e-3).all()
    assert values.max() == 0


def test_order_of_taps_matters(pair) -> None:
    drafter, _ = pair
    taps = random_taps(CONTEXT_LEN)
    first, second = taps.chunk(2, -1)
    assert (draft(drafter, taps) - draft(drafter, torch.cat((second, first), -1))).abs().max() > 1e-2


@pytest.mark.parametrize("variant", ["plain", "sliding", "full causal"])
def test_graph_window_equals_host_window(variant: str, tmp_path: Path, target: PreTrainedModel) -> None:
    drafter, _ = make_pair(tmp_path, target, **VARIANTS[variant])
    taps, context = random_taps(CONTEXT_LEN), drafter.new_context(CAPACITY)
    drafter.append(context, taps, graph_window(0, CONTEXT_LEN, None))
    window = graph_window(CONTEXT_LEN, drafter.block_size, drafter.block_mask)
    logits = drafter.draft_logits(torch.tensor([ROOT]), context, window)
    torch.testing.assert_close(logits, draft(drafter, taps), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["plain", "sliding"])
def test_junk_rows_past_the_committed_ones_change_nothing(
    variant: str, tmp_path: Path, target: PreTrainedModel
) -> None:
    """A graph appends a fixed number of rows; those past the committed ones must stay unseen."""
    drafter, reference = make_pair(tmp_path, target, **VARIANTS[variant])
    taps, context = random_taps(CONTEXT_LEN), drafter.new_context(CAPACITY)
    drafter.append(context, taps[:15], graph_window(0, 15, None))
    for start, num_committed in ((15, 2), (17, 4)):
        rows = torch.cat((taps[start : start + num_committed], 100 * random_taps(8 - num_committed, seed=2)))
        drafter.append(context, rows, graph_window(start, 8, None))
        prefix_len = start + num_committed
        expected = reference.draft_logits(ROOT, taps[:prefix_len])
        for window in (
            drafter.draft_window(prefix_len),
            graph_window(prefix_len, drafter.block_size, drafter.block_mask),
        ):
            logits = drafter.draft_logits(torch.tensor([ROOT]), context, window)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_rounds_leave_nothing_behind(pair) -> None:
    """The block's own keys of a round lie where the next append writes."""
    drafter, reference = pair
    taps, context = random_taps(CONTEXT_LEN), drafter.new_context(CAPACITY)
    start = 0
    for round_index, num_accept_tokens in enumerate((9, 1, 5, 2, 4)):
        end = start + num_accept_tokens
        drafter.append(context, taps[start:end], Window.at(start, torch.arange(start, end), None))
        logits = drafter.draft_logits(torch.tensor([round_index]), context, drafter.draft_window(end))
        expected = reference.draft_logits(round_index, taps[:end])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        start = end


def test_block_has_its_full_size_and_draws_on_the_whole_of_it(pair) -> None:
    """Planted fault: a block cut to a small budget; later mask slots change earlier logits."""
    drafter, _ = pair
    seen: list[Tensor] = []
    embed = drafter.embed
    drafter.embed = lambda tokens: seen.append(tokens) or embed(tokens)
    taps = random_taps(CONTEXT_LEN)
    logits = draft(drafter, taps)
    assert seen[0].tolist() == [ROOT] + [drafter.config.mask_token_id] * drafter.draft_depth
    drafter.mask_tokens = drafter.mask_tokens[:3]
    short = Window.at(CONTEXT_LEN, CONTEXT_LEN + torch.arange(4), drafter.block_mask[:4, :4])
    context = drafter.new_context(CAPACITY)
    drafter.append(context, taps, Window.at(0, torch.arange(CONTEXT_LEN), None))
    cut = drafter.draft_logits(torch.tensor([ROOT]), context, short)
    assert (logits[:3] - cut).abs().max() > 1e-3


def test_token_zero_is_a_root(pair) -> None:
    drafter, reference = pair
    taps = random_taps(CONTEXT_LEN)
    expected = reference.draft_logits(0, taps)
    torch.testing.assert_close(draft(drafter, taps, root=0), expected, atol=1e-5, rtol=1e-5)


def test_stack_factory_gets_one_stack_for_each_run_of_equal_masks(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    specs = []

    def factory(spec, layers, rotary):
        specs.append((spec, len(layers)))
        return DecoderStack(spec, layers, rotary)

    write_tiny_drafter(tmp_path, target, **VARIANTS["sliding"])
    loaded = load_tiny_drafter(tmp_path, target)
    weights = load_file(tmp_path / "model.safetensors")
    drafter = DFlashDrafter(
        weights, loaded.config, torch.float32, torch.device("cpu"), 512, loaded.embed, loaded.head, factory
    )
    assert [(spec.sliding_windows, n) for spec, n in specs] == [((6,), 1), ((None,), 1), ((6,), 1)]
    assert [segment.is_causal for segment in drafter.segments] == [True, False, True]
    taps = random_taps(CONTEXT_LEN)
    assert torch.equal(draft(drafter, taps), draft(loaded, taps))


def test_bfloat16_checkpoint_runs_in_float32(tmp_path: Path, target: PreTrainedModel) -> None:
    write_tiny_drafter(tmp_path, target, dtype=torch.bfloat16)
    drafter = load_tiny_drafter(tmp_path, target)
    logits = draft(drafter, random_taps(CONTEXT_LEN))
    assert logits.dtype == torch.float32
    assert drafter.hidden_norm.dtype == torch.float32
    assert torch.equal(drafter.hidden_norm, drafter.hidden_norm.bfloat16().float())


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    target = tiny_llama()
    write_tiny_drafter(tmp_path, target)
    exact = load_tiny_drafter(tmp_path, target)
    target.bfloat16()
    half = DFlashDrafter(
        load_file(tmp_path / "model.safetensors"), exact.config, torch.bfloat16, torch.device("cpu"), 512,
        target.get_input_embeddings(), target.get_output_embeddings(),
    )  # fmt: skip
    taps = random_taps(CONTEXT_LEN)
    logits = draft(half, taps.bfloat16())
    expected = draft(load_tiny_drafter(tmp_path, tiny_llama()), taps)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().mean() < 0.05 * expected.std()


def test_context_holds_what_was_appended(pair) -> None:
    drafter, _ = pair
    context = drafter.new_context(CAPACITY)
    drafter.append(context, random_taps(5), Window.at(0, torch.arange(5), None))
    assert context.kv_data.shape == (3, 2, 2, CAPACITY, 16)
    assert (context.kv_data[:, :, :, :5].abs().amax(-1) > 0).all()
    assert context.kv_data[:, :, :, 5:].abs().max() == 0
