"""The drafter against the target, and what the plugin would refuse of the two."""

import json

import pytest

from ddtree.config import PluginConfig
from ddtree.doctor import checkpoints
from ddtree.doctor.checkpoints import open_target, tensor_shapes, weight_bytes_of
from ddtree.doctor.model_shape import ModelShape
from ddtree.doctor.pair import open_pair, pair_section
from ddtree.doctor.plan import Plan
from ddtree.doctor.report import Level
from ddtree.errors import CheckpointError, ModelNotFoundError
from ddtree.models import DRAFTERS, KNOWN_MODELS
from doctor_kit import (
    GPT_OSS_120B,
    KIMI_K25,
    QWEN3_8B,
    QWEN3_8B_DFLASH,
    QWEN36_27B,
    by_id,
    ids,
    write,
    write_model,
)

FC = {"fc.weight": {"shape": [4096, 5 * 4096], "dtype": "BF16", "data_offsets": [0, 0]}}
SHIPPED = json.loads((DRAFTERS / "smollm2-135m-dflash-b16" / "config.json").read_text(encoding="utf-8"))
SMOL = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000,
    "dtype": "bfloat16",
}  # fmt: skip


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}


def nested(config, **changes):
    """A drafter's config with other DFlash fields."""
    return config | {"dflash_config": config["dflash_config"] | changes}


@pytest.fixture
def look(tmp_path):
    """Examine a target's and a drafter's config; returns the section."""

    def call(target=QWEN3_8B, drafter=QWEN3_8B_DFLASH, environ=None, backend="triton", tensors=FC, **plan):
        folders = [
            write_model(tmp_path / "target", target, weights=16 << 30),
            write_model(tmp_path / "drafter", drafter, tensors=tensors),
        ]
        asked = Plan(model=str(folders[0]), drafter=str(folders[1]), **plan)
        pair, found = open_pair(asked, None)
        section = pair_section(asked, pair, found, PluginConfig(), backend, environ or {})
        json.dumps(section.data)
        return section

    return call


def test_a_pair_that_fits(look):
    section = look()
    assert {f.level for f in section.findings} == {Level.OK}
    assert ids(section) == ["pair.target", "pair.drafter", "pair.fit"]
    assert (
        "36 layers, hidden 4096, vocabulary 151936, 8 KV heads of 128, bfloat16" in section.findings[0].what
    )
    assert section.data["target"]["weight_bytes"] == 16 << 30
    assert section.data["drafter"]["block_size"] == 16


@pytest.mark.parametrize(
    ("drafter", "wanted"),
    [
        (QWEN3_8B_DFLASH | {"hidden_size": 2560}, "pair.hidden-size"),
        (QWEN3_8B_DFLASH | {"num_target_layers": 28}, "pair.layers"),
        (nested(QWEN3_8B_DFLASH, target_layer_ids=[1, 36]), "pair.layers"),
        (QWEN3_8B_DFLASH | {"vocab_size": 151669}, "pair.vocabulary"),
        (nested(QWEN3_8B_DFLASH, mask_token_id=151936), "pair.mask-token"),
    ],
)
def test_a_drafter_of_another_target(look, drafter, wanted):
    assert wanted in ids(look(drafter=drafter), Level.ERROR)


@pytest.mark.parametrize(
    ("target", "drafter", "plan", "wanted"),
    [
        (QWEN3_8B, QWEN3_8B_DFLASH | {"rope_theta": 10000}, {}, "pair.rope"),
        (QWEN3_8B | YARN, QWEN3_8B_DFLASH, {}, "pair.rope"),
        (QWEN3_8B, QWEN3_8B_DFLASH | {"max_position_embeddings": 8192}, {}, "pair.context"),
        (QWEN3_8B, QWEN3_8B_DFLASH, {"context_tokens": 65536}, "pair.context"),
    ],
)
def test_what_costs_only_speed_is_a_warning(look, target, drafter, plan, wanted):
    section = look(target, drafter, **plan)
    assert ids(section, Level.WARN) == [wanted]
    assert ids(section, Level.ERROR) == []


