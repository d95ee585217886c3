"""The whole report: a page that holds all it needs, runs that may not stand side by side, hostile names."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings

from ddtree.bench import report as report_module
from ddtree.bench.document import Picture
from ddtree.bench.report import (
    ReportOptions,
    make_report,
    named_runs,
    report_files,
    write_files,
    write_report,
)
from ddtree.errors import ConfigError
from report_kit import NASTY_NAMES, any_runs, header, made_up_run, write_run

ARMS = ("embedded ar", "embedded chain", "embedded tree:16")
VOID = {"meta", "img", "br", "link", "hr"}


class Page(HTMLParser):
    """What a page is made of; fails for tags that do not close."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.images, self.open, self.text = [], [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src", "action", "srcset") if name in values]
        self.images += [values] if tag == "img" else []
        assert not any(name.startswith("on") for name in values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def small_run(**options):
    return made_up_run(**{"arms": ARMS, "sets": ("gsm8k",), "temperatures": (0.0,), "repeats": 1} | options)


@pytest.fixture
def undrawn(monkeypatch):
    """A picture that takes no time, in place of all plots."""
    from ddtree.bench import plots

    picture = Picture("plot", "a plot", "what it shows", "<svg/>", b"png")
    monkeypatch.setattr(plots, "report_pictures", lambda rows, *, with_paper: [picture] if rows else [])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    path = write_run(folder / "run.jsonl", small_run())
    paths = write_report([path], folder / "out", ReportOptions(has_trace_page=True))
    return {path.name: path for path in paths}


def test_the_page_holds_all_it_needs(written):
    page = Page(written["index.html"].read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids)) > 5
    outside = [link for link in page.links if not link.startswith(("#", "data:image/svg+xml;base64,"))]
    assert outside == ["trace.html"]
    assert {link[1:] for link in page.links if link.startswith("#")} == set(page.ids)
    assert len(page.images) == 6
    assert all(len(image["alt"]) > 20 for image in page.images)


def test_files_stand_beside_the_page(written):
    plots = {name for name in written if name.endswith(".png")}
    assert set(written) == {"index.html", "report.md", "report.json"} | plots
    markdown = written["report.md"].read_text(encoding="utf-8")
    assert all(f"]({name})" in markdown for name in plots)
    assert len(plots) == 6


def test_every_figure_is_in_the_json(written):
    (run,) = json.loads(written["report.json"].read_text(encoding="utf-8"))["runs"]
    tree = next(arm for arm in run["arms"] if arm["arm"] == "embedded tree:16")
    source = small_run()
    tokens_per_s = next(c.tokens_per_s for key, c in source.cells.items() if key.arm == "embedded tree:16")
    assert tree["tokens_per_s"]["median"] == pytest.approx(tokens_per_s, rel=1e-4)
    assert f"{tree['to_plain']['value']:.2f}" in written["report.md"].read_text(encoding="utf-8")
    assert run["recommendation"]["groups"]
    assert run["sessions"][0]["packages"]["torch"] == "2.11.0"


def test_the_report_says_what_to_set_how_it_was_run_and_what_others_published(undrawn):
    text = report_files(make_report([small_run()]))["report.md"].decode()
    for title in ("At a glance", "Recommendation", "Every arm", "How they were run", "Published figures"):
        assert f"## {title}\n" in text
    assert "smollm2-135m-dflash-b16; NVIDIA H200; 2026-11-30" in text
    assert "`ddtree replay` is the proof" in text
    assert "`ddtree bench --engine embedded --output run.jsonl`" in text


def test_an_arm_that_failed_is_told_first(undrawn):
    run = small_run()
    run.engines["sglang chain"] = {"error": "sglang chain, start: CUDA out of memory"}
    text = report_files(make_report([run]))["report.md"].decode()
    glance = text.split("## At a glance")[1].split("## ")[0]
    assert "sglang chain was not measured, or not to its end: start: CUDA out of memory" in glance


def test_runs_stand_side_by_side_and_are_not_compared(undrawn):
    one, other = small_run(), small_run(changes={"device": "cpu"})
    other.source = "runs/cpu.jsonl"
    made = make_report([one, other])
    text = report_files(made)["report.md"].decode()
    assert "| h200 embedded tree:16 |" in text
    assert "| cpu embedded tree:16 |" in text
    assert "| measured on | NVIDIA H200 | cpu |" in text
    assert "Ratios are made within a run" in text
    assert [run["name"] for run in made.figures["runs"]] == ["h200", "cpu"]


