"""Does stock SGLang load a drafter in its DFLASH algorithm, and how many tokens a round does it accept?

Starts SGLang's in-process engine with `speculative_algorithm="DFLASH"`, answers prompt sets greedily and
pools tokens a verify pass. A request's first token comes from its prefill and is not counted. Where
--offline names an acceptance.json of `ddtree train`, its chain figures stand beside them. Needs a GPU and
SGLang; the last line is JSON.

    python benchmarks/check_sglang_dflash.py --offline runs/smollm2-135m/acceptance.json \\
        --output results/sglang_dflash.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from common import SETS, load_prompts, write_results
from ddtree.models import resolve_drafter, resolve_target


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--offline", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--memory-share", type=float, default=0.3, help="mem_fraction_static")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def start_engine(args: argparse.Namespace, target: Path) -> Any:
    """SGLang's engine with the drafter; prefill graphs and grammars are not needed here and cost minutes."""
    import sglang

    return sglang.Engine(
        model_path=str(target),
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(resolve_drafter(args.drafter, args.model)),
        attention_backend=args.attention_backend,
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_prefill_cuda_graph=True,
        mem_fraction_static=args.memory_share,
        cuda_graph_max_bs_decode=args.prompts,
    )


def measure(engine: Any, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Pooled tokens a verify pass over the prompts, all at once."""
    outputs = engine.generate(prompts, {"temperature": 0.0, "max_new_tokens": max_tokens})
    infos = [output["meta_info"] for output in outputs]
    rounds = sum(info["spec_verify_ct"] for info in infos)
    tokens = sum(info["completion_tokens"] - 1 for info in infos)
    return {"accept_length": round(tokens / rounds, 4), "tokens": tokens, "rounds": rounds}


def main() -> None:
    args = parse_arguments()
    import sglang
    from transformers import AutoTokenizer

    target = resolve_target(args.model)
    tokenizer = AutoTokenizer.from_pretrained(target)
    offline = json.loads(args.offline.read_text(encoding="utf-8"))["sets"] if args.offline else {}
    started = time.perf_counter()
    engine = start_engine(args, target)
    start_s = round(time.perf_counter() - started, 1)
    table: dict[str, Any] = {}
    for name in args.sets:
        turns = [[{"role": "user", "content": text}] for text in load_prompts(name, args.prompts)]
        texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        table[name] = measure(engine, texts, args.max_tokens)
        if name in offline:
            table[name]["offline_chain"] = offline[name]["chain"]["accept_length"]
        print(name, table[name], flush=True)
    settings = {"prompts": args.prompts, "max_tokens": args.max_tokens, "backend": args.attention_backend}
    write_results(args.output, {"sglang": sglang.__version__, "start_s": start_s, **settings, "sets": table})
    engine.shutdown()


if __name__ == "__main__":
    main()