def test_a_context_within_the_drafters_positions_is_no_matter(look):
    drafter = QWEN3_8B_DFLASH | {"max_position_embeddings": 8192}
    assert by_id(look(drafter=drafter, context_tokens=8192).findings, "pair.context") == []


def test_heads_that_cannot_be_split(look):
    assert ids(look(tp_size=8), Level.ERROR) == []
    assert ids(look(tp_size=16), Level.ERROR) == []
    assert ids(look(tp_size=3), Level.ERROR) == ["pair.tp", "pair.tp"]


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, None),
        ({"other": FC["fc.weight"]}, "fc.weight is missing"),
        ({"model.fc.weight": FC["fc.weight"]}, None),
        ({"fc.weight": FC["fc.weight"] | {"shape": [4096, 4096]}}, "has shape [4096, 4096]"),
        ([1], "no whole safetensors file"),
    ],
)
def test_the_drafters_files_hold_what_its_config_says(look, tensors, problem):
    found = by_id(look(tensors=tensors).findings, "pair.weights")
    assert [problem in f.what for f in found] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (KIMI_K25, "MLA attention"),
        (GPT_OSS_120B, "sliding-window"),
        (QWEN36_27B, "linear-attention"),
    ],
)
def test_targets_that_the_plugin_refuses(look, target, reason):
    shape = ModelShape.from_config(target)
    drafter = QWEN3_8B_DFLASH | {
        "hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size,
        "num_target_layers": shape.num_layers,
    }  # fmt: skip
    refused = by_id(look(target, drafter, backend="triton").findings, "pair.refused")
    assert all(f.level is Level.ERROR for f in refused)
    assert any(reason in f.what for f in refused)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": "trtllm_mha"}, "attention backend trtllm_mha"),
        ({"environ": {"SGLANG_SIMULATE_ACC_LEN": "3"}}, "SGLANG_SIMULATE_ACC_LEN=3"),
        ({"environ": {"SGLANG_USE_HND_KVCACHE": "true"}}, "HND layout"),
    ],
)
def test_settings_that_the_plugin_refuses(look, options, reason):
    (refused,) = by_id(look(**options).findings, "pair.refused")
    assert reason in refused.what


def test_environment_variables_that_say_no(look):
    environ = {"SGLANG_SIMULATE_ACC_LEN": "-1", "SGLANG_USE_HND_KVCACHE": "0"}
    assert by_id(look(environ=environ).findings, "pair.refused") == []


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        (nested(QWEN3_8B_DFLASH, selector_rank=64), "candidate selector (DFlash2)"),
        (nested(QWEN3_8B_DFLASH, projector_type="domino"), "Domino"),
        (QWEN3_8B_DFLASH | {"architectures": ["LlamaForCausalLMEagle3"]}, "not a DFlash checkpoint"),
    ],
)
def test_drafters_of_other_kinds(look, drafter, reason):
    section = look(drafter=drafter)
    assert ids(section, Level.WARN) == ["pair.drafter-kind"]
    assert any(reason in f.what for f in by_id(section.findings, "pair.refused"))


JUNK = [0, -1, 1.5, True, "x", [1], [[]], [None], {"a": 1}, 10**3000, float("inf")]
FIELDS = ["block_size", "architectures", "dflash_config", "hidden_size", "rope_scaling", "layer_types",
          "dtype", "num_target_layers", "max_position_embeddings", "vocab_size",
          "quantization_config"]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_drafter_config_of_junk(look, field):
    for value in JUNK:
        section = look(drafter=QWEN3_8B_DFLASH | {field: value})
        assert {"pair.drafter", "pair.drafter-kind"} & set(ids(section)), value


@pytest.mark.parametrize(
    "field", [*QWEN3_8B, "text_config", "layer_types", "kv_lora_rank", "rope_parameters"]
)
def test_a_target_config_of_junk_is_never_more_than_a_finding(look, field):
    for value in JUNK:
        assert by_id(look(QWEN3_8B | {field: value}).findings, "pair.target"), value


def test_a_drafter_config_of_junk_leaves_what_is_refused_of_the_target(look):
    section = look(KIMI_K25, QWEN3_8B_DFLASH | {"dflash_config": [1]})
    assert ids(section, Level.ERROR) == ["pair.drafter", "pair.refused"]
    assert "MLA attention" in section.findings[-1].what


