"""What deploy/ and docs/deploy.md say is so: systemd takes the units, names exist, sums are right."""

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main
import yaml
from prometheus_client import CollectorRegistry

from ddtree.cli.app import app
from ddtree.doctor import memory
from ddtree.server.metrics import ServerMetrics
from ddtree.sglang_plugin.metrics import DeviceCounters, RoundMetrics
from ddtree.sglang_plugin.server_refusals import VERIFY_BACKENDS
from ddtree.sglang_plugin.settings import load_config

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
GUIDE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
UNITS = ("ddtree-sglang.service", "ddtree-serve.service")
ENVIRONMENTS = {"ddtree-sglang.service": "sglang.env.example", "ddtree-serve.service": "serve.env.example"}
METRIC = re.compile(r"\b(?:sglang:|ddtree_)[a-z0-9_]+")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")

# SGLang is not installed where these tests run, so its names are listed; all of them are in 0.5.17 to 0.5.23,
# which test_listed_names_are_in_the_installed_sglang asks of one where it is there.
SGLANG_FLAGS = """
    --api-key --attention-backend --config --context-length --disable-cuda-graph --disable-custom-all-reduce
    --dp-size --enable-dp-attention --enable-metrics --host --log-level --max-running-requests
    --mem-fraction-static --model-path --port --pp-size --speculative-algorithm --speculative-draft-model-path
    --speculative-num-draft-tokens --tp-size
"""
SGLANG_METRICS = """
    cuda_graph_passes_total e2e_request_latency_seconds generation_tokens_total http_responses_total
    inter_token_latency_seconds num_aborted_requests_total num_queue_reqs num_retracted_requests_total
    num_running_reqs prompt_tokens_total spec_accept_length spec_accept_rate time_to_first_token_seconds
    token_usage
"""
# Of pip, hf, systemctl, journalctl, sha256sum and torchrun.
OTHER_FLAGS = """
    --all --only-binary --dest --no-index --find-links --local-dir --now --no-pager --full --quiet
    --nproc-per-node
"""
CUDA_NEEDS_THEM_ABSENT = (
    "PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "MemoryDenyWriteExecute", "ProcSubset",
)  # fmt: skip
GIB, MIB, KIB = 2**30, 2**20, 2**10


