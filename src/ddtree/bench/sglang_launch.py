"""The command line with which stock SGLang is started for an arm of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ddtree.bench.plan import arms_of_modes, request_seed
from ddtree.bench.run_format import Arm
from ddtree.bench.sglang_python import server_python
from ddtree.bench_config import SGLANG, BenchConfig, ServersAtOnce
from ddtree.config import Dtype, Mode, PluginConfig
from ddtree.errors import ConfigError

HOST = "127.0.0.1"
CONFIG_VARIABLE = "DDTREE_CONFIG"
# What keeps float32 products exact to float32 on a GPU: cuBLAS without TF32, Triton's dot without it.
EXACT_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
ALGORITHMS = {Mode.CHAIN: "DFLASH", Mode.TREE: "DDTREE"}
ALL_SERVERS_SHARE = 0.8  # of the GPU's memory, where several servers are up and no share is given
LARGEST_SHARE = 0.95
MIN_RUNNING_REQUESTS = 8  # a request that ends still has its place when the next one comes
CONFIG_FILE_FLAG = "--config"
PARALLEL_FLAGS = (
    ("--tensor-parallel-size", "--tp-size"), ("--pipeline-parallel-size", "--pp-size"),
    ("--data-parallel-size", "--dp-size"),
)  # fmt: skip
SHARED_DATA_FLAG = "--enable-dp-attention"  # data parallel on the GPUs of tensor parallel
# Set by the run, so that arms differ in nothing but how they decode.
OWN_FLAGS = (
    "--model-path", "--model", "--host", "--port", "--api-key", "--dtype", "--device", "--base-gpu-id",
    "--speculative-algorithm", "--speculative-algo", "--speculative-draft-model-path",
    "--speculative-draft-model", "--speculative-num-draft-tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a GPU before a server starts."""

    free_bytes: int
    total_bytes: int


def launch_of(
    arm: Arm, config: BenchConfig, target: Path, drafter: Path | None, port: int, memory: Memory | None
) -> Launch:
    """How to start the server of an arm.

    Args:
        arm: of the engine `sglang`, with a mode.
        config: of the run; its `sglang_args` come last, so that they override what can be overridden.
        target, drafter: checkpoint folders.
        port: where it listens on this machine.
        memory: of the GPU with the least free memory; None on a CPU.

    Raises:
        ConfigError: flags that the run itself sets, or less memory is free than a server is to get.
    """
    check_flags(config)
    assert arm.mode is not None
    command = [
        server_python(config), "-m", "sglang.launch_server",
        "--model-path", str(target), "--host", HOST, "--port", str(port),
        "--max-running-requests", str(max(MIN_RUNNING_REQUESTS, *config.concurrency)),
        "--random-seed", str(request_seed(config.seed, 0)),
        *_device_flags(config, memory),
    ]  # fmt: skip
    if config.dtype != Dtype.AUTO:
        command += ["--dtype", str(config.dtype)]
    if arm.mode is not Mode.AR:
        command += ["--speculative-algorithm", ALGORITHMS[arm.mode]]
        command += ["--speculative-draft-model-path", str(drafter)]
    return Launch((*command, *config.sglang_flags()), _environment(arm, config))


def check_flags(config: BenchConfig) -> None:
    """Raise `ConfigError` for a flag that the run itself sets, or a file that may hold some."""
    for word in config.sglang_flags():
        flag = flag_name(word)
        own = next((name for name in (*OWN_FLAGS, CONFIG_FILE_FLAG) if is_flag(flag, name)), None)
        own = flag if flag in OWN_FLAGS else own  # --model, not what it begins
        if own == CONFIG_FILE_FLAG:
            why = "a file may set what the run itself sets; give its flags one by one"
        elif own is not None:
            why = (
                f"{flag} {'is' if flag == own else f'is short for {own}, which is'} set by the run itself; "
                "leave it out (model, drafter, device and dtype are settings of their own)"
            )
        else:
            continue
        raise ConfigError(f"sglang_args={config.sglang_args!r} is not allowed: {why}")


