"""Back to SGLang's own DFLASH by one flag, with the plugin loaded and its settings set."""

import pytest

from sglang_kit.plugin import STOCK_DFLASH_VARIABLE
from sglang_kit.prompts import prompt
from sglang_kit.runs import request, run_engine, step
from sglang_kit.sizes import BLOCK_SIZE

pytestmark = pytest.mark.sglang

NEW_TOKENS = 24
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}


def test_dflash_runs_as_if_the_plugin_were_not_there(qwen3_pair, tmp_path):
    from sglang_kit.reference import decode

    prompts = [prompt(800 + i, 6 + 11 * i) for i in range(3)]
    run = run_engine(
        tmp_path,
        qwen3_pair,
        [step([request(f"dflash-{i}", p, GREEDY) for i, p in enumerate(prompts)])],
        config={"node_budget": 63},
        env={STOCK_DFLASH_VARIABLE: "1"},
        speculative_algorithm="DFLASH",
    )
    for i, p in enumerate(prompts):
        assert run.tokens(f"dflash-{i}") == decode(qwen3_pair.target, p, GREEDY).tokens
    assert run.info["speculative_num_draft_tokens"] == BLOCK_SIZE
    assert run.info["speculative_eagle_topk"] == 1
    assert not run.rounds
