"""The trainable drafter against the drafter that runs at inference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.dflash_model import weight_shapes
from ddtree.errors import UnsupportedModelError
from ddtree.layers.window import Window
from ddtree.train.attention import draft_mask
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.packed_batch import PackedBatch
from packed_kit import pack, random_conversations
from tiny_models import MAX_POSITIONS, load_tiny_drafter, tiny_drafter_config, tiny_llama, write_tiny_drafter

BLOCK_SIZE, ROW_TOKENS = 8, 40
LENGTHS = (13, 21)  # of the two conversations of the row
ANCHORS = (0, 7, 13, 14, 25, 33)  # first and last tokens of a conversation among them
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def batch(target) -> PackedBatch:
    conversations = random_conversations(LENGTHS, target.config.vocab_size)
    return pack([conversations], ROW_TOKENS, [ANCHORS], BLOCK_SIZE - 1)


@pytest.fixture(scope="module")
def taps(target) -> Tensor:
    """Random features of the row, as large as a target's."""
    shape = (1, ROW_TOKENS, 2 * target.config.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["plain", "bias and yarn"])
def overrides(request) -> dict:
    if request.param == "plain":
        return {}
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    return {"attention_bias": True, "rope_theta": None, "rope_parameters": rope}


def trainable(path: Path) -> TrainableDrafter:
    drafter = TrainableDrafter(DFlashConfig.from_path(path), MAX_POSITIONS)
    drafter.load_state_dict(load_file(path / "model.safetensors"))
    return drafter


def packed_logits(drafter: TrainableDrafter, target, batch: PackedBatch, taps: Tensor) -> Tensor:
    """[num_anchors, draft_depth, vocab] of the one row."""
    embed = target.get_input_embeddings()
    mask_embed = embed(torch.tensor(drafter.config.mask_token_id)).detach()
    root_embeds = embed(batch.root_tokens).detach()
    hidden = drafter(batch, taps, root_embeds, mask_embed, draft_mask(batch, BLOCK_SIZE, "dense"))
    return (hidden @ target.get_output_embeddings().weight.detach().T)[0]


def inference_logits(path: Path, target, batch: PackedBatch, taps: Tensor) -> Tensor:
    """The same blocks drafted one by one, each from its own conversation alone."""
    drafter = load_tiny_drafter(path, target)
    logits = []
    for anchor in batch.anchors[0].tolist():
        start = int(batch.document_starts[0, anchor])
        prefix_len = anchor - start
        context = drafter.new_context(ROW_TOKENS)
        if prefix_len:
            positions = torch.arange(prefix_len)
            drafter.append(context, taps[0, start:anchor], Window.at(0, positions, None))
        root = batch.tokens[0, anchor : anchor + 1]
        logits.append(drafter.draft_logits(root, context, drafter.draft_window(prefix_len)))
    return torch.stack(logits)


def largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def least_change(a: Tensor, b: Tensor) -> float:
    """The largest difference of the block that changed least; blocks are the first dimension."""
    return float((a - b).abs().amax((1, 2)).min())


def test_a_packed_block_drafts_what_inference_drafts(tmp_path, target, batch, taps, overrides):
    write_tiny_drafter(tmp_path, target, BLOCK_SIZE, **overrides)
    with torch.no_grad():
        packed = packed_logits(trainable(tmp_path), target, batch, taps)
        alone = inference_logits(tmp_path, target, batch, taps)
    assert largest_difference(packed, alone) < TOLERANCE


def without_documents(batch: PackedBatch) -> PackedBatch:
    return replace(batch, document_starts=torch.zeros_like(batch.document_starts))


def with_row_positions(batch: PackedBatch) -> PackedBatch:
    return replace(batch, positions=torch.arange(ROW_TOKENS)[None])


def test_the_tolerance_tells_a_wrong_context(tmp_path, target, batch, taps):
    """Conversations that see each other, the root in its context: each moves logits far past it."""
    write_tiny_drafter(tmp_path, target, BLOCK_SIZE)
    drafter = trainable(tmp_path)
    embed = target.get_input_embeddings()
    mask_embed = embed(torch.tensor(drafter.config.mask_token_id))
    with torch.no_grad():
        right = packed_logits(drafter, target, batch, taps)
        leaking = packed_logits(drafter, target, without_documents(batch), taps)
        later = replace(batch, anchors=batch.anchors + 1)
        root_embeds = embed(batch.root_tokens)
        hidden = drafter(batch, taps, root_embeds, mask_embed, draft_mask(later, BLOCK_SIZE, "dense"))
        with_root = (hidden @ target.get_output_embeddings().weight.T)[0]
    second = batch.anchors[0] >= LENGTHS[0]
    assert torch.equal(leaking[~second], right[~second])
    assert least_change(leaking[second], right[second]) > 100 * TOLERANCE
    assert least_change(with_root, right) > 100 * TOLERANCE


def test_only_distances_between_positions_matter(tmp_path, target, batch, taps):
    """Rotary embedding is relative: a conversation may be counted from the row's start, but not otherwise."""
    write_tiny_drafter(tmp_path, target, BLOCK_SIZE)
    drafter = trainable(tmp_path)
    with torch.no_grad():
        right = packed_logits(drafter, target, batch, taps)
        by_row = packed_logits(drafter, target, with_row_positions(batch), taps)
        stretched = packed_logits(drafter, target, replace(batch, positions=2 * batch.positions), taps)
    assert largest_difference(by_row, right) < TOLERANCE
    has_context = torch.tensor([anchor not in (0, LENGTHS[0]) for anchor in ANCHORS])
    assert least_change(stretched[has_context], right[has_context]) > 100 * TOLERANCE


