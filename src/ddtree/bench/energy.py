"""Energy that GPUs took, from the counters of NVML where they have them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ddtree.errors import first_line

logger = logging.getLogger(__name__)

JOULES = 1e-3  # NVML counts millijoules


class EnergyMeter:
    """Reads the energy counters of some GPUs."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles

    def joules(self) -> float | None:
        """Joules of all these GPUs since their driver was loaded; None where a counter cannot be read."""
        try:
            counters = map(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handles)
            return float(sum(counters)) * JOULES
        except self._nvml.NVMLError as error:
            logger.warning("the energy of the GPUs cannot be read: %s", first_line(error))
            return None


def open_meter(uuids: Sequence[str]) -> EnergyMeter | None:
    """A meter of the GPUs with these UUIDs; None, and why in the log, where there can be none."""
    if not uuids:
        return None
    try:
        import pynvml
    except ModuleNotFoundError:
        logger.info("no energy figures: pip install nvidia-ml-py")
        return None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        meter = EnergyMeter(pynvml, handles)
        return meter if meter.joules() is not None else None
    except pynvml.NVMLError as error:
        logger.info("no energy figures: NVML says %s", first_line(error))
        return None


def gpu_uuids(device: str, num_gpus: int = 1) -> list[str]:
    """UUIDs, as NVML writes them, of the GPUs that a run uses: of `device`, or the first ones visible.

    Args:
        device: auto, cpu, cuda or cuda:N.
        num_gpus: that a server spreads over, from that one on.
    """
    import torch

    visible = 0 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    first = int(device.partition(":")[2] or 0)
    used = range(first, min(first + num_gpus, visible))
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in used]
