"""The model card of an exported drafter: what it is, from what and how it was made, what it reaches."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.models import KNOWN_MODELS
from ddtree.train.recipe import Recipe

# Licences of the targets in KNOWN_MODELS, as their cards state them.
LICENCES = {"smollm2-135m": "apache-2.0"}


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Everything a card says.

    Attributes:
        recipe: what was asked for.
        config: config.json of the drafter.
        num_parameters: of the drafter.
        corpus: figure -> value of the generation, such as "answer tokens" or "seconds".
        final: figure -> value at the end of training, such as "loss".
        acceptance: set -> drafting ("chain" or a node budget in digits) -> accept length.
        commands: the command lines that made it, in their order.
        provenance: `ddtree.provenance.provenance()` of the run that wrote the card.
    """

    recipe: Recipe
    config: Mapping[str, Any]
    num_parameters: int
    corpus: Mapping[str, int | float | str]
    final: Mapping[str, int | float | str]
    acceptance: Mapping[str, Mapping[str, float]]
    commands: Sequence[str]
    provenance: Mapping[str, Any]


def model_card(facts: CardFacts) -> str:
    """The card as Markdown."""
    name = target_name(facts.recipe)
    sections = [
        front_matter(facts.recipe),
        f"# A DFlash drafter for {name}",
        f"It predicts a block of tokens after a given one in a single pass, from hidden states of {name}; "
        "`ddtree` builds its draft trees from these predictions. The files have the layout of the z-lab "
        "DFlash checkpoints (`DFlashDraftModel`), which SGLang's `DFLASH` loads too.",
        usage(facts.recipe),
        shape_table(facts),
        "## Target",
        target_text(facts.recipe),
        "## Data",
        data_text(facts),
        "## Training",
        training_text(facts),
        "## Acceptance",
        acceptance_text(facts),
        "## How it was made",
        commands_text(facts),
        "## Licence and limits",
        limits_text(facts.recipe),
    ]
    return "\n\n".join(sections) + "\n"


def usage(recipe: Recipe) -> str:
    """How to load it."""
    model = recipe.target.model if recipe.target.model in KNOWN_MODELS else target_name(recipe)
    return (
        f'```sh\nddtree generate --model {shlex.quote(model)} --drafter THIS_FOLDER "Why is the sky blue?"\n'
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH "
        "--speculative-draft-model-path THIS_FOLDER\n```"
    )


def target_name(recipe: Recipe) -> str:
    known = KNOWN_MODELS.get(recipe.target.model)
    if known:
        return known.hub_name.rpartition("/")[2]
    return Path(recipe.target.model).name


def front_matter(recipe: Recipe) -> str:
    known = KNOWN_MODELS.get(recipe.target.model)
    lines = ["---"]
    if known:
        lines += [f"license: {LICENCES[recipe.target.model]}", f"base_model: {known.hub_name}"]
    elif not Path(recipe.target.model).is_dir():
        lines.append(f"base_model: {recipe.target.model}")
    return "\n".join([*lines, "tags: [dflash, speculative-decoding]", "---"])


def shape_table(facts: CardFacts) -> str:
    config = DFlashConfig.from_dict(facts.config)
    layers = ", ".join(map(str, config.target_layer_ids))
    count = facts.num_parameters
    size = f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
    rows = {
        "block size": f"{config.block_size}, the root included",
        "layers, hidden size": f"{config.num_layers}, {config.hidden_size}",
        "target layers read": f"outputs of layers {layers} (of {config.num_target_layers}, counted from 0)",
        "mask token id": config.mask_token_id,
        "parameters": f"{size}, bfloat16; embedding and output head are the target's",
    }
    return table(("", ""), [list(row) for row in rows.items()])


def target_text(recipe: Recipe) -> str:
    known = KNOWN_MODELS.get(recipe.target.model)
    if known is None:
        return f"Trained on outputs and hidden states of {target_name(recipe)} in {recipe.target.dtype}."
    return (
        f"The target here is {known.hub_name} dequantised from the file "
        f"`{Path(known.package.member).name}` of `{known.package.requirement}`, which is what `ddtree` loads "
        f"under the name `{recipe.target.model}`; it is not the original weights of the Hugging Face hub, "
        "with which acceptance may differ."
    )


