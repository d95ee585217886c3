"""Draws the README's picture: the draft tree of one real round, as the terminal shows it.

python scripts/make_tree_picture.py --output docs/images/tree.svg
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from ddtree import Engine, EngineConfig, Mode, Request, SamplingParams
from ddtree.cli.tree_view import LEGEND, LongestPath, draw_tree
from ddtree.config import Dtype

PROMPT = (
    "A baker makes 24 rolls and sells three quarters of them. How many rolls are left? Think step by step."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    engine = Engine.load(EngineConfig(device="cpu", dtype=Dtype.FLOAT32))
    observer = LongestPath()
    sampling = SamplingParams(max_tokens=args.max_tokens)
    engine.generate(Request(engine.encode(PROMPT), sampling, Mode.TREE, args.budget, observer))
    assert observer.best is not None
    console = Console(record=True, width=78, file=io.StringIO(), force_terminal=True)
    console.print(draw_tree(observer.best, lambda token: engine.tokenizer.decode([token])))
    console.print(LEGEND, style="dim")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    svg = console.export_svg(title="one round: draft tree, accepted path")
    # Without fonts from elsewhere: a viewer's own monospace font will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "monospace")
    args.output.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
