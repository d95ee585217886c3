"""The roadmap's tables of knobs: default, range and meaning from the code, the effect from here.

A field of a configuration that has no entry in `EFFECTS` is an error, so that a new knob gets one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from benchmark_tables import table

from ddtree.config import EngineConfig, PluginConfig, SamplingParams, ServerConfig
from ddtree.engine.request import Request
from ddtree.errors import ConfigError
from ddtree.train import recipe

HEAD = ("knob", "meaning", "default", "range", "speed", "memory", "acceptance")
REFUSED = " is not allowed: "
NONE = "none"

# Speed; memory; acceptance (accept length).
Effects = Mapping[str, tuple[str, str, str]]

ENGINE: Effects = {
    "model": ("a step is bound by its weights", "weights, KV a token", "how predictable its text is"),
    "drafter": ("one draft pass a round", "its weights and KV", "everything"),
    "device": ("everything", NONE, NONE),
    "dtype": ("bytes a weight; float32 is exact and slow", "twice for float32", "none beyond near ties"),
    "threads": ("CPU only", NONE, NONE),
    "max_context_tokens": (NONE, "KV cache, linear", "requests beyond it are refused"),
    "candidate_topk": ("top-K of every position", "negligible", "below the budget the best tree may be cut"),
    "cuda_graphs": ("off: every kernel launched by the host, for debugging", "graph buffers", NONE),
}
SAMPLING: Effects = {
    "max_tokens": ("length", "KV", NONE),
    "temperature": (NONE, NONE, "falls as it rises: the draw leaves the likeliest path"),
    "top_k": ("a cut of every node's logits", NONE, "smaller: rises"),
    "top_p": ("a cut of every node's logits", NONE, "smaller: rises"),
    "min_p": ("a cut of every node's logits", NONE, "larger: rises"),
    "repetition_penalty": (
        "counts along each path; no greedy graph in SGLang", "int32 a token id and slot", "falls"),
    "presence_penalty": ("as repetition_penalty", "as repetition_penalty", "falls"),
    "frequency_penalty": ("as repetition_penalty", "as repetition_penalty", "falls"),
    "logit_bias": ("no greedy graph in SGLang", "a row a request", "falls: the drafter does not know it"),
    "seed": (NONE, NONE, "none: noise is keyed by seed, position and token"),
    "stop": ("text is held back while it could be a stop", NONE, NONE),
    "stop_token_ids": (NONE, NONE, "tokens of the round behind it are dropped"),
    "ignore_eos": (NONE, NONE, "not measured"),
}  # fmt: skip
PLUGIN: Effects = {
    "node_budget": (
        "verify width max(block, budget + 1): up to block - 1 nodes no wider than DFLASH",
        "verify logits, mask, KV headroom", "rises, ever more slowly"),
    "candidate_topk": ("top-K of every draft position", "negligible", "below the budget the tree may be cut"),
    "mode": ("chain: DFLASH's drafts by this path", "as DFLASH", "chain: lower"),
    "max_accept_tokens": ("a limit makes rounds shorter", NONE, "cut at the limit; for debugging"),
    "metrics": ("counters on the host, no wait", NONE, NONE),
    "check_ranks": ("a gather and a wait a round; for debugging", NONE, NONE),
    "trace_file": ("a line a round, written off the round's path; for debugging", NONE, NONE),
    "trace_detail": ("full: path logits read once more, longer lines", "full: 256 rows of logits", NONE),
}  # fmt: skip
SERVER: Effects = {
    "host": (NONE, NONE, NONE),
    "port": (NONE, NONE, NONE),
    "served_model_name": (NONE, NONE, NONE),
    "api_key_env": (NONE, NONE, NONE),
    "api_key_file": (NONE, NONE, NONE),
    "max_queue": ("longer waits before 429", "a prompt a place", NONE),
    "request_timeout_s": ("ends what waits too long", NONE, NONE),
    "shutdown_s": ("how long a stop may take", NONE, NONE),
    "max_body_bytes": (NONE, "a body at a time", NONE),
    "mode": ("the default of requests", NONE, "ar: 1; chain; tree"),
    "node_budget": ("auto picks by measured cost", "KV window", "rises with it"),
}
REQUEST: Effects = {
    "prompt_tokens": ("prefill", "KV", "its kind of text decides"),
    "sampling": ("see SamplingParams", "", ""),
    "mode": ("ar: a token a pass", NONE, "ar: 1; chain; tree"),
    "node_budget": ("as the plugin's; auto decides every round", NONE, "rises with it"),
    "observer": ("whatever it does", NONE, NONE),
    "top_logprobs": ("log-softmax and top-k of accept tokens", NONE, NONE),
}  # fmt: skip
# Speed and memory are those of training, save where a drafter's shape decides its draft pass.
TARGET: Effects = {
    "model": ("corpus and features of the target", "its weights", "the drafter is for this target alone"),
    "dtype": ("float32 is slower", "bytes a weight", "should be what is served"),
}
DATA: Effects = {
    "new_tokens": ("time of the corpus, linear", "disk, linear", "rises with it; not isolated here"),
    "seed": (NONE, NONE, "not measured"),
    "slots": ("more side by side: faster", "KV cache", NONE),
    "max_prompt_tokens": ("longer rows", "KV cache", "of long prompts"),
    "max_answer_tokens": ("longer rows", "KV cache", "of long answers"),
    "prompt_temperature": (NONE, NONE, "variety of the turns"),
    "temperatures": (NONE, NONE, "should be those that are served"),
    "temperature_weights": (NONE, NONE, "as temperatures"),
    "openings": (NONE, NONE, "kinds of text that the target would not begin by itself"),
    "opening_share": (NONE, NONE, "as openings"),
    "prompts": (NONE, NONE, "the prompts that are served, best of all"),
    "prompt_share": (NONE, NONE, "as prompts"),
    "exclude": (NONE, NONE, "keeps evaluation honest"),
    "shard_tokens": (NONE, "a file at a time", NONE),
    "held_out": (NONE, NONE, "steadier figures"),
}
DRAFTER: Effects = {
    "block_size": ("draft pass and least W", "verify buffers", "its length bounds tau"),
    "num_layers": ("draft pass, linear", "weights, KV", "rises slowly"),
    "intermediate_size": ("draft pass", "weights", "rises slowly"),
    "num_heads": ("draft pass", "weights", "not measured"),
    "num_kv_heads": ("draft pass", "KV", "not measured"),
    "head_dim": ("draft pass", "weights, KV", "not measured"),
    "target_layer_ids": ("the taps' projection", "hidden states a token", "five spread ones won here"),
    "mask_token_id": (NONE, NONE, "a token that occurs in text spoils it"),
    "rope_theta": (NONE, NONE, "not measured"),
    "rms_norm_eps": (NONE, NONE, NONE),
    "max_position_embeddings": (NONE, NONE, "none within it"),
    "init_from": ("fewer steps", NONE, "begins where that drafter was"),
}
TRAIN: Effects = {
    "steps": ("training time, linear", NONE, "rises, ever more slowly"),
    "rows": ("a step, linear", "activations", "as steps"),
    "row_tokens": ("a step, linear", "activations", "of longer contexts"),
    "num_anchors": ("a step", "logits of the blocks", "as steps"),
    "learning_rate": (NONE, NONE, "twice the default was worse"),
    "min_learning_rate_share": (NONE, NONE, "not measured"),
    "warmup_steps": (NONE, NONE, "not measured"),
    "weight_decay": (NONE, NONE, "not measured"),
    "beta1": (NONE, NONE, "not measured"),
    "beta2": (NONE, NONE, "not measured"),
    "clip_norm": (NONE, NONE, "guards against bad batches"),
    "position_decay": (NONE, NONE, "4 beat 7 where weighting is by position"),
    "weighting": ("path: a second pass over the logits", "logits once more", "path: the largest gain"),
    "labels": ("soft: the target's logits", "soft: the target's logits", "about equal"),
    "seed": (NONE, NONE, "not measured"),
    "log_every": (NONE, NONE, NONE),
    "checkpoint_every": ("a write each", "disk", NONE),
    "compile": ("faster, after a slow start", NONE, NONE),
    "max_loss": (NONE, NONE, "none: ends a run that exploded"),
}
EVALUATION: Effects = {
    "every": ("a pause each", NONE, NONE),
    "prompts": ("evaluation, linear", NONE, "steadier figures"),
    "max_tokens": ("evaluation, linear", NONE, "of later positions"),
    "budgets": ("evaluation", NONE, "which are reported"),
    "set_prompts": ("evaluation, linear", NONE, "steadier figures"),
    "sets": ("evaluation", NONE, "which are reported"),
}
EFFECTS: Mapping[type, Effects] = {
    PluginConfig: PLUGIN, EngineConfig: ENGINE, Request: REQUEST, SamplingParams: SAMPLING,
    ServerConfig: SERVER, recipe.TargetSettings: TARGET, recipe.DataSettings: DATA,
    recipe.DrafterSettings: DRAFTER, recipe.TrainSettings: TRAIN, recipe.EvaluationSettings: EVALUATION,
}  # fmt: skip
REQUEST_MEANINGS = {
    "prompt_tokens": "the prompt's token ids",
    "sampling": "how tokens are chosen and when to stop",
    "mode": "ar, chain or tree",
    "node_budget": "nodes of the tree, or auto",
    "observer": "is told about every round",
    "top_logprobs": "log-probabilities of every new token and of so many of the likeliest",
}
# A value that the last check of a field refuses, where its first one says only a part of the range.
PROBES: Mapping[str, Any] = {
    "node_budget": 0, "temperature_weights": (), "exclude": (0,), "openings": (0,), "opening_share": 2,
    "prompt_share": 2,
}  # fmt: skip
# What must be given besides the field that is probed.
NEEDED: Mapping[type, Mapping[str, Any]] = {
    Request: {"prompt_tokens": (1,)}, recipe.DrafterSettings: {"mask_token_id": 0},
}  # fmt: skip
REQUEST_RANGES = {"prompt_tokens": "one or more", "sampling": "SamplingParams", "observer": "RoundObserver"}


def knobs(config: type, meanings: Mapping[str, str] | None = None) -> str:
    """The table of a configuration's fields."""
    return table(HEAD, rows_of(config, meanings))


