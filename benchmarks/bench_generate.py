"""How many new tokens a second does a target write while it makes a training corpus?

A corpus is generated into a temporary folder with continuous batching, a static cache and, on CUDA, one
graph a step. New tokens are the sampled ones of conversations in the corpus; openings, templates and
conversations that are dropped do not count. Two figures: over the whole run with loading, capture and the
tail in which slots run empty, and between the first fifth of the tokens and the last, when every slot is
busy. Needs ddtree[train]. The last line is JSON.

    PYTHONPATH=src python benchmarks/bench_generate.py --new-tokens 5000000 --output results/generate_gpu.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import write_results
from ddtree.models import resolve_target
from ddtree.train.generate import GenerationReport, ProgressReport, generate_corpus
from ddtree.train.recipe import DataSettings

STEADY_FROM, STEADY_TO = 0.2, 0.8  # shares of the tokens


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=5_000_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def steady_rate(marks: list[tuple[float, int]], new_tokens: int) -> float | None:
    """Tokens a second between two shares of the tokens, from (time in s, tokens) marks."""
    steady = [mark for mark in marks if STEADY_FROM * new_tokens <= mark[1] <= STEADY_TO * new_tokens]
    if len(steady) < 2 or steady[-1][0] == steady[0][0]:
        return None
    return (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0])


def generate(model: Any, tokenizer: Any, settings: DataSettings) -> tuple[GenerationReport, float | None]:
    """The report of one run, and its steady rate."""
    marks: list[tuple[float, int]] = []

    def mark(report: ProgressReport) -> bool:
        marks.append((time.perf_counter(), report.new_tokens))
        return True

    with tempfile.TemporaryDirectory() as folder:
        report = generate_corpus(model, tokenizer, settings, Path(folder), "bench", mark)
    return report, steady_rate(marks, report.new_tokens)


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    path = resolve_target(args.model)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    settings = DataSettings(new_tokens=args.new_tokens, slots=args.slots)
    report, rate = generate(model.requires_grad_(False), tokenizer, settings)
    total_s = time.perf_counter() - started
    gpu_bytes = torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else None
    results = {
        "model": args.model,
        "settings": asdict(settings),
        "report": asdict(report),
        "steady_tokens_per_s": rate,
        "total_s": total_s,
        "total_tokens_per_s": report.new_tokens / total_s,
        "peak_gpu_bytes": gpu_bytes,
    }
    write_results(args.output, results)


if __name__ == "__main__":
    main()
