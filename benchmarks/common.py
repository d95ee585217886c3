"""What the benchmark programs share: prompts and results files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddtree import Engine, EngineConfig
from ddtree.bench.datasets import SHIPPED_SETS, load_prompt_set
from ddtree.config import Dtype
from ddtree.engine.stock_target import StockTarget
from ddtree.models import resolve_target
from ddtree.provenance import provenance

SETS = tuple(SHIPPED_SETS)


def engine_arguments(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Add what decides an engine: --model, --drafter, --device, --dtype, --threads; and --output."""
    for name, value in {
        "model": "smollm2-135m",
        "drafter": "auto",
        "device": "auto",
        "dtype": "auto",
    }.items():
        parser.add_argument(f"--{name}", default=defaults.get(name, value))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path)


def load_engine(args: argparse.Namespace) -> Engine:
    """The engine of parsed arguments."""
    return Engine.load(
        EngineConfig(
            model=args.model,
            drafter=args.drafter,
            device=args.device,
            dtype=Dtype(args.dtype),
            threads=args.threads,
        )
    )


def load_stock(name: str, engine: Engine) -> StockTarget:
    """A target again, on its own transformers modules, where and as the engine runs."""
    from transformers import AutoModelForCausalLM

    dtype = engine.pair.kv_cache.data.dtype
    model = AutoModelForCausalLM.from_pretrained(
        resolve_target(name), dtype=dtype, attn_implementation="sdpa"
    )
    return StockTarget(model.to(engine.device).eval().requires_grad_(False), dtype, engine.device)


def load_prompts(name: str, count: int) -> list[str]:
    """First user turns of a prompt set, in file order."""
    return [prompt.turns[0] for prompt in load_prompt_set(name, count).prompts]


def write_results(output: Path | None, results: dict[str, Any]) -> None:
    """Print the results as one JSON line; write them with provenance where a path is given."""
    print(json.dumps(results))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = {"provenance": provenance(), **results}
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


@contextmanager
def progress(title: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr; call the yielded function once a step."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