def rows_of(config: type, meanings: Mapping[str, str] | None = None, prefix: str = "") -> list[list[str]]:
    rows = []
    for field in fields(config):
        if field.name not in EFFECTS[config]:
            raise SystemExit(
                f"{config.__name__}.{field.name} has no effects in scripts/roadmap_knobs.py: add them"
            )
        meaning = (meanings or {}).get(field.name) or field.metadata["help"]
        speed, memory, acceptance = EFFECTS[config][field.name]
        rows.append([
            f"`{prefix}{field.name}`", escape(meaning), default_of(field),
            escape(range_of(config, field.name)), speed, memory, acceptance,
        ])  # fmt: skip
    return rows


def default_of(field: Field[Any]) -> str:
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return "needed"
    if isinstance(value, SamplingParams):
        return "greedy"
    if value is None or value in ("", (), {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def range_of(config: type, name: str) -> str:
    """What the code allows, as it says itself when a value is refused."""
    if config is Request and name in REQUEST_RANGES:
        return REQUEST_RANGES[name]
    try:
        config(**{**NEEDED.get(config, {}), name: PROBES.get(name, object())})
    except ConfigError as error:
        return str(error).split(REFUSED, 1)[1].split("; ")[0]
    raise SystemExit(f"{config.__name__}.{name} takes any value: check it, so that a mistake is told")


def escape(text: str) -> str:
    return text.replace("|", "\\|")


def all_knobs() -> str:
    """Every configuration's table below its heading."""
    return "\n\n".join((
        f"### Plugin: `DDTREE_CONFIG` or `ddtree.toml` (`PluginConfig`)\n\n{knobs(PluginConfig)}",
        f"### Embedded engine (`EngineConfig`)\n\n{knobs(EngineConfig)}",
        f"### A request to the embedded engine (`Request`)\n\n{knobs(Request, REQUEST_MEANINGS)}",
        f"### Sampling (`SamplingParams`; SGLang has its own of these names)\n\n{knobs(SamplingParams)}",
        f"### `ddtree serve` (`ServerConfig`)\n\n{knobs(ServerConfig)}",
        f"### Training a drafter: the recipe's keys\n\n{recipe_knobs()}",
    ))  # fmt: skip


def recipe_knobs() -> str:
    """One table for the recipe's five."""
    rows = [row for name, config in recipe.TABLES.items() for row in rows_of(config, prefix=f"{name}.")]
    return table(HEAD, rows)