def settings_of(unit):
    """A unit's settings: name -> values, comments left out and continued lines joined."""
    text = (DEPLOY / unit).read_text(encoding="utf-8").replace("\\\n", " ")
    pairs = [line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return {name: [value for other, value in pairs if other == name] for name, _ in pairs}


def environment_of(name):
    """The variables of an example environment file, unquoted as systemd does."""
    lines = (DEPLOY / name).read_text(encoding="utf-8").splitlines()
    return dict(shlex.split(line)[0].split("=", 1) for line in lines if line and not line.startswith("#"))


def command_flags(name):
    command = typer.main.get_command(app).commands[name]
    return {flag for parameter in command.params for flag in [*parameter.opts, *parameter.secondary_opts]}


# --- units ---


@pytest.mark.parametrize("name", [*UNITS, "ddtree-sglang@canary.service"])
def test_systemd_takes_the_units(name, tmp_path):
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("systemd-analyze is not installed")
    source = re.sub(r"@\w*", "", name)
    # The programs are not on this machine; systemd wants them to be there.
    text = (DEPLOY / source).read_text(encoding="utf-8").replace("/opt/ddtree/bin/", f"{tmp_path}/bin/")
    (tmp_path / "bin").mkdir()
    for program in ("python", "ddtree"):
        (tmp_path / "bin" / program).symlink_to("/bin/true")
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [analyze, "verify", f"./{name}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if "ddtree" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_units_confine_the_service_and_leave_it_the_gpu(unit):
    settings = settings_of(unit)
    assert not set(CUDA_NEEDS_THEM_ABSENT) & set(settings)
    wanted = {
        "ProtectSystem": "strict",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "User": "ddtree",
        "LimitMEMLOCK": "infinity",
        "KillMode": "mixed",
    }
    assert {name: settings[name] for name in wanted} == {name: [value] for name, value in wanted.items()}
    assert {"StartLimitBurst", "StartLimitIntervalSec", "Restart", "TimeoutStopSec", "LimitNOFILE"} <= set(
        settings
    )
    caches = [value for value in settings["Environment"] if value.split("=")[0].endswith(("HOME", "_DIR"))]
    assert len(caches) >= 4
    assert all("=%C/" in value for value in caches), "caches belong below CacheDirectory"
    assert (
        (DEPLOY / "ddtree-sysusers.conf").read_text(encoding="utf-8").splitlines()[-1].startswith("u ddtree ")
    )


@pytest.mark.parametrize("unit", UNITS)
def test_an_environment_file_has_what_its_unit_reads_and_no_secret(unit):
    environment = environment_of(ENVIRONMENTS[unit])
    text = (DEPLOY / ENVIRONMENTS[unit]).read_text(encoding="utf-8")
    command = settings_of(unit)["ExecStart"][0]
    assert set(re.findall(r"\$\{?(\w+)", command)) <= set(environment)
    assert "0600" in text
    assert not re.search(r"(?m)^#?\w*(KEY|TOKEN|SECRET|PASSWORD)\w*=", text)
    taken = command_flags("serve") if unit == "ddtree-serve.service" else set(SGLANG_FLAGS.split())
    assert set(FLAG.findall(command + text)) <= taken


def test_the_example_settings_are_the_plugins():
    environment = environment_of("sglang.env.example")
    assert load_config(environment, ROOT).node_budget == 31
    assert environment["ALGORITHM"] == "DDTREE"
    assert environment["ATTENTION_BACKEND"] in VERIFY_BACKENDS


# --- Prometheus and Grafana ---


def exported(registry):
    """Names of all samples that metrics of a registry can have."""
    names = set()
    for family in registry.collect():
        ends = {
            "counter": ["_total"],
            "histogram": ["_bucket", "_sum", "_count"],
        }.get(family.type, [""])
        names |= {family.name + end for end in ends}
    return names


@pytest.fixture(scope="module")
def known_metrics():
    import torch

    plugin, server = CollectorRegistry(), ServerMetrics().registry
    counters = DeviceCounters(torch.device("cpu"))
    RoundMetrics(
        {"model_name": ""},
        num_nodes=1,
        verify_width=2,
        draft_depth=1,
        device_counters=counters,
        registry=plugin,
    )
    sglang = {f"sglang:{name}{end}" for name in SGLANG_METRICS.split() for end in ("", "_bucket")}
    return exported(plugin) | exported(server) | sglang


def queries():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_every_metric_of_the_dashboard_and_the_guide_exists(known_metrics):
    asked = set(METRIC.findall(" ".join(queries())))
    assert {"ddtree_rounds_total", "sglang:token_usage", "ddtree_server_rounds_total"} <= asked
    assert asked - known_metrics == set()
    assert (
        set(re.findall(r"\b(?:sglang:|ddtree_)[a-z0-9_]*[a-z0-9]\b", guide_queries())) - known_metrics
        == set()
    )


def guide_queries():
    """The guide's text without words that only begin like a metric."""
    return re.sub(r"ddtree_\||`ddtree_`|sglang_|`sglang:`", "", GUIDE)


def test_every_metric_of_the_plugin_and_the_server_is_on_the_dashboard(known_metrics):
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in METRIC.findall(" ".join(queries()))}
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known_metrics if name.startswith("ddtree_")}
    assert ours - asked == set()


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    charts = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["description"] and panel["datasource"]["uid"] == "${datasource}" for panel in charts)
    assert all("$instance" in expr for expr in queries())
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        "DDTREE in SGLang",
        "SGLang",
        "ddtree serve",
    ]


def test_the_scrape_example_labels_what_the_dashboard_compares():
    page = yaml.safe_load((DEPLOY / "prometheus-scrape.example.yml").read_text(encoding="utf-8"))
    targets = [entry for job in page["scrape_configs"] for entry in job["static_configs"]]
    assert {entry["labels"]["arm"] for entry in targets} >= {"canary", "baseline"}
    ports = {environment_of(name)["PORT"] for name in ENVIRONMENTS.values()}
    assert ports <= {target.rsplit(":", 1)[1] for entry in targets for target in entry["targets"]}


# --- the guide ---


def benchmark_flags():
    """Flags of the programs in benchmarks/ that the guide names."""
    names = {*re.findall(r"benchmarks/(\w+\.py)", GUIDE), "sglang_common.py"}
    text = "".join((ROOT / "benchmarks" / name).read_text(encoding="utf-8") for name in names)
    return set(re.findall(r'add(?:_argument)?\(\s*"(--[a-z-]+)"', text))


def test_every_flag_of_the_guide_exists():
    sglang, others = set(SGLANG_FLAGS.split()), set(OTHER_FLAGS.split())
    ours = command_flags("doctor") | command_flags("serve") | benchmark_flags()
    # "--speculative-" stands for both flags that begin so.
    assert set(FLAG.findall(GUIDE)) - {"--speculative"} - sglang - others - ours == set()
    for command, arguments in re.findall(r"ddtree (doctor|serve|generate) ([^`\n#;]*)", GUIDE):
        assert set(FLAG.findall(arguments)) <= command_flags(command)