def flag_name(word: str) -> str:
    """The flag of a word of a command line, spelt with dashes; nothing where it is none."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""


def is_flag(given: str, name: str) -> bool:
    """Whether a flag is the one of a name or short for it: argparse takes any beginning that is unique."""
    return len(given) > len("--") and name.startswith(given)


def _device_flags(config: BenchConfig, memory: Memory | None) -> list[str]:
    if config.device == "cpu":
        return ["--device", "cpu"]
    flags = []
    index = config.device.partition(":")[2]
    if index:
        flags += ["--base-gpu-id", index]
    num_servers = servers_at_once(config, is_gpu=memory is not None)
    if num_servers > 1:
        flags.append("--sleep-on-idle")  # else each idle server keeps a core busy
    share = memory_fraction(config, num_servers, memory)
    return flags if share is None else [*flags, "--mem-fraction-static", f"{share:.4f}"]


def servers_at_once(config: BenchConfig, *, is_gpu: bool) -> int:
    """Servers of this run that are up together."""
    if config.servers_at_once is ServersAtOnce.ONE:
        return 1
    if config.servers_at_once is ServersAtOnce.AUTO and not is_gpu:
        return 1
    return len(arms_of_modes(SGLANG, config))


def memory_fraction(config: BenchConfig, num_servers: int, memory: Memory | None) -> float | None:
    """What SGLang calls mem_fraction_static: a share of the memory that is free when a server starts.

    Each server gets the same bytes, whichever starts first. None leaves it to SGLang.

    Raises:
        ConfigError: less memory is free than a server is to get.
    """
    if memory is None or (num_servers == 1 and not config.memory_share):
        return config.memory_share / num_servers if config.memory_share else None
    share = (config.memory_share or ALL_SERVERS_SHARE) / num_servers
    fraction = share * memory.total_bytes / max(memory.free_bytes, 1)
    if fraction > LARGEST_SHARE:
        raise ConfigError(
            f"memory_share={config.memory_share or ALL_SERVERS_SHARE} is not allowed: a server's part is "
            f"{share * memory.total_bytes / 2**30:.1f} GiB, and {memory.free_bytes / 2**30:.1f} GiB are "
            "free; give less, or run one server at a time (--servers-at-once one)"
        )
    return fraction


def _environment(arm: Arm, config: BenchConfig) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE}
    if arm.mode is Mode.TREE:
        budget = PluginConfig(node_budget=int(arm.node_budget)).node_budget
        environment[CONFIG_VARIABLE] = json.dumps({"node_budget": budget})
    if config.dtype == Dtype.FLOAT32:
        environment |= EXACT_FLOAT32
    return environment


def num_server_gpus(config: BenchConfig) -> int:
    """GPUs that an sglang server spreads over, by its flags; 1 without."""
    if SGLANG not in config.engines:
        return 1
    words = [part for word in config.sglang_flags() for part in word.split("=", 1)]
    count = 1
    for names in PARALLEL_FLAGS[:2] if SHARED_DATA_FLAG in words else PARALLEL_FLAGS:
        sizes = [
            value for word, value in pairwise(words) if any(is_flag(flag_name(word), name) for name in names)
        ]
        count *= max(int(sizes[-1]), 1) if sizes and sizes[-1].isdecimal() else 1
    return count


def gpu_memory(config: BenchConfig) -> list[Memory]:
    """Memory of the GPUs that a server of the run uses, from the first one on; none on a CPU."""
    import torch

    visible = 0 if config.device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    first = int(config.device.partition(":")[2] or 0)
    used = range(first, min(first + num_server_gpus(config), visible))
    return [Memory(*torch.cuda.mem_get_info(index)) for index in used]


def least_free(memory: Sequence[Memory]) -> Memory | None:
    """The GPU that limits a server: SGLang plans all of its GPUs by the one with the least free memory."""
    return min(memory, key=lambda each: each.free_bytes, default=None)


def taken_bytes(before: Sequence[Memory], now: Sequence[Memory]) -> int | None:
    """What was taken from all GPUs together meanwhile; None on a CPU."""
    taken = [max(one.free_bytes - other.free_bytes, 0) for one, other in zip(before, now, strict=True)]
    return sum(taken) if taken else None
