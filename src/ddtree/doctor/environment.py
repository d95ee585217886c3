"""Python, torch, CUDA and the GPUs of this machine, looked at from a process of their own."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddtree.doctor.plan import GIB, Plan
from ddtree.doctor.processes import MAX_PROBLEM, Ran, run_limited
from ddtree.doctor.report import Finding, Level, Section

# The first import of torch from a cold disk takes tens of seconds.
TORCH_LIMIT_S = 90.0
SMI_LIMIT_S = 20.0
MIB = 1 << 20
FIRST_CAPABILITY = (8, 0)
MARK = "ddtree-doctor:"
PROBE = f"""
import json
import torch
found = {{"torch": str(torch.__version__), "cuda": torch.version.cuda, "gpus": []}}
found["hip"] = getattr(torch.version, "hip", None)
try:
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found["gpus"].append([str(p.name), int(p.major), int(p.minor), int(p.total_memory)])
except Exception as error:
    found["gpu_error"] = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
print("{MARK}" + json.dumps(found))
"""
WHOLE = re.compile("[0-9]{1,12}")
MAJOR_MINOR = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(\.[0-9]+)*")
SMI_QUERY = "name,compute_cap,memory.total,driver_version"

Run = Callable[[Sequence[str], float], Ran]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; `capability` is (major, minor), and unknown figures are None."""

    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Environment:
    """What is installed and built in.

    Attributes:
        torch: version of torch, None where it cannot be imported; `torch_problem` says why.
        cuda: version of CUDA that torch was built with, None in a build without it.
        hip: version of ROCm that torch was built with.
        gpu_problem: why torch finds no GPU where it raises.
        smi_problem: why nvidia-smi tells nothing.
        driver: version of NVIDIA's driver.
        gpus: as torch sees them, else as nvidia-smi does.
        gpus_of: "torch" or "nvidia-smi".
    """

    python: str
    executable: str
    torch: str | None = None
    torch_problem: str = ""
    cuda: str | None = None
    hip: str | None = None
    gpu_problem: str = ""
    smi_problem: str = ""
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_of: str = "torch"

    @property
    def cuda_version(self) -> tuple[int, int] | None:
        """CUDA's version as numbers."""
        return major_minor(self.cuda or "")


