"""How much memory a server with draft trees takes: one formula a quantity, all in bytes on each GPU.

Letters: R requests at once, W verify width, B node budget, C context in tokens, V vocabulary, H hidden size,
b bytes of a number, tp ranks of tensor parallelism.
"""

from __future__ import annotations

from ddtree.doctor.model_shape import ModelShape
from ddtree.draft.dflash_config import DFlashConfig

GIB, MIB = 1 << 30, 1 << 20
LOGIT_BYTES, COUNT_BYTES, SLOT_BYTES, MASK_BYTES = 4, 4, 4, 1
# SGLang serves in bfloat16 or float16 unless a flag says otherwise, and takes float32 files to float16.
NUMBER_BYTES = 2
STATE_BYTES = 4  # recurrent states are float32 unless a flag says otherwise
# Memory of a GPU in MiB below which SGLang prefills so many tokens at once.
PREFILL_CHUNKS = ((20 << 10, 2048), (60 << 10, 4096), (160 << 10, 8192))
LARGEST_CHUNK = 16384
# SGLang 0.5.23's rule for --mem-fraction-static, in MiB.
META_MIB, MIB_PER_PREFILL_TOKEN, MIB_PER_GRAPH_REQUEST = 512, 1.5, 2
LARGE_GPU_MIB, LARGE_GPU_RESERVE_MIB = 60 << 10, 10 << 10


def weight_bytes(total_bytes: int, tp_size: int) -> int:
    """Weights on a GPU: total / tp, as though everything were split; embeddings and norms may not be."""
    return -(-total_bytes // tp_size)


def kv_bytes_per_token(shape: ModelShape, element_bytes: int, tp_size: int) -> int:
    """Target KV of one token: layers x max(1, KV heads // tp) x (key + value size) x b.

    Under MLA: layers x (kv_lora_rank + qk_rope_head_dim) x b, the same on every rank.
    """
    if shape.latent_dim is not None:
        return shape.num_kv_layers * shape.latent_dim * element_bytes
    heads = max(1, shape.num_kv_heads // tp_size)
    return shape.num_kv_layers * heads * (shape.head_dim + shape.v_head_dim) * element_bytes


def draft_kv_bytes_per_token(draft: DFlashConfig, element_bytes: int, tp_size: int) -> int:
    """Drafter's KV of one token: its layers x max(1, KV heads // tp) x 2 x head size x b."""
    heads = max(1, draft.num_kv_heads // tp_size)
    return draft.num_layers * heads * 2 * draft.head_dim * element_bytes


def reserve_tokens(verify_width: int, block_size: int, page_size: int = 1) -> int:
    """KV slots a request holds behind its committed tokens: W + block, made even, up to a whole page.

    W is the next round's window; a round in flight under overlap may commit up to a block before it.
    """
    even = 2 * -(-(verify_width + block_size) // 2)
    return -(-even // page_size) * page_size


def mask_bytes(num_requests: int, verify_width: int, context_tokens: int) -> int:
    """Verify mask for graphs of R requests: R x W x (C + W), a byte a cell; triton and fa3 keep it."""
    return num_requests * verify_width * (context_tokens + verify_width) * MASK_BYTES


def logits_bytes(
    num_requests: int, verify_width: int, vocab_size: int, element_bytes: int = LOGIT_BYTES
) -> int:
    """Logits of a verify pass: R x W x V x b; the whole vocabulary on every rank."""
    return num_requests * verify_width * vocab_size * element_bytes


def hidden_bytes(
    num_requests: int, verify_width: int, num_taps: int, hidden_size: int, element_bytes: int
) -> int:
    """Hidden states that the drafter reads of a verify pass: R x W x taps x H x b."""
    return num_requests * verify_width * num_taps * hidden_size * element_bytes


def token_table_bytes(num_requests: int, verify_width: int, block_size: int, context_tokens: int) -> int:
    """SGLang's table from request and position to KV slot: R x (C + W + 2 block + 1) x 4."""
    return num_requests * (context_tokens + verify_width + 2 * block_size + 1) * SLOT_BYTES


def token_count_bytes(num_requests: int, vocab_size: int) -> int:
    """Counts of each request's output tokens, made with the first penalty: R x V x 4."""
    return num_requests * vocab_size * COUNT_BYTES


def state_bytes(shape: ModelShape, num_requests: int, verify_width: int, tp_size: int) -> int:
    """Recurrent states of a hybrid target with a state a node: R x (1 + W) x layers x sizes / tp.

    The recurrent state is float32, the convolution's window has 2 bytes a number. 0 for other targets.
    """
    if shape.states is None:
        return 0
    one = shape.states.state_size * STATE_BYTES + shape.states.conv_size * NUMBER_BYTES
    return num_requests * (1 + verify_width) * shape.states.num_layers * -(-one // tp_size)


def plain_reserve_bytes(gpu_bytes: int, num_requests: int, tp_size: int) -> int:
    """What SGLang leaves outside of weights and KV pool for a plain server, by its own rule (0.5.23).

    512 MiB + 1.5 MiB a token of a prefill chunk + 2 MiB a request in graphs + 128 MiB a rank; above 60 GiB
    of memory at least 10 GiB. For activations, graphs and the libraries' own memory; an estimate.
    """
    gpu_mib = gpu_bytes / MIB
    chunk = next((tokens for below, tokens in PREFILL_CHUNKS if gpu_mib < below), LARGEST_CHUNK)
    needed = META_MIB + MIB_PER_PREFILL_TOKEN * chunk + MIB_PER_GRAPH_REQUEST * num_requests + 128 * tp_size
    if gpu_mib > LARGE_GPU_MIB:
        needed = max(needed, LARGE_GPU_RESERVE_MIB)
    return round(needed * MIB)
