"""Does every mode say exactly what plain decoding says? Real target, float32, on the CPU.

Greedy and sampled (one seed a prompt), chain and trees of several budgets, against plain decoding
token for token. Exits 1 at the end if any text differs. The last line is JSON.

    python benchmarks/check_lossless.py --prompts 40 --max-tokens 64 --output results/lossless_cpu_fp32.json
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from common import SETS, engine_arguments, load_engine, load_prompts, progress, write_results
from ddtree import Engine, Mode, Request, SamplingParams

BUDGETS = (4, 16, 64, 256)
TEMPERATURES = (0.0, 0.7, 1.0)
ARMS = [(Mode.CHAIN, 1), *((Mode.TREE, budget) for budget in BUDGETS)]


def mixed_prompts(count: int) -> list[str]:
    """Prompts taken from the sets in turn."""
    columns = [load_prompts(name, count) for name in SETS]
    return [prompt for row in zip(*columns, strict=True) for prompt in row][:count]


def compare(engine: Engine, prompt: str, sampling: SamplingParams, step: Any) -> dict[str, Any]:
    """Tokens of every arm against plain decoding; where the first difference is."""
    tokens = engine.encode(prompt)
    expected = engine.generate(Request(tokens, sampling, Mode.AR)).tokens
    step()
    row: dict[str, Any] = {"new_tokens": len(expected)}
    for mode, budget in ARMS:
        got = engine.generate(Request(tokens, sampling, mode, budget)).tokens
        name = "chain" if mode is Mode.CHAIN else f"tree:{budget}"
        differs = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        row[name] = "same" if got == expected else f"differs at token {differs}"
        step()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engine_arguments(parser, device="cpu", dtype="float32")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    args = parser.parse_args()
    engine = load_engine(args)
    rows = []
    prompts = mixed_prompts(args.prompts)
    with progress("runs", len(args.temperatures) * len(prompts) * (len(ARMS) + 1)) as step:
        for temperature in args.temperatures:
            for i, prompt in enumerate(prompts):
                sampling = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=i)
                rows.append(
                    {"temperature": temperature, "prompt": i, **compare(engine, prompt, sampling, step)}
                )
    compared = [row[key] for row in rows for key in row if key == "chain" or key.startswith("tree")]
    different = sum(outcome != "same" for outcome in compared)
    results = {"texts_compared": len(compared), "texts_that_differ": different, "rows": rows}
    write_results(args.output, results)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
