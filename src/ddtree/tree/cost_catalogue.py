"""GPUs and draft pairs for the cost model, from public data sheets and model configurations.

GPUs: NVIDIA's data sheets of A100 80GB SXM, H200 SXM and HGX B200 (one GPU's part of the system), and the
RTX Blackwell PRO architecture paper for the RTX PRO 6000 workstation card; dense rates. Link speeds are those
of NVLink or PCIe 5.0 x16 in one direction. The latency of an all-reduce is assumed for NVLink; over PCIe it
is what voipmonitor/rtx6kpro measured with NCCL on eight RTX PRO 6000. Models and drafters: the layouts of
their `config.json` on the hub; targets in `ASSUMED_DRAFTERS` have no drafter known to this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ddtree.tree.cost_model import AttentionShape, DraftPair, ExpertShape, GpuSpec, ModelShape, RecurrentShape

A100 = GpuSpec("A100 80GB", 80e9, 2.039e12, 312e12, 0.0, 300e9, 8e-6)
H200 = GpuSpec("H200", 141e9, 4.8e12, 989.5e12, 1979e12, 450e9, 8e-6)
B200 = GpuSpec("B200", 180e9, 8.0e12, 2250e12, 4500e12, 900e9, 8e-6)
RTX_PRO_6000 = GpuSpec("RTX PRO 6000", 96e9, 1.792e12, 503.8e12, 1007.6e12, 63e9, 24e-6)
GPUS: Mapping[str, GpuSpec] = MappingProxyType({gpu.name: gpu for gpu in (A100, H200, B200, RTX_PRO_6000)})

INT4_GROUPS_OF_32 = 0.5 + 2 / 32  # 4 bits and a bfloat16 scale for 32 of them
MXFP4 = 0.5 + 1 / 32  # 4 bits and an 8-bit scale for 32 of them


def gqa_weights(hidden: int, heads: int, kv_heads: int, head_dim: int, gates: int = 0) -> float:
    """Projections of grouped-query attention; `gates` is 1 where heads have an output gate."""
    return float(hidden * head_dim * ((2 + gates) * heads + 2 * kv_heads))


def gated_mlp_weights(hidden: int, intermediate: int) -> float:
    """Gate, up and down projection."""
    return 3.0 * hidden * intermediate


def gqa(layers: int, heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> AttentionShape:
    """Grouped-query attention with a bfloat16 KV cache."""
    return AttentionShape(layers, heads, head_dim, head_dim, 2 * 2 * kv_heads * head_dim, kv_heads, window)


def dense_model(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    *,
    ties_embedding: bool,
) -> ModelShape:
    """A dense decoder in bfloat16 with grouped-query attention in all layers."""
    layer = gqa_weights(hidden, heads, kv_heads, head_dim) + gated_mlp_weights(hidden, intermediate)
    attention = (gqa(layers, heads, kv_heads, head_dim),)
    return ModelShape(
        name,
        layers,
        hidden,
        layers * layer,
        float(vocab * hidden),
        2,
        attention,
        ties_embedding=ties_embedding,
    )


def dflash(
    target: ModelShape,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    taps: int,
    *,
    window: int | None = None,
) -> ModelShape:
    """A DFlash drafter: layers of the target's width, a projection of `taps` hidden states, its head.

    With a `window` all layers but the last have it.
    """
    hidden = target.hidden_size
    layer = gqa_weights(hidden, heads, kv_heads, head_dim) + gated_mlp_weights(hidden, intermediate)
    weights = layers * layer + taps * hidden * hidden
    attention = (
        gqa(layers - 1, heads, kv_heads, head_dim, window),
        gqa(1, heads, kv_heads, head_dim),
    )
    return ModelShape(
        f"DFlash for {target.name}", layers, hidden, weights, target.head_weights, 2, attention,
        gathers_logits=False,
    )  # fmt: skip


SMOLLM2_135M = dense_model("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49_152, ties_embedding=True)
QWEN3_4B = dense_model("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151_936, ties_embedding=True)
QWEN3_8B = dense_model("Qwen3-8B", 36, 4096, 32, 8, 128, 12_288, 151_936, ties_embedding=False)
QWEN3_32B = dense_model("Qwen3-32B", 64, 5120, 64, 8, 128, 25_600, 151_936, ties_embedding=False)
QWEN3_CODER_30B_A3B = ModelShape(
    "Qwen3-Coder-30B-A3B", 48, 2048,
    dense_weights=48 * (gqa_weights(2048, 32, 4, 128) + 2048 * 128),
    head_weights=151_936.0 * 2048,
    bytes_per_weight=2,
    attention=(gqa(48, 32, 4, 128),),
    experts=ExpertShape(48, 128, 8, gated_mlp_weights(2048, 768), 2),
)  # fmt: skip
QWEN3_235B_A22B = ModelShape(
    "Qwen3-235B-A22B", 94, 4096,
    dense_weights=94 * (gqa_weights(4096, 64, 4, 128) + 4096 * 128),
    head_weights=151_936.0 * 4096,
    bytes_per_weight=2,
    attention=(gqa(94, 64, 4, 128),),
    experts=ExpertShape(94, 128, 8, gated_mlp_weights(4096, 1536), 2),
)  # fmt: skip
# The first layer is dense, the others have a shared expert beside the routed ones.
GLM_4_5_AIR = ModelShape(
    "GLM-4.5-Air", 46, 4096,
    dense_weights=(
        46 * gqa_weights(4096, 96, 8, 128)
        + gated_mlp_weights(4096, 10_944)
        + 45 * (gated_mlp_weights(4096, 1408) + 4096 * 128)
    ),
    head_weights=151_552.0 * 4096,
    bytes_per_weight=2,
    attention=(gqa(46, 96, 8, 128),),
    experts=ExpertShape(45, 128, 8, gated_mlp_weights(4096, 1408), 2),
)  # fmt: skip
# 16 of 64 layers are gated full attention; the others are Gated DeltaNet with 16 key and 48 value heads of
# 128, whose state is one 128 x 128 float32 matrix a value head.
QWEN3_6_27B = ModelShape(
    "Qwen3.6-27B", 64, 5120,
    dense_weights=(
        16 * gqa_weights(5120, 24, 4, 256, gates=1)
        + 48 * 5120 * (2 * 16 * 128 + 3 * 48 * 128 + 2 * 48)
        + 64 * gated_mlp_weights(5120, 17_408)
    ),
    head_weights=248_320.0 * 5120,
    bytes_per_weight=2,
    attention=(gqa(16, 24, 4, 256),),
    recurrent=RecurrentShape(48, 48 * 128 * 128 * 4),
)  # fmt: skip
GPT_OSS_120B = ModelShape(
    "gpt-oss-120b", 36, 2880,
    dense_weights=36 * (gqa_weights(2880, 64, 8, 64) + 2880 * 128),
    head_weights=201_088.0 * 2880,
    bytes_per_weight=2,
    attention=(gqa(18, 64, 8, 64), gqa(18, 64, 8, 64, window=128)),
    experts=ExpertShape(36, 128, 4, gated_mlp_weights(2880, 2880), MXFP4),
)  # fmt: skip
# MLA: query rank 1536, latent 512 and rotary part 64 cached in bfloat16; 64 heads of 128 + 64, values of 128.
KIMI_K2_5 = ModelShape(
    "Kimi K2.5", 61, 7168,
    dense_weights=(
        61 * (7168 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168)
        + gated_mlp_weights(7168, 18_432)
        + 60 * (gated_mlp_weights(7168, 2048) + 7168 * 384)
    ),
    head_weights=163_840.0 * 7168,
    bytes_per_weight=2,
    attention=(AttentionShape(61, 64, 576, 512, 2 * 576, num_kv_heads=1),),
    experts=ExpertShape(60, 384, 8, gated_mlp_weights(7168, 2048), INT4_GROUPS_OF_32),
)  # fmt: skip

PAIRS: Mapping[str, DraftPair] = MappingProxyType({
    pair.target.name: pair
    for pair in (
        DraftPair(SMOLLM2_135M, dflash(SMOLLM2_135M, 4, 9, 3, 64, 1536, taps=5)),
        DraftPair(QWEN3_4B, dflash(QWEN3_4B, 5, 32, 8, 128, 9728, taps=5)),
        DraftPair(QWEN3_8B, dflash(QWEN3_8B, 5, 32, 8, 128, 12_288, taps=5)),
        DraftPair(QWEN3_CODER_30B_A3B, dflash(QWEN3_CODER_30B_A3B, 8, 32, 4, 128, 6144, taps=5)),
        DraftPair(QWEN3_32B, dflash(QWEN3_32B, 5, 64, 8, 128, 25_600, taps=5)),
        DraftPair(QWEN3_235B_A22B, dflash(QWEN3_235B_A22B, 5, 32, 8, 128, 12_288, taps=5)),
        DraftPair(GLM_4_5_AIR, dflash(GLM_4_5_AIR, 5, 32, 8, 128, 12_288, taps=5)),
        DraftPair(QWEN3_6_27B, dflash(QWEN3_6_27B, 5, 32, 8, 128, 17_408, taps=5, window=2048)),
        DraftPair(GPT_OSS_120B, dflash(GPT_OSS_120B, 8, 64, 8, 64, 7680, taps=5), block_size=10),
        DraftPair(KIMI_K2_5, dflash(KIMI_K2_5, 6, 64, 8, 128, 18_432, taps=6), block_size=8),
    )
})  # fmt: skip
# For these, five layers of the target's width, as the public drafters of Qwen3 have.
ASSUMED_DRAFTERS = frozenset({QWEN3_32B.name, QWEN3_235B_A22B.name, GLM_4_5_AIR.name})