def data_text(facts: CardFacts) -> str:
    data = facts.recipe.data
    shares = zip(data.temperatures, data.temperature_weights, strict=True)
    temperatures = ", ".join(f"{temperature:g} ({weight:.0%})" for temperature, weight in shares)
    excluded = ", ".join(f"`{Path(path).name}`" for path in data.exclude) or "none"
    own = f" {data.prompt_share:.0%} of the prompts came from a file." if data.prompt_share else ""
    text = (
        f"The target wrote the user turns and the answers itself.{own} {data.opening_share:.0%} of the turns "
        f"it wrote went on from one of {len(data.openings)} openings, at temperature "
        f"{data.prompt_temperature:g}. Answers: temperatures {temperatures}, at most "
        f"{data.max_answer_tokens} tokens. Prompts whose hash is in these files were dropped: {excluded}. "
        f"{data.held_out} conversations were kept out of training."
    )
    return f"{text}\n\n{figures(facts.corpus)}" if facts.corpus else text


def training_text(facts: CardFacts) -> str:
    train = facts.recipe.train
    kinds = {"hard": "the corpus's tokens", "soft": "the target's distributions"}
    weighting = {"position": "", "path": " times the probability that the drafts before it are right"}
    text = (
        f"Cross-entropy against {kinds[train.labels]} with weight exp(-(k - 1) / {train.position_decay:g}) "
        f"at position k of a block{weighting[train.weighting]}; {train.steps:,} steps of "
        f"{train.rows} rows of {train.row_tokens} tokens "
        f"with {train.num_anchors} blocks each. AdamW, betas {train.beta1:g} and {train.beta2:g}, weight "
        f"decay {train.weight_decay:g}, cosine from {train.learning_rate:g} to "
        f"{train.min_learning_rate_share:.0%} of it after {train.warmup_steps} steps of warm-up, gradients "
        f"clipped at {train.clip_norm:g}, seed {train.seed}."
    )
    return f"{text}\n\n{figures(facts.final)}" if facts.final else text


def acceptance_text(facts: CardFacts) -> str:
    if not facts.acceptance:
        return "Not measured: no held-out conversations or sets were evaluated."
    evaluation = facts.recipe.evaluation
    return (
        "Tokens committed a round (correct drafts and bonus token); greedy, at most "
        f"{evaluation.max_tokens} new tokens a prompt and {evaluation.set_prompts} prompts a set, computed "
        "offline on the target's own greedy outputs. B is the node budget, root not counted.\n\n"
        + acceptance_table(facts.acceptance)
    )


def acceptance_table(acceptance: Mapping[str, Mapping[str, float]]) -> str:
    """Sets by row, chain and budgets by column, as Markdown."""
    columns = list(dict.fromkeys(column for row in acceptance.values() for column in row))
    header = ("prompts", *(column if column == "chain" else f"B={column}" for column in columns))
    rows = [
        [name, *(f"{row[column]:.2f}" if column in row else "" for column in columns)]
        for name, row in acceptance.items()
    ]
    return table(header, rows)


def commands_text(facts: CardFacts) -> str:
    commands = "\n".join(facts.commands)
    return (
        f"```sh\n{commands}\n```\n\nThe recipe, files by name:\n\n{json_lines(portable(facts.recipe))}\n\n"
        f"Where it ran:\n\n{json_lines(facts.provenance)}"
    )


def json_lines(values: Mapping[str, Any]) -> str:
    """An object as a block of JSON, one line a key."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "```json\n{\n" + ",\n".join(lines) + "\n}\n```"


def portable(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, with files named without their folders."""
    values = recipe.as_dict()
    data, evaluation = values["data"], values["evaluation"]
    data["prompts"] = Path(data["prompts"]).name
    data["exclude"] = [Path(path).name for path in data["exclude"]]
    evaluation["sets"] = {name: Path(path).name for name, path in evaluation["sets"].items()}
    values["drafter"]["init_from"] = Path(values["drafter"]["init_from"]).name
    if Path(values["target"]["model"]).is_dir():
        values["target"]["model"] = Path(values["target"]["model"]).name
    return values


def limits_text(recipe: Recipe) -> str:
    known = KNOWN_MODELS.get(recipe.target.model)
    licence = (
        f"The licence is {LICENCES[recipe.target.model]}, as the target's."
        if known
        else "The weights were trained on outputs of the target: see its licence for what may be done."
    )
    return (
        f"{licence} The drafter says nothing by itself: every token is the target's choice, and a poor draft "
        "costs speed, not quality. It has seen conversations of one turn, up to "
        f"{recipe.data.max_prompt_tokens} prompt and {recipe.data.max_answer_tokens} answer tokens, in the "
        "languages and subjects that the target writes by itself; elsewhere acceptance is lower. It fits no "
        "other target."
    )


def figures(values: Mapping[str, int | float | str]) -> str:
    return table(("figure", "value"), [[name, readable(value)] for name, value in values.items()])


def readable(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
