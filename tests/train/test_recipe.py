"""Recipes: what a TOML file may hold, what its errors say, and the drafter's config made from it."""

import json
import runpy
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from ddtree.config import Dtype
from ddtree.draft.dflash_config import DFlashConfig
from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.drafter_shape import drafter_config, spread_layer_ids
from ddtree.train.fingerprint import corpus_fingerprint, training_fingerprint
from ddtree.train.prompts import load_excluded, normalised_prompt_hash
from ddtree.train.recipe import (
    TABLES,
    DrafterSettings,
    Recipe,
    dry_run_recipe,
    load_recipe,
)
from ddtree.train.tiny_pair import write_tiny_target
from tiny_models import tiny_llama, tiny_qwen3, write_tiny_drafter

ROOT = Path(__file__).parents[2]
RECIPES = [ROOT / "recipes" / f"{name}.toml" for name in ("smollm2-135m", "qwen3-8b")]
SHIPPED = ROOT / "src" / "ddtree" / "data" / "drafters" / "smollm2-135m-dflash-b16" / "config.json"
MASK = "[drafter]\nmask_token_id = 3\n"


@pytest.fixture
def write(tmp_path):
    """Write a recipe and load it."""

    def load(text):
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return load_recipe(path)

    return load


def test_the_mask_token_is_all_that_a_recipe_must_hold(write):
    recipe = write(MASK)
    assert recipe.drafter.mask_token_id == 3
    assert recipe.train == TABLES["train"]()
    assert recipe.target.dtype is Dtype.BFLOAT16
    with pytest.raises(ConfigError, match=r"recipe.toml: \[drafter\] mask_token_id=-1.*special token"):
        write("")


def test_values_are_read_with_lists_as_tuples(write):
    recipe = write(
        MASK + "target_layer_ids = [1, 2]\n[data]\ntemperatures = [0, 1]\ntemperature_weights = [0.5, 0.5]\n"
        '[target]\ndtype = "float32"\n[train]\nlearning_rate = 1\nlabels = "soft"\n'
    )
    assert recipe.drafter.target_layer_ids == (1, 2)
    assert recipe.data.temperatures == (0, 1)
    assert recipe.target.dtype == Dtype.FLOAT32
    assert (recipe.train.learning_rate, recipe.train.labels) == (1, "soft")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[trian]\n", "unknown table: 'trian'; did you mean train?"),
        ("steps = 3\n", "unknown table: 'steps'"),
        (MASK + "[train]\nlabel = 1\n", "unknown key in [train]: 'label'; did you mean labels?"),
        (MASK + "[train]\nxyzzy = 1\n", "unknown key in [train]: 'xyzzy'; allowed are steps, rows"),
        ("train = 3\n" + MASK, "train=3 is not allowed: a table: write [train]"),
        ("[train\n", "is not TOML"),
        (MASK + "[train]\nsteps = '9'\n", "[train] steps='9'"),
        (MASK + "[train]\nsteps = 1.5\n", "[train] steps=1.5 is not allowed: a whole number"),
        (MASK + "[train]\nsteps = true\n", "[train] steps=True"),
        (MASK + "[train]\nsteps = 0\n", "from 1 to"),
        (MASK + "[train]\nlearning_rate = nan\n", "learning_rate=nan"),
        (MASK + "[train]\nlabels = 'firm'\n", "one of hard, soft"),
        (MASK + "[train]\ncompile = 1\n", "compile=1 is not allowed: true or false"),
        (MASK + "[target]\nmodel = ''\n", "model=''"),
        (MASK + "[target]\ndtype = 'float16'\n", "dtype='float16'"),
        (MASK + "[target]\ndtype = ['float32']\n", "dtype=('float32',)"),
        (MASK + "[data]\ntemperatures = [0.5]\n", "temperature_weights=(0.5, 0.25, 0.25)"),
        (MASK + "[data]\ntemperature_weights = [0.5, 0.5, 0.5]\n", "together 1"),
        (MASK + "[data]\ntemperatures = []\ntemperature_weights = []\n", "temperatures=()"),
        (MASK + "[data]\ntemperatures = 'warm'\n", "temperatures='warm'"),
        (MASK + "[data]\nopening_share = 0.5\n", "opening_share=0.5 is not allowed: 0 without openings"),
        (MASK + "[data]\nprompt_share = 0.5\n", "0 without prompts"),
        (MASK + "[data]\nopenings = ['']\n", "none empty"),
        (MASK + "[data]\nprompts = 3\n", "prompts=3"),
        (MASK + "[data]\nexclude = 'a.jsonl'\n", "exclude='a.jsonl' is not allowed: a list"),
        (MASK + "block_size = 1\n", "block_size=1 is not allowed: a whole number from 2 to 256"),
        (MASK + "target_layer_ids = [2, 1]\n", "strictly increasing"),
        (MASK + "init_from = 1\n", "init_from=1"),
        (MASK + "[evaluation]\nbudgets = [64, 16]\n", "strictly increasing"),
        (MASK + "[evaluation]\nbudgets = [2000]\n", "from 1 to 1024"),
        (MASK + "[evaluation]\nprompts = 300\n", "at most data.held_out=256"),
        (MASK + "[evaluation.sets]\na = 1\n", "sets={'a': 1}"),
        (MASK + "[evaluation]\nsets = 'a.jsonl'\n", "sets='a.jsonl'"),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_told_with_file_and_key(write, text, told):
    with pytest.raises(ConfigError) as refused:
        write(text)
    assert told in str(refused.value)
    assert "recipe.toml" in str(refused.value)