def test_a_drafter_in_the_targets_place(look):
    (found,) = by_id(look(target=QWEN3_8B_DFLASH).findings, "pair.target-kind")
    assert found.level is Level.ERROR


def test_a_target_in_the_drafters_place(look):
    section = look(drafter=QWEN3_8B)
    assert "Qwen3ForCausalLM" in by_id(section.findings, "pair.drafter-kind")[0].what
    assert any("not a DFlash checkpoint" in f.what for f in by_id(section.findings, "pair.refused"))


@pytest.mark.parametrize("change", [{"hidden_size": None}, {"vocab_size": "x"}, {"num_hidden_layers": True}])
def test_a_target_config_of_junk(look, change):
    (found,) = by_id(look(QWEN3_8B | change).findings, "pair.target")
    assert found.level is Level.ERROR
    assert next(iter(change)) in found.what


@pytest.mark.parametrize("text", ["{", "[1]", "\0", "[" * 100_000])
def test_a_config_that_is_no_json_object(tmp_path, text):
    write(tmp_path, {"config.json": text})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_target(str(tmp_path))


def test_a_config_that_is_no_config(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(CheckpointError, match="17179869184 bytes"):
        open_target(str(tmp_path))


def test_a_target_without_a_tokenizer(tmp_path):
    write_model(tmp_path / "target", QWEN3_8B, tensors=FC, tokenizer=False)
    plan = Plan(model=str(tmp_path / "target"), drafter=str(write_model(tmp_path / "d", QWEN3_8B_DFLASH)))
    pair, found = open_pair(plan, None)
    section = pair_section(plan, pair, found, PluginConfig(), "triton", {})
    assert ids(section, Level.ERROR) == ["pair.tokenizer"]


def test_which_copy_of_the_known_target_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    package = KNOWN_MODELS["smollm2-135m"].package
    prepared = tmp_path / "models" / f"{package.name}-{package.revision}"
    plan = Plan(model="smollm2-135m")
    _, found = open_pair(plan, None)
    assert "was not prepared here yet" in by_id(found, "pair.target")[0].what

    write_model(prepared, SMOL, tensors={})
    sizes = {path.name: {"bytes": path.stat().st_size} for path in prepared.iterdir()}
    write(prepared, {"manifest.json": json.dumps({"files": sizes})})
    pair, found = open_pair(plan, None)
    (copy,) = by_id(pair_section(plan, pair, found, PluginConfig(), "triton", {}).findings, "pair.copy")
    assert copy.level is Level.OK
    assert "not bit for bit HuggingFaceTB/SmolLM2-135M-Instruct" in copy.what

    hub = Plan(model="HuggingFaceTB/SmolLM2-135M-Instruct")
    pair, found = open_pair(hub, lambda name: write_model(tmp_path / "hub", SMOL, weights=1))
    (copy,) = by_id(pair_section(hub, pair, found, PluginConfig(), "triton", {}).findings, "pair.copy")
    assert copy.level is Level.WARN
    assert ids(pair_section(hub, pair, found, PluginConfig(), "triton", {}), Level.ERROR) == []


def test_a_hub_that_cannot_be_reached_is_a_finding():
    def fetch(name):
        raise ModelNotFoundError(f"{name!r} is no folder here, and the hub cannot be reached")

    pair, found = open_pair(Plan(model="Qwen/Qwen3-8B", drafter="z-lab/Qwen3-8B-DFlash-b16"), fetch)
    assert [f.id for f in found] == ["pair.target", "pair.drafter"]
    assert all(f.level is Level.ERROR for f in found)
    assert pair.shape is None


def test_names_that_lead_nowhere(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name in ("/no/such/folder", str(tmp_path / "file"), str(tmp_path), "~no-such-user-here/x"):
        found = open_pair(Plan(model=name, drafter=name), lambda name: pytest.fail("the hub is not asked"))[1]
        assert [f.id for f in found] == ["pair.target", "pair.drafter"], name


def test_the_hub_is_asked_for_small_files_only(monkeypatch, tmp_path):
    asked = []

    def snapshot(name, allow_patterns, local_files_only):
        asked.append((name, local_files_only))
        assert not any("safetensors" in pattern and "index" not in pattern for pattern in allow_patterns)
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        return str(write_model(tmp_path, QWEN3_8B))

    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert checkpoints.fetch_small_files("Qwen/Qwen3-8B") == tmp_path
    assert asked == [("Qwen/Qwen3-8B", True), ("Qwen/Qwen3-8B", False)]
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFoundError, match=r"it has no config\.json"):
        checkpoints.fetch_small_files("Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        ('{"metadata": {"total_size": 7}}', 7), ("{}", 5), ("junk", 5), ('{"metadata": []}', 5),
        ('{"metadata": {"total_size": true}}', 5), (f'{{"metadata": {{"total_size": {10**300}}}}}', 5),
    ],
)  # fmt: skip
def test_the_size_of_weights(tmp_path, index, wanted):
    write(tmp_path, {"model.safetensors.index.json": index, "model-1.safetensors": b"12345"})
    assert weight_bytes_of(tmp_path) == wanted


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x00" * 30])
def test_safetensors_of_junk(tmp_path, content):
    write(tmp_path, {"model.safetensors": content})
    with pytest.raises(CheckpointError, match="no whole safetensors file"):
        tensor_shapes(tmp_path)