def test_parameters_are_those_of_the_checkpoint(target):
    for overrides in ({}, {"attention_bias": True}):
        config = DFlashConfig.from_dict(tiny_drafter_config(target, **overrides))
        state = TrainableDrafter(config, MAX_POSITIONS).state_dict()
        assert {name: tuple(weight.shape) for name, weight in state.items()} == weight_shapes(config)
        assert {weight.dtype for weight in state.values()} == {torch.float32}


def test_every_parameter_has_a_gradient(target, batch, taps):
    config = DFlashConfig.from_dict(tiny_drafter_config(target, BLOCK_SIZE, attention_bias=True))
    drafter = TrainableDrafter(config, MAX_POSITIONS)
    drafter.init_weights(0, target.get_output_embeddings().weight)
    packed_logits(drafter, target, batch, taps).square().sum().backward()
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_initial_weights_follow_the_seed(target):
    config = DFlashConfig.from_dict(tiny_drafter_config(target))
    states = []
    for seed in (0, 0, 1):
        drafter = TrainableDrafter(config, MAX_POSITIONS)
        drafter.init_weights(seed, target.get_output_embeddings().weight)
        states.append(drafter.state_dict())
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    ratio = first["layers.0.mlp.down_proj.weight"].std() / first["layers.0.mlp.up_proj.weight"].std()
    assert ratio == pytest.approx(6**-0.5, rel=0.05)
    assert first["hidden_norm.weight"].eq(1).all()


def test_the_first_logits_have_deviation_one_whatever_the_size_of_the_head(target, batch, taps):
    config = DFlashConfig.from_dict(tiny_drafter_config(target, BLOCK_SIZE))
    for scale in (0.1, 10.0):
        head = target.get_output_embeddings().weight.detach() * scale
        drafter = TrainableDrafter(config, MAX_POSITIONS)
        drafter.init_weights(0, head)
        mask = draft_mask(batch, BLOCK_SIZE, "dense")
        embeds = target.get_input_embeddings()(batch.root_tokens), target.get_input_embeddings().weight[3]
        with torch.no_grad():
            logits = drafter(batch, taps, *embeds, mask) @ head.T
        assert logits.std() == pytest.approx(1.0, rel=0.1)


def test_bfloat16_autocast_stays_near_float32(tmp_path, target, batch, taps):
    write_tiny_drafter(tmp_path, target, BLOCK_SIZE)
    drafter = trainable(tmp_path)
    half = target_in_bfloat16(target)
    with torch.no_grad():
        right = packed_logits(drafter, target, batch, taps)
        with torch.autocast("cpu", torch.bfloat16):
            low = packed_logits(drafter, half, batch, taps.bfloat16())
    assert low.dtype == torch.bfloat16
    # 8 bits through 3 layers and a sum over 48 products.
    assert (low.float() - right).norm() / right.norm() < 0.05


def target_in_bfloat16(target):
    half = tiny_llama().bfloat16()
    half.load_state_dict(target.state_dict())
    return half


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 6}, "sliding_attention"),
        ({"is_causal": True}, "is_causal"),
    ],
)
def test_other_kinds_of_layers_are_refused(target, overrides, named):
    config = DFlashConfig.from_dict(tiny_drafter_config(target, **overrides))
    with pytest.raises(UnsupportedModelError, match=named):
        TrainableDrafter(config, MAX_POSITIONS)


@pytest.mark.gpu
def test_compiled_layers_on_cuda_stay_near_the_plain_ones(tmp_path, target):
    device = torch.device("cuda")
    write_tiny_drafter(tmp_path, target, BLOCK_SIZE)
    drafter, generator = trainable(tmp_path).to(device), torch.Generator(device).manual_seed(0)
    conversations = random_conversations((100, 120), target.config.vocab_size)
    batch = pack([conversations], 256, [range(4, 204, 8)], BLOCK_SIZE - 1).to(device)
    taps = torch.randn(1, 256, 2 * target.config.hidden_size, device=device, generator=generator).bfloat16()
    embed = target_in_bfloat16(target).to(device).get_input_embeddings()
    mask_embed = embed(torch.tensor(drafter.config.mask_token_id, device=device)).detach()
    root_embeds = embed(batch.root_tokens).detach()
    shape = (1, 25, BLOCK_SIZE - 1, target.config.hidden_size)
    direction = torch.randn(shape, device=device, generator=generator)
    results = []
    for kind in ("dense", "flex"):
        if kind == "flex":
            drafter.compile_layers()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = drafter(batch, taps, root_embeds, mask_embed, draft_mask(batch, BLOCK_SIZE, kind))
        drafter.zero_grad()
        (hidden.float() * direction).sum().backward()
        results.append((hidden.float(), drafter.fc.weight.grad.clone()))
    for plain, compiled in zip(*results, strict=True):
        # Both round to bfloat16 (8 bits), at different places.
        assert (plain - compiled).norm() / plain.norm() < 0.1