def argument_names(package):
    """Flags of SGLang: fields of classes, in one file up to 0.5.19 and in a folder since, and texts."""
    files = [package / "srt" / "server_args.py", *(package / "srt" / "arg_groups" / "fields").glob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    fields = {
        field.target.id
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    flags = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {f"--{name.replace('_', '-')}" for name in fields} | flags


def test_listed_names_are_in_the_installed_sglang():
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed")
    package = Path(spec.origin).parent
    assert set(SGLANG_FLAGS.split()) - argument_names(package) == set()
    text = "".join(path.read_text(encoding="utf-8") for path in (package / "srt").rglob("*.py"))
    assert set(SGLANG_METRICS.split()) - set(re.findall(r'"sglang:(\w+)"', text)) == set()


def test_files_and_sections_that_the_guide_links_to_are_there():
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE):
        name, _, anchor = target.partition("#")
        path = ROOT / "docs" / name if name else ROOT / "docs" / "deploy.md"
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"(?m)^#+ (.+)$", path.read_text(encoding="utf-8"))
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, (
                target
            )


def test_nothing_names_the_machine_it_was_written_on():
    texts = [GUIDE, *(path.read_text(encoding="utf-8") for path in DEPLOY.iterdir())]
    for text in texts:
        assert not re.search(r"/tmp/|/root/|/home/\w", text)


def table(name):
    """Rows of a table of the guide between its two comments, cells stripped."""
    body = GUIDE.split(f"<!-- {name}:", 1)[1].split(f"<!-- end of {name} -->", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# name -> parameters, layers, KV heads, parameters of the drafter; heads are 128 wide.
TARGETS = {
    "Qwen3-32B": (32.76e9, 64, 8, 2.57e9),
    "~120B MoE": (106e9, 46, 8, 1.05e9),
    "Qwen3-235B-A22B": (235e9, 94, 4, 1.05e9),
}


def test_the_memory_table_is_what_its_formulas_give():
    rows = table("memory")
    assert {row[0].split(" (")[0] for row in rows} == set(TARGETS)
    for name, tp_text, *cells in rows:
        parameters, layers, kv_heads, drafter = TARGETS[name.split(" (")[0]]
        tp = int(tp_text)
        weights_gib, drafter_gib = parameters * 2 / tp / GIB, drafter * 2 / tp / GIB
        kv_bytes = (layers + 5) * 2 * max(1, kv_heads // tp) * 128 * 2
        pool_gib = 95 * 0.80 - weights_gib - drafter_gib
        fits = pool_gib > 0
        assert cells == [
            f"{weights_gib:.1f}",
            f"{drafter_gib:.1f}",
            f"{pool_gib:.1f}" if fits else "does not fit",
            f"{kv_bytes / KIB:.1f}",
            f"{pool_gib * GIB / kv_bytes / 1000:.0f}k" if fits else "-",
        ], (name, tp)


def test_the_buffer_table_is_what_the_doctor_computes():
    rows = table("buffers")
    assert len(rows) == 4
    for budget, width_text, requests_text, *cells in rows:
        width, requests = int(width_text), int(requests_text)
        assert width == max(16, int(budget) + 1)
        sizes = [
            memory.logits_bytes(requests, width, 151_936),
            memory.mask_bytes(requests, width, 32_768),
            memory.mask_bytes(requests, width, 131_072),
        ]
        # Halves up, as people round.
        assert cells == [str(int(size / MIB + 0.5)) for size in sizes]


def test_other_sums_of_the_guide_are_what_the_doctor_computes():
    slots = 48 * memory.reserve_tokens(32, 16)
    assert f"hold\n{slots:,} slots, {slots * 138 / KIB:.0f} MiB" in GUIDE
    logits_mib = memory.logits_bytes(48, 32, 151_936, element_bytes=2) / MIB
    hidden_mib = memory.hidden_bytes(48, 32, 5, 5120, 2) / MIB
    assert f"in bfloat16, {logits_mib:.0f} MiB; hidden states for the drafter, {hidden_mib:.0f} MiB" in GUIDE
    assert f"{memory.token_count_bytes(48, 151_936) / MIB:.0f} MiB of token counts" in GUIDE
    assert ", ".join(f"{27e9 * 2 / tp / GIB:.1f}" for tp in (1, 2, 4, 8)) + " GiB" in GUIDE
    assert f"touch {128 * (1 - (1 - 8 / 128) ** 32):.0f} of them" in GUIDE
    assert f"takes {65.5 / 1.79:.0f} ms" in GUIDE
    assert f"{32 * 5120 * 2 // KIB} KiB** a round" in GUIDE


def test_the_all_reduce_table_is_128_times_the_published_times():
    rows = {row[0]: row[1:] for row in re.findall(r"(?m)^\| (NCCL|FlashInfer PCIe-IPC) \| (.+) \|$", GUIDE)}
    assert set(rows) == {"NCCL", "FlashInfer PCIe-IPC"}
    for (text,) in rows.values():
        plain_us, round_us, plain_ms, round_ms = (float(number) for number in re.findall(r"[\d.]+", text))
        assert plain_ms == pytest.approx(128 * plain_us / 1000, rel=0.05)
        assert round_ms == pytest.approx(128 * round_us / 1000, rel=0.05)