@pytest.mark.parametrize(
    ("config", "attention", "is_hybrid", "has_window", "kv_layers"),
    [
        (QWEN3_8B, "MHA", False, False, 36),
        (GPT_OSS_120B, "MHA", False, True, 36),
        (KIMI_K25, "MLA", False, False, 61),
        (QWEN36_27B, "MHA", True, False, 16),
        (SHIPPED, "MHA", False, False, 4),
    ],
)
def test_shapes_of_targets(config, attention, is_hybrid, has_window, kv_layers):
    shape = ModelShape.from_config(config)
    assert (shape.attention, shape.is_hybrid, shape.has_window) == (attention, is_hybrid, has_window)
    assert shape.num_kv_layers == kv_layers


@pytest.mark.parametrize(
    "config",
    [
        {"llm_config": QWEN3_8B}, {"language_config": QWEN3_8B}, {"thinker_config": QWEN3_8B},
        {"thinker_config": {"text_config": QWEN3_8B}}, {"text_config": None, **QWEN3_8B},
        {"llm_config": QWEN3_8B, "text_config": {"hidden_size": 1}},
        {"text_config": QWEN3_8B, "hidden_size": 1},
    ],
)  # fmt: skip
def test_the_text_part_of_a_model_with_more_than_text(config):
    shape = ModelShape.from_config(config)
    assert (shape.hidden_size, shape.num_layers, shape.dtype) == (4096, 36, "bfloat16")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"rope_theta": 5}, (5.0, "default")),
        ({"rope_theta": 5, **YARN}, (5.0, "yarn")),
        ({"rope_parameters": {"rope_theta": 7, "rope_type": "llama3"}}, (7.0, "llama3")),
        (
            {"rope_parameters": {
                "full_attention": {"rope_theta": 9, "rope_type": "linear"},
                "sliding_attention": {"rope_theta": 1, "rope_type": "default"},
            }},
            (9.0, "linear"),
        ),
        ({"rope_theta": "x"}, (10000.0, "default")),
    ],
)  # fmt: skip
def test_rope_rules(fields, wanted):
    plain = {name: value for name, value in QWEN3_8B.items() if name != "rope_theta"}
    assert ModelShape.from_config(plain | fields).rope == wanted


def test_a_hybrid_without_layer_types():
    text = {k: v for k, v in QWEN36_27B["text_config"].items() if k != "layer_types"}
    shape = ModelShape.from_config({"text_config": text | {"full_attention_interval": 4}})
    assert (shape.num_kv_layers, shape.states.num_layers) == (16, 48)
    mamba = ModelShape.from_config(QWEN3_8B | {"mamba_d_state": 128})
    assert (mamba.is_hybrid, mamba.states) == (True, None)