def probe_environment(run: Run = run_limited) -> Environment:
    """Look at this machine; nothing that is broken there raises here, and each look is limited in time."""
    torch = run([sys.executable, "-c", PROBE], TORCH_LIMIT_S)
    found = parse_probe(torch.out)
    gpus_of_torch = tuple(
        Gpu(name, (major, minor), size) for name, major, minor, size in found.get("gpus", ())
    )
    smi = run(["nvidia-smi", f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"], SMI_LIMIT_S)
    driver, gpus_of_smi = parse_smi(smi)
    return Environment(
        python=platform.python_version(),
        executable=sys.executable,
        torch=found.get("torch"),
        torch_problem="" if found else torch.problem or "it printed nothing",
        cuda=found.get("cuda"),
        hip=found.get("hip"),
        gpu_problem=found.get("gpu_error", ""),
        smi_problem=smi_problem_of(smi),
        driver=driver,
        gpus=gpus_of_torch or gpus_of_smi,
        gpus_of="torch" if gpus_of_torch else "nvidia-smi",
    )


def parse_probe(out: str) -> dict[str, Any]:
    """What the probe printed, empty where it did not get that far; other lines are the libraries' own."""
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    try:
        found = json.loads(lines[-1].removeprefix(MARK)) if lines else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def parse_smi(ran: Ran) -> tuple[str | None, tuple[Gpu, ...]]:
    """The driver's version and the GPUs of nvidia-smi's table; fields that it does not know are None."""
    if ran.code != 0:
        return None, ()
    rows = [[field.strip() for field in line.split(",")] for line in ran.out.splitlines()]
    gpus, drivers = [], []
    for name, capability, memory, driver in (row for row in rows if len(row) == 4):
        gpu = Gpu(name, major_minor(capability), parse_mib(memory))
        if gpu.capability or gpu.memory_bytes:  # else it is no row of the table
            gpus.append(gpu)
            drivers.append(driver)
    return (drivers[0] if drivers else None), tuple(gpus)


def smi_problem_of(ran: Ran) -> str:
    """Why nvidia-smi failed; it says so on standard output."""
    if ran.code == 0:
        return ""
    lines = [line.strip() for line in ran.out.splitlines() if line.strip()]
    return lines[0][:MAX_PROBLEM] if lines else ran.problem


def major_minor(text: str) -> tuple[int, int] | None:
    """The first two numbers of a version such as 12.8, None for anything else."""
    found = MAJOR_MINOR.fullmatch(text)
    return (int(found[1]), int(found[2])) if found else None


def parse_mib(text: str) -> int | None:
    return int(text) * MIB if WHOLE.fullmatch(text) else None


def environment_section(environment: Environment, plan: Plan) -> Section:
    """The findings on this machine."""
    found = [
        Finding("environment.python", Level.OK, f"Python {environment.python} ({environment.executable})"),
        torch_finding(environment),
        *gpu_findings(environment, plan),
    ]
    return Section("environment", "This machine", tuple(found), asdict(environment))


def torch_finding(environment: Environment) -> Finding:
    name = "environment.torch"
    if environment.torch is None:
        return Finding(
            name, Level.ERROR, f"torch cannot be imported: {environment.torch_problem}",
            why="SGLang runs on it",
            todo="install SGLang in this environment anew, which brings the torch that it was built for",
        )  # fmt: skip
    if environment.hip is not None:
        return Finding(
            name, Level.ERROR, f"torch {environment.torch} is built for ROCm {environment.hip}",
            why="DDTREE serves on CUDA GPUs", todo="plan for a machine with NVIDIA GPUs",
        )  # fmt: skip
    if environment.cuda is None and environment.gpus:
        return Finding(
            name, Level.ERROR, f"torch {environment.torch} is a build without CUDA, and a GPU is here",
            why="SGLang would not see the GPU",
            todo="install the CUDA build of torch that this SGLang names in its requirements",
        )  # fmt: skip
    driver = f", driver {environment.driver}" if environment.driver else ""
    built = f"CUDA {environment.cuda}" if environment.cuda else "no CUDA"
    return Finding(name, Level.OK, f"torch {environment.torch} ({built}{driver})")


def gpu_findings(environment: Environment, plan: Plan) -> list[Finding]:
    if plan.capability is not None:
        return [asked_gpu_finding(plan.capability)]
    if not environment.gpus:
        return [no_gpu_finding(environment)]
    found = [gpu_finding(index, gpu) for index, gpu in enumerate(environment.gpus)]
    if environment.gpus_of != "torch" and environment.cuda is not None:
        why = f" ({environment.gpu_problem})" if environment.gpu_problem else ""
        found.append(Finding(
            "environment.gpu-unseen", Level.ERROR, f"nvidia-smi sees a GPU that torch does not{why}",
            why="SGLang sees what torch sees",
            todo="check CUDA_VISIBLE_DEVICES, and that the driver is new enough for "
            f"CUDA {environment.cuda}",
        ))  # fmt: skip
    if plan.tp_size > len(environment.gpus):
        found.append(Finding(
            "environment.gpus-few", Level.ERROR,
            f"--tp {plan.tp_size} needs as many GPUs, {len(environment.gpus)} are here",
            why="SGLang gives each rank a GPU of its own", todo="plan with a smaller --tp",
        ))  # fmt: skip
    if len({(gpu.name, gpu.memory_bytes) for gpu in environment.gpus}) > 1:
        found.append(Finding(
            "environment.gpus-differ", Level.WARN, "the GPUs are not all the same",
            why="tensor parallelism runs at the pace and within the memory of the smallest",
            todo="choose equal ones with CUDA_VISIBLE_DEVICES",
        ))  # fmt: skip
    return found


def asked_gpu_finding(capability: tuple[int, int]) -> Finding:
    major, minor = capability
    told = f"answers are for a GPU of compute capability {major}.{minor}, as asked"
    return gpu_level(f"{told}; this machine's are not looked at", capability)


def no_gpu_finding(environment: Environment) -> Finding:
    problems = {"torch": environment.gpu_problem, "nvidia-smi": environment.smi_problem}
    told = "; ".join(f"{name}: {problem}" for name, problem in problems.items() if problem)
    return Finding(
        "environment.gpu", Level.ERROR, f"no CUDA GPU was found{f' ({told})' if told else ''}",
        why="DDTREE serves on CUDA GPUs",
        todo="run this where the server will run, or name its GPU with --compute-capability, as in "
        "--compute-capability 9.0 --gpu-memory-gb 80",
    )  # fmt: skip


def gpu_finding(index: int, gpu: Gpu) -> Finding:
    capability = ".".join(map(str, gpu.capability)) if gpu.capability else "unknown"
    memory = f"{gpu.memory_bytes / GIB:.1f} GiB" if gpu.memory_bytes else "memory unknown"
    told = f"GPU {index}: {gpu.name}, compute capability {capability}, {memory}"
    return gpu_level(told, gpu.capability)


def gpu_level(told: str, capability: tuple[int, int] | None) -> Finding:
    """A finding on a GPU, a warning for one that is too old."""
    if capability is not None and capability < FIRST_CAPABILITY:
        return Finding(
            "environment.gpu", Level.WARN, told,
            why="DDTREE was written for compute capability 8.0 (Ampere) and later, and not tried below",
            todo="use a newer GPU",
        )  # fmt: skip
    return Finding("environment.gpu", Level.OK, told)