def test_the_plain_arm_is_of_the_runs_that_have_it(undrawn):
    one, other = small_run(), small_run()
    url = "http://host:1/v1"
    other.cells = {key: replace(cell, key=key) for key, cell in (
        (replace(key, arm=url) if key.arm == "embedded chain" else key, cell)
        for key, cell in one.cells.items()
    )}  # fmt: skip
    assert make_report([one, other], ReportOptions(plain=url)).figures["runs"]
    with pytest.raises(ConfigError, match="plain='x'"):
        make_report([one, other], ReportOptions(plain="x"))


@pytest.mark.parametrize(("changes", "told"), [
    ({"models": {"target": {"name": "other"}}}, "target: "),
    ({"settings": {"max_tokens": 32}}, "max_tokens: 256, now 32"),
    ({"sets": {"gsm8k": {"sha256": "0"}}}, "prompts of gsm8k"),
])  # fmt: skip
def test_unlike_runs_are_refused_by_what_differs(undrawn, changes, told):
    one, other = small_run(), small_run()
    other.header = replace(header(("gsm8k",)), **changes)
    with pytest.raises(ConfigError, match=told):
        make_report([one, small_run(), other])


def test_a_run_without_cells_is_refused(undrawn):
    run = small_run()
    run.cells.clear()
    run.engines["embedded ar"] = {"error": "no memory"}
    with pytest.raises(ConfigError, match=r"no measured cell yet; embedded ar failed: no memory"):
        make_report([run])


def test_runs_of_one_name_are_told_apart():
    runs = [small_run() for _ in range(3)]
    assert list(named_runs(runs)) == ["h200", "h200-2", "h200-3"]
    assert list(named_runs(runs[:1])) == [""]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "a\0b"):
        with pytest.raises(ConfigError, match="give another --output"):
            write_files(folder, {"a": b""})


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(any_runs())
def test_any_run_has_a_report_that_cannot_be_broken_into(undrawn, run):
    files = report_files(make_report([run]))
    page = Page(files["index.html"].decode())
    assert {"script", "b", "a|b"}.isdisjoint(page.tags)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("#s", "data:image/")) for link in page.links)
    json.loads(files["report.json"], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    shown = "".join(page.text)
    for key in run.cells:
        name = "".join(c if c.isprintable() else repr(c)[1:-1] for c in key.prompt_set)
        assert name[:300] in shown


def test_hostile_files_and_models_are_only_shown(undrawn):
    run = small_run(changes={"models": {"target": NASTY_NAMES[0], "drafter": None}, "device": "<b>gpu</b>"})
    run.source = "<img src=x>.jsonl"
    run.sessions = [{"command": "`<script>`", "python": "<i>"}]
    run.engines["<b>"] = {"<u>": "</td><script>"}
    page = Page(report_files(make_report([run]))["index.html"].decode())
    assert {"script", "i", "u", "b"}.isdisjoint(page.tags)
    assert "<img src=x>.jsonl" in "".join(page.text)


def test_numbers_that_json_lacks_are_null(undrawn):
    run = small_run(changes={"settings": {"max_tokens": 256, "odd": float("nan"), "max": float("inf")}})
    figures = json.loads(report_files(make_report([run]))["report.json"])
    assert figures["runs"][0]["settings"] == {"max_tokens": 256, "odd": None, "max": None}


def test_in_a_browser_without_scripts(written):
    """Nothing overflows, all plots are there, and nothing is asked of a network."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from server.browser_kit import BROWSER_ARGS, find_browser

    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: install chromium, or name one in $CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_ARGS)
        for width in (1280, 400):
            context = browser.new_context(viewport={"width": width, "height": 800}, java_script_enabled=False)
            page, asked, told = context.new_page(), [], []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, told=told: told.append(message.text))
            page.goto(written["index.html"].as_uri())
            boxes = [image.bounding_box() for image in page.locator("img").all()]
            assert len(boxes) == 6
            assert all(box["width"] > 200 and box["x"] + box["width"] <= width for box in boxes)
            assert page.locator("body").bounding_box()["width"] <= width
            assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
            assert told == []
        browser.close()


def test_the_style_is_part_of_the_package():
    assert report_module.files("ddtree.bench").joinpath("static/report.css").is_file()
