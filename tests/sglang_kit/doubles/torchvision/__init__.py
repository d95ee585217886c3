"""Test double around the real torchvision, whose operators do not load beside another build of torch.

torchvision as the package index has it is linked to a CUDA torch. Beside a CPU torch its import ends at the
first operator that it describes, so those are declared here, without a body, and the real package runs.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import torch

HERE = Path(__file__).parent.parent
real = PathFinder.find_spec(
    __name__, [folder for folder in sys.path if Path(folder).resolve() != HERE.resolve()]
)
if real is None or real.origin is None or real.loader is None:
    raise ImportError("torchvision is not installed: requirements/sglang.lock has its version")


def operators_load(package: Path) -> bool:
    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return True
    return False


if not operators_load(Path(real.origin).parent):
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

module = sys.modules[__name__] = module_from_spec(real)
real.loader.exec_module(module)