def test_a_recipe_that_is_not_there_or_not_text_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml.*No such file"):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="directory"):
        load_recipe(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_recipe(tmp_path / "bytes.toml")


def test_relative_paths_count_from_the_recipes_folder(write, tmp_path):
    recipe = write(
        MASK + 'init_from = "old"\n[target]\nmodel = "./target"\n'
        '[data]\nexclude = ["../a.sha256", "/b.jsonl"]\nprompts = "p.jsonl"\n'
        '[evaluation.sets]\nx = "sets/x.jsonl"\n'
    )  # fmt: skip
    assert recipe.target.model == str(tmp_path / "target")
    assert recipe.drafter.init_from == str(tmp_path / "old")
    assert recipe.data.exclude == (str(tmp_path.parent / "a.sha256"), "/b.jsonl")
    assert recipe.data.prompts == str(tmp_path / "p.jsonl")
    assert recipe.evaluation.sets == {"x": str(tmp_path / "sets" / "x.jsonl")}
    assert write(MASK).data.prompts == ""
    assert write(MASK + '[target]\nmodel = "Qwen/Qwen3-8B"\n').target.model == "Qwen/Qwen3-8B"


def test_the_page_has_every_key_as_it_is():
    script = runpy.run_path(str(ROOT / "scripts" / "make_recipe_docs.py"))
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert page == script["render"](page), "run: python scripts/make_recipe_docs.py"
    assert "| `steps` | `20_000` |" in page


def test_every_key_has_a_help_text():
    for settings in TABLES.values():
        assert all(spec.metadata["help"] for spec in fields(settings))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_of_the_repository_load_and_their_files_are_there(path):
    recipe = load_recipe(path)
    for file in (*recipe.data.exclude, *recipe.evaluation.sets.values()):
        assert Path(file).is_file()
    assert len(recipe.data.openings) == len(set(recipe.data.openings)) > 0
    assert json.loads(json.dumps(recipe.as_dict())) == recipe.as_dict()
    dry = dry_run_recipe(recipe, ROOT)
    assert dry.data.new_tokens < 10_000
    assert dry.train.steps <= 12
    assert set(dry.evaluation.sets) == set(recipe.evaluation.sets)


def test_the_evaluation_prompts_of_the_repository_are_excluded():
    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m.toml")
    excluded = load_excluded([Path(path) for path in recipe.data.exclude])
    for path in recipe.evaluation.sets.values():
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            turns = json.loads(line)["turns"]
            assert all(normalised_prompt_hash(turn) in excluded for turn in turns)
            question = turns[0].partition("\nPlease reason step by step")[0]
            assert normalised_prompt_hash(question) in excluded


def test_no_opening_is_an_instruction_of_an_evaluation_set():
    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m.toml")
    # Of the prompts that figures are of: the first ones of each set. All rows have such words somewhere.
    rows = [Path(path).read_text(encoding="utf-8").splitlines() for path in recipe.evaluation.sets.values()]
    texts = ["\n".join(lines[:64]) for lines in rows]
    long = [opening for opening in recipe.data.openings if len(opening.split()) > 4]
    assert long
    assert not [opening for opening in long if any(opening in text for text in texts)]


def changed(recipe: Recipe, table: str, name: str, value: object) -> Recipe:
    return replace(recipe, **{table: replace(getattr(recipe, table), **{name: value})})


@pytest.mark.parametrize(
    ("table", "name", "value", "corpus", "training"),
    [
        ("data", "seed", 1, True, True),
        ("data", "slots", 9, False, False),
        ("data", "shard_tokens", 9, False, False),
        ("data", "new_tokens", 9, False, True),
        ("data", "held_out", 99, False, True),
        ("data", "openings", ("A",), True, True),
        ("target", "model", "other/model", True, True),
        ("target", "dtype", Dtype.FLOAT32, True, True),
        ("drafter", "num_layers", 3, False, True),
        ("train", "learning_rate", 0.1, False, True),
        ("train", "checkpoint_every", 7, False, False),
        ("train", "compile", False, False, False),
        ("evaluation", "every", 7, False, False),
    ],
)
def test_a_fingerprint_differs_where_what_it_names_would(write, table, name, value, corpus, training):
    recipe = write(MASK)
    other = changed(recipe, table, name, value)
    assert (corpus_fingerprint(recipe) != corpus_fingerprint(other)) is corpus
    assert (training_fingerprint(recipe) != training_fingerprint(other)) is training


def test_another_target_of_the_same_shape_is_another(write, tmp_path):
    recipe = write(MASK)
    folders = [write_tiny_target(tmp_path / str(seed), seed) for seed in (0, 1)]
    prints = [corpus_fingerprint(changed(recipe, "target", "model", str(folder))) for folder in folders]
    moved = (tmp_path / "0").rename(tmp_path / "moved")
    prints.append(corpus_fingerprint(changed(recipe, "target", "model", str(moved))))
    assert prints[0] == prints[2] != prints[1]


def test_a_fingerprint_depends_on_content_not_on_where_files_lie(tmp_path):
    prints = []
    for name, prompt in (("a", "Hi"), ("b", "Hi"), ("c", "Ho")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "p.jsonl").write_text(json.dumps({"prompt": prompt}))
        (folder / "r.toml").write_text(MASK + '[data]\nprompts = "p.jsonl"\nprompt_share = 1.0\n')
        prints.append(corpus_fingerprint(load_recipe(folder / "r.toml")))
    assert prints[0] == prints[1] != prints[2]
    (tmp_path / "r.toml").write_text(MASK + '[data]\nexclude = ["a/p.jsonl"]\n')
    prints.append(corpus_fingerprint(load_recipe(tmp_path / "r.toml")))
    (tmp_path / "a" / "p.jsonl").write_text("{}")
    assert corpus_fingerprint(load_recipe(tmp_path / "r.toml")) != prints[-1]
    (tmp_path / "a" / "p.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"p\.jsonl.*which the recipe names"):
        corpus_fingerprint(load_recipe(tmp_path / "a" / "r.toml"))


def test_layers_are_spread_as_in_published_drafters():
    assert spread_layer_ids(30) == (1, 7, 14, 20, 27)
    assert spread_layer_ids(36) == (1, 9, 17, 25, 33)
    for num_layers in range(1, 12):
        ids = spread_layer_ids(num_layers)
        assert list(ids) == sorted(set(ids))
        assert 0 <= ids[0] <= ids[-1] < num_layers


@pytest.mark.parametrize("target", [tiny_llama(), tiny_qwen3()], ids=["llama", "qwen3"])
def test_what_the_recipe_leaves_open_is_the_targets(target):
    config = DFlashConfig.from_dict(drafter_config(DrafterSettings(mask_token_id=3), target.config))
    shape = target.config
    assert (config.hidden_size, config.vocab_size) == (shape.hidden_size, shape.vocab_size)
    assert (config.num_heads, config.num_kv_heads) == (shape.num_attention_heads, shape.num_key_value_heads)
    assert config.head_dim == target.model.layers[0].self_attn.head_dim
    assert config.intermediate_size == shape.intermediate_size
    assert config.max_position_embeddings == shape.max_position_embeddings
    assert config.rope.theta == shape.rope_parameters["rope_theta"]
    assert config.num_target_layers == shape.num_hidden_layers
    assert (config.num_layers, config.block_size, config.mask_token_id) == (4, 16, 3)


def test_the_recipe_for_smollm2_makes_the_layout_that_ships():
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    target = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m.toml")
    assert drafter_config(recipe.drafter, target) == shipped


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mask_token_id": 211}, "drafter.mask_token_id=211"),
        ({"target_layer_ids": (1, 4)}, "drafter.target_layer_ids=(1, 4)"),
        ({"num_heads": 5, "num_kv_heads": 2}, "[drafter] does not describe"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(settings, told):
    with pytest.raises(ConfigError) as refused:
        drafter_config(DrafterSettings(**{"mask_token_id": 3, **settings}), tiny_llama().config)
    assert told in str(refused.value)


def test_init_from_takes_the_drafters_own_config_and_refuses_another_shape(tmp_path):
    target = tiny_llama()
    folder = write_tiny_drafter(tmp_path / "old", target, block_size=8)
    settings = DrafterSettings(mask_token_id=3, block_size=8, num_layers=3, init_from=str(folder))
    assert drafter_config(settings, target.config) == json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"drafter\.block_size=16.*write block_size = 8"):
        drafter_config(replace(settings, block_size=16), target.config)
    with pytest.raises(ConfigError, match=r"write target_layer_ids = \[0, 2\]"):
        drafter_config(replace(settings, target_layer_ids=(1, 2)), target.config)
    with pytest.raises(ConfigError, match=r"drafter\.init_from"):
        drafter_config(settings, tiny_llama(vocab_size=100).config)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        drafter_config(settings, target.config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[evaluation.sets]\nheld_out = "a.jsonl"\n', "another name"),
        ('[data]\nprompts = "a\\u0000b"\nprompt_share = 1.0\n', "is no path"),
        ("[train]\nsteps = 100\nwarmup_steps = 100\n", "fewer than train.steps=100"),
    ],
)
def test_values_that_would_only_hurt_later_are_refused(tmp_path, text, message):
    path = tmp_path / "r.toml"
    path.write_text(MASK + text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)
