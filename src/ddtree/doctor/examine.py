"""The whole examination: looks at everything in turn and puts the report together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path

from ddtree.config import PluginConfig
from ddtree.doctor.backends import backends_section, gpu_of
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
from ddtree.doctor.report import Finding, Report, Section
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
    installation, copy = installation_section(around.search, around.environ)
    is_there = bool(installation.data["copies"])
    settings, config = settings_section(around.environ, around.cwd)
    if plan.node_budget is not None:
        config = replace(config, node_budget=plan.node_budget)
    pair, found = open_pair(plan, around.fetch)
    gpu = gpu_of(environment, plan)
    has_flashinfer = PathFinder.find_spec("flashinfer", list(around.search.entries)) is not None
    backends, backend = backends_section(gpu, environment, pair.shape, has_flashinfer=has_flashinfer)
    return Report((
        environment_section(environment, plan),
        installation,
        installed_contract(copy, around.environ, is_there=is_there),
        dflash_section(copy.folder if copy else None),
        settings,
        backends,
        *pair_sections(plan, pair, found, config, backend, around.environ, gpu),
    ))  # fmt: skip


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
        launch_section(plan, pair, config, backend, fraction),
    ]
