"""The roadmap says what code, settings and results say, and its links lead somewhere."""

import re
import runpy
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "sglang-ddtree-roadmap.md"


@pytest.fixture
def script(monkeypatch):
    """A script of scripts/ as a name space."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))


@pytest.fixture
def text():
    return PAGE.read_text(encoding="utf-8")


def test_page_and_pictures_are_current(script, text):
    module = script("make_roadmap")
    assert text == module["render"](text), "run python scripts/make_roadmap.py"
    for path, picture in module["pictures"]().items():
        drawn, numbers = parts_of(path.read_text(encoding="utf-8"))
        made, made_numbers = parts_of(picture)
        assert drawn == made, "run python scripts/make_roadmap.py"
        assert numbers == pytest.approx(made_numbers, abs=0.01), "run python scripts/make_roadmap.py"


def parts_of(picture):
    """A picture without its numbers, and those: last digits, and ids made of them, differ by machine."""
    text = re.sub(r"#?\b[pm][0-9a-f]{10}\b", "ID", picture)
    number = r"-?\d+\.\d+(?:e-?\d+)?"
    return re.sub(number, "N", text), [float(found) for found in re.findall(number, text)]


def test_a_part_without_its_place_is_told(script):
    with pytest.raises(SystemExit, match="needs the lines"):
        script("make_roadmap")["render"]("# nothing\n")


def test_a_knob_without_effects_is_told(script):
    module = script("roadmap_knobs")

    @dataclass
    class New:
        knob: int = field(default=1, metadata={"help": "new"})

    module["EFFECTS"][New] = {}
    with pytest.raises(SystemExit, match=r"New\.knob has no effects"):
        module["knobs"](New)


def test_links_lead_somewhere(text):
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = ROOT / name if name else PAGE
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def test_every_environment_variable_of_ours_is_there(text):
    used = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"\bDDTREE_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    assert {"DDTREE_CONFIG", "DDTREE_CACHE"} <= used
    assert used <= set(re.findall(r"`(DDTREE_[A-Z_]+)", text))


def test_curves_keep_to_what_was_seen(script):
    module = script("roadmap_lengths")
    tree = script("roadmap_points")["tree"]
    curve = module["SWEEP"]
    assert curve.at(tree(32)) == curve.trees[32]
    assert curve.at(tree(10_000 // 10)) <= max(curve.trees.values())
    assert curve.at(tree(512)) < curve.at(tree(900)) < curve.trees[1024]
    assert curve.chain < curve.at(tree(15)) < curve.trees[16]
    ours = [c for c in module["our_curves"]() if len(c.trees) > 1]
    for found in (*ours, *module["prediction_curves"]()):
        lengths = [found.at(tree(budget)) for budget in (1, 8, 15, 31, 63, 127, 1024)]
        assert lengths == sorted(lengths), found
        assert lengths[0] >= found.chain
        assert found.at(tree(1024)) == max(found.trees.values())


def test_every_published_row_is_a_time(script):
    module = script("roadmap_points")
    rows = (*module["PUBLISHED_TIMES"], *module["PUBLISHED_CHECKS"])
    assert len({(r.who, r.target, r.gpu.name, str(r.plan), r.requests) for r in rows}) == len(rows)
    for row in rows:
        assert row.round_s == pytest.approx(row.requests * row.accept_length / row.tokens_per_s)
        assert 1e-3 < row.round_s < 1


def test_steps_of_a_cell(script):
    steps_of = script("roadmap_points")["steps_of"]
    # Two at once, three requests of 4, 6 and 2 rounds: six steps of two requests each.
    seconds, at_once, steps, prompts = steps_of({"wall_s": 3.0, "rounds": [4, 6, 2], "tokens": [9, 9, 9]}, 2)
    assert (seconds, at_once, steps, prompts) == (0.5, 2.0, 6, 3)
    # Plain decoding has no rounds: a token is a step. The longest of four side by side decides.
    assert steps_of({"wall_s": 1.0, "rounds": [0] * 4, "tokens": [10, 5, 5, 5]}, 4)[1:3] == (2.5, 10)


def test_published_speed_ups_are_over_the_same_plain_step(script):
    module = script("roadmap_checks")
    found = {(c.row.who, c.row.target, str(c.row.plan), c.row.requests): c for c in module["speed_ups"]()}
    check = found["SGLang PR 23000", "Qwen3-8B", "chain:15", 32]
    assert check.published == pytest.approx(15327 / 4901)
    calibration = module["large_fit"]().calibration
    plain = next(r for r in module["PUBLISHED_TIMES"] if (r.tokens_per_s, r.requests) == (4901, 32))
    seconds = [row.point().predict(calibration) for row in (plain, check.row)]
    assert check.predicted == pytest.approx(6.48 * seconds[0] / seconds[1])
    assert ("SubSir's SGLang fork", "Qwen3.6-27B", "chain:15", 8) not in found  # no plain step published
    assert 0.05 < module["chain_error"]() < 1


def test_cells_tell_losses_and_what_has_no_room(script):
    module = script("roadmap_performance")
    setting, gpus = module["Setting"], module["GPUS"]
    curve = next(c for c in module["prediction_curves"]() if c.target == "Qwen3-8B")
    calibration = module["large_fit"]().calibration
    cell = module["predicted_cell"]
    assert re.fullmatch(
        r"\d\.\d( / (\*\*)?\d\.\d(\*\*)?){4}", cell(setting(curve, gpus["H200"], 1), calibration)
    )
    small = replace(gpus["H200"], memory_bytes=10e9)
    assert cell(setting(curve, small, 1), calibration) == "no room"
    slow = replace(calibration, round_host_s=10.0)
    assert cell(setting(curve, gpus["H200"], 1), slow) == " / ".join(["**0.0**"] * 5)


def test_requests_at_which_a_plan_is_slower(script):
    module = script("roadmap_performance")

    @dataclass
    class Setting:
        requests: int
        times: float
        has_room: bool = True

        def fits(self, plan):
            return self.has_room

        def speed_up(self, plan, calibration):
            return self.times if plan == "tree" else 1.0

    def slower(*times):
        settings = [Setting(2**i, t, t > 0) for i, t in enumerate(times)]
        return module["where_slower"](settings, "tree", "plain", None)

    assert slower(2, 2, 2) == "not up to 4"
    assert slower(2, 0.9, 0.8) == "from 2"
    assert slower(0.9, 0.8, 2, 0.7, 2, 0.9, 0) == "1 to 2, 8, from 32"
    assert slower(0, 0) == "no room"


def test_a_length_in_shorter_blocks(script):
    in_block = script("roadmap_lengths")["in_block"]
    assert in_block(1 + 0.5 + 0.25 + 0.125, 4, 2) == pytest.approx(1.5)
    assert in_block(4.28, 16, 16) == pytest.approx(4.28)
    assert in_block(6.58, 16, 8) < 8


def test_the_first_table_says_what_it_has_lengths_for(script):
    module = script("roadmap_start")
    names = [family.name for family in module["FAMILIES"]]
    assert all(any(name.startswith(kind) for name in names) for kind in ("Qwen", "GLM", "Kimi"))
    pairs, gpus = module["PAIRS"], module["GPUS_NEEDED"]
    for family in module["FAMILIES"]:
        if not family.target:
            assert family.note, family.name
            continue
        pair = pairs[family.target]
        setting = module["Setting"](module["curve_of"](family.target), module["RTX_PRO_6000"], 1)
        assert setting.fits(pair.narrow_tree), f"{family.name} has no room on {family.gpus} GPUs"
        assert family.gpus == str(gpus.get(family.target, 1))
    assert module["curve_of"]("Qwen3-8B").prompts == "MT-Bench"
    # No wider than the chain and more accept tokens: never slower.
    times = module["times_dflash"]("Qwen3-8B", pairs["Qwen3-8B"].narrow_tree)
    assert re.fullmatch(r"1\.\d\d( / 1\.\d\d){2}", times)
    assert "**0." in module["times_dflash"]("Qwen3-8B", module["tree"](31))


def test_targets_with_an_assumed_drafter_are_predicted_on_one_machine(script):
    module = script("roadmap_performance")
    assert [gpu.name for gpu in module["gpus_of"]("Qwen3-32B")] == ["RTX PRO 6000"]
    assert len(module["gpus_of"]("Qwen3-8B")) == 3
    assumed = {c.target for c in module["prediction_curves"]() if c.kind == "assumed"}
    assert module["ASSUMED_DRAFTERS"] <= assumed
