"""The whole examination: looks at everything in turn and puts the report together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path

from ddtree.config import PluginConfig
from ddtree.doctor.backends import Capability, backends_section, gpu_of
from ddtree.doctor.checkpoints import Fetch
from ddtree.doctor.contract_check import (
    contract_section,
    dflash_section,
    installed_contract,
    settings_section,
)
from ddtree.doctor.copies import SearchPath, server_path, working_folder
from ddtree.doctor.environment import Environment, Gpu, environment_section, probe_environment
from ddtree.doctor.installation import installation_section
from ddtree.doctor.launch import launch_section
from ddtree.doctor.memory_plan import memory_section
from ddtree.doctor.pair import Pair, open_pair, pair_section
from ddtree.doctor.plan import Plan
from ddtree.doctor.report import Finding, Level, Report, Section
from ddtree.sglang_plugin.contract import check_source


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the doctor looks at; tests put others in place.

    Attributes:
        probe: looks at the machine.
        search: the path that a server would have.
        environ: environment variables.
        cwd: the working directory.
        fetch: gets the small files of a model of the hub; None is the hub itself.
    """

    probe: Callable[[], Environment] = probe_environment
    search: SearchPath = field(default_factory=server_path)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: Path = field(default_factory=lambda: Path(working_folder() or os.curdir))
    fetch: Fetch | None = None


def examine_source(path: Path, environ: Mapping[str, str] = os.environ) -> Report:
    """Hold the hook contract against the SGLang at a path, a wheel or a folder, and look for its DFLASH.

    Raises:
        ConfigError: there is no SGLang at that path, or its files cannot be read or parsed.
    """
    return Report((contract_section(check_source(path, environ)), dflash_section(path)))


def examine(plan: Plan, around: Surroundings) -> Report:
    """Look at this machine, its SGLang and, where a model is named, its pair and the memory that it takes."""
    environment = around.probe()
    is_elsewhere = plan.is_elsewhere
    installation, copy = installation_section(around.search, around.environ, is_elsewhere=is_elsewhere)
    is_there = bool(installation.data["copies"])
    settings, config = settings_section(around.environ, around.cwd)
    if plan.node_budget is not None:
        config = replace(config, node_budget=plan.node_budget)
    pair, found = open_pair(plan, around.fetch)
    gpu = gpu_of(environment, plan)
    cuda, has_flashinfer = (None, None) if is_elsewhere else software(environment, around.search)
    backends, backend = backends_section(gpu, cuda, pair.shape, has_flashinfer=has_flashinfer)
    sections = (
        environment_section(environment, plan),
        installation,
        installed_contract(copy, around.environ, is_there=is_there, is_elsewhere=is_elsewhere),
        dflash_section(copy.folder if copy else None),
        settings,
        backends,
        *pair_sections(plan, pair, found, config, backend, around.environ, gpu),
    )  # fmt: skip
    return planned_report(sections) if is_elsewhere and not is_there else Report(sections)


def software(environment: Environment, search: SearchPath) -> tuple[Capability | None, bool]:
    """CUDA's version, and whether flashinfer is here: what SGLang's choice of a backend depends on."""
    return environment.cuda_version, PathFinder.find_spec("flashinfer", list(search.entries)) is not None


def planned_report(sections: tuple[Section, ...]) -> Report:
    """The report on a server of another machine, of whose SGLang nothing is known."""
    memory = next(section for section in sections if section.name == "memory")
    fits = "account" in memory.data and all(finding.level is Level.OK for finding in memory.findings)
    told = "the plan fits" if fits else "nothing that was looked at stops the plan"
    unseen = "SGLang was not looked at here"
    return Report(sections, f"{told}; {unseen}", f"the plan will not work as it is; {unseen}")


def pair_sections(
    plan: Plan,
    pair: Pair,
    found: list[Finding],
    config: PluginConfig,
    backend: str,
    environ: Mapping[str, str],
    gpu: Gpu | None,
) -> list[Section]:
    """Pair, memory and flags; without a model only the flags, with names to fill in."""
    gpu_bytes = plan.gpu_memory_bytes or (gpu.memory_bytes if gpu is not None else None)
    memory = memory_section(plan, pair, config, gpu_bytes)
    fraction = plan.mem_fraction
    if fraction is None and "account" in memory.data:
        fraction = memory.data["account"]["fraction"]
    return [
        pair_section(plan, pair, found, config, backend, environ),
        memory,
        launch_section(with_load(plan, memory), pair, config, backend, fraction),
    ]


def with_load(plan: Plan, memory: Section) -> Plan:
    """The plan with the requests and the context that memory was reckoned for, if it was."""
    load = memory.data.get("load")
    if load is None:
        return plan
    return replace(plan, max_requests=load["num_requests"], context_tokens=load["context_tokens"])
