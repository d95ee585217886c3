"""An export is whole, loads as any z-lab checkpoint does, and its card says how it was made."""

import json
from pathlib import Path

import pytest
import torch

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.load import read_weights
from ddtree.errors import CheckpointError, ConfigError, ModelError
from ddtree.models import KNOWN_MODELS
from ddtree.provenance import provenance
from ddtree.train.export import export_drafter
from ddtree.train.model_card import LICENCES, CardFacts, acceptance_table, model_card
from ddtree.train.recipe import DrafterSettings, load_recipe
from tiny_models import load_tiny_drafter, random_drafter_weights, tiny_drafter_config, tiny_llama

ROOT = Path(__file__).parents[2]
ACCEPTANCE = {"gsm8k": {"chain": 3.104, "64": 4.5}, "held out": {"chain": 2.5}}


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def config(target):
    return tiny_drafter_config(target)


@pytest.fixture(scope="module")
def weights(config):
    return random_drafter_weights(DFlashConfig.from_dict(config))


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_export_loads_and_holds_the_weights_in_bfloat16(tmp_path, target, config, weights):
    folder = export_drafter(weights, config, tmp_path / "runs" / "drafter", "# Card\n")
    assert files_of(folder) == ["README.md", "config.json", "model.safetensors"]
    assert files_of(folder.parent) == ["drafter"]
    assert (folder / "README.md").read_text() == "# Card\n"
    written = json.loads((folder / "config.json").read_text())
    assert written == {**config, "dtype": "bfloat16"}
    read = read_weights(folder, DFlashConfig.from_path(folder))
    assert {name: weight.dtype for name, weight in read.items()} == dict.fromkeys(weights, torch.bfloat16)
    assert all(torch.equal(read[name], weights[name].bfloat16()) for name in weights)
    assert load_tiny_drafter(folder, target).config.block_size == 8


def test_an_export_replaces_one_that_stands_there(tmp_path, config, weights):
    folder = tmp_path / "drafter"
    export_drafter(weights, config, folder, "old")
    export_drafter({name: weight + 1 for name, weight in weights.items()}, config, folder, "new")
    assert (folder / "README.md").read_text() == "new"
    read = read_weights(folder, DFlashConfig.from_path(folder))
    assert torch.equal(read["norm.weight"], (weights["norm.weight"] + 1).bfloat16())
    assert files_of(tmp_path) == ["drafter"]


@pytest.mark.parametrize("spoil", ["missing", "shape", "nan"])
def test_a_wrong_export_leaves_what_stood_there(tmp_path, config, weights, spoil):
    folder = tmp_path / "drafter"
    export_drafter(weights, config, folder, "old")
    wrong = dict(weights)
    if spoil == "missing":
        del wrong["fc.weight"]
    elif spoil == "shape":
        wrong["norm.weight"] = torch.ones(3)
    else:
        wrong["norm.weight"] = torch.full_like(weights["norm.weight"], torch.nan)
    with pytest.raises(CheckpointError, match=r"fc\.weight|norm\.weight"):
        export_drafter(wrong, config, folder, "new")
    assert (folder / "README.md").read_text() == "old"
    assert files_of(tmp_path) == ["drafter"]


def test_tied_tensors_are_written_apart(tmp_path, config, weights):
    tied = {name: weight.bfloat16() for name, weight in weights.items()}
    tied["hidden_norm.weight"] = tied["norm.weight"]
    folder = export_drafter(tied, config, tmp_path / "drafter", "")
    read = read_weights(folder, DFlashConfig.from_path(folder))
    assert torch.equal(read["hidden_norm.weight"], read["norm.weight"])


def test_a_folder_with_other_files_is_not_replaced(tmp_path, config, weights):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="choose another output"):
        export_drafter(weights, config, tmp_path, "")
    with pytest.raises(ConfigError, match="choose another output"):
        export_drafter(weights, config, tmp_path / "thesis.tex", "")
    assert files_of(tmp_path) == ["thesis.tex"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path, config, weights):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="cannot be written"):
        export_drafter(weights, config, tmp_path / "file" / "drafter", "")


@pytest.fixture
def facts(config):
    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m.toml")
    return CardFacts(
        recipe=recipe,
        config=config,
        num_parameters=15_800_000,
        corpus={"answer tokens": 30_000_000, "seconds": 412.345},
        final={"loss": 2.3456},
        acceptance=ACCEPTANCE,
        commands=(
            "ddtree train recipes/smollm2-135m.toml --stage data",
            "ddtree train recipes/smollm2-135m.toml",
        ),
        provenance=provenance(),
    )


def test_the_card_says_what_was_made_from_what(facts):
    card = model_card(facts)
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n")
    for part in (
        "# A DFlash drafter for SmolLM2-135M-Instruct",
        "dequantised from the file `SmolLM2-135M-Instruct.Q4_1.gguf`",
        "not the original weights",
        "| answer tokens | 30,000,000 |",
        "| seconds | 412.3 |",
        "| loss | 2.346 |",
        "temperatures 0 (50%), 0.7 (25%), 1 (25%)",
        "`excluded_prompts.sha256`",
        "7,000 steps of 16 rows of 1024 tokens with 96 blocks",
        "| gsm8k | 3.10 | 4.50 |",
        "--stage data\nddtree train recipes/smollm2-135m.toml\n```",
    ):
        assert part in card
    assert str(ROOT) not in card
    assert "None" not in card


def test_a_card_for_another_target_claims_no_licence_and_no_dequantising(facts, tmp_path):
    text = '[target]\nmodel = "some/model"\n[drafter]\nmask_token_id = 3\n'
    (tmp_path / "r.toml").write_text(text)
    other = CardFacts(load_recipe(tmp_path / "r.toml"), facts.config, 1, {}, {}, {}, (), {})
    card = model_card(other)
    assert card.startswith("---\nbase_model: some/model\ntags:")
    assert "dequantised" not in card
    assert "see its licence" in card
    assert "Not measured" in card


def test_columns_that_a_set_lacks_are_empty():
    assert acceptance_table(ACCEPTANCE).splitlines() == [
        "| prompts | chain | B=64 |",
        "| --- | --- | --- |",
        "| gsm8k | 3.10 | 4.50 |",
        "| held out | 2.50 |  |",
    ]


def test_every_known_target_has_a_licence():
    assert set(LICENCES) == set(KNOWN_MODELS)


def test_the_default_shape_has_no_mask_token():
    with pytest.raises(ConfigError, match="mask_token_id"):
        DrafterSettings()
