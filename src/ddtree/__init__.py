"""DDTree: faster decoding of language models through draft trees, without changing what they say.

    from ddtree import Engine, EngineConfig, SamplingParams

Names are loaded on first use, so that `import ddtree` is quick and needs neither torch nor sglang.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.config import Dtype, EngineConfig, Mode, SamplingParams
    from ddtree.engine.engine import Engine
    from ddtree.engine.request import Chunk, FinishReason, Generation, Request, TokenLogprobs
    from ddtree.engine.stream import TokenStream
    from ddtree.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        DDTreeError,
        DrafterMismatchError,
        MissingExtraError,
        ModelError,
        ModelNotFoundError,
        UnsupportedModelError,
    )
    from ddtree.stats import GenerationStats, RoundObserver, RoundStats

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Chunk",
    "ConfigError",
    "ContextLengthError",
    "DDTreeError",
    "DrafterMismatchError",
    "Dtype",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Generation",
    "GenerationStats",
    "MissingExtraError",
    "Mode",
    "ModelError",
    "ModelNotFoundError",
    "Request",
    "RoundObserver",
    "RoundStats",
    "SamplingParams",
    "TokenLogprobs",
    "TokenStream",
    "UnsupportedModelError",
    "__version__",
]

_MODULES = {
    "ddtree.config": ("Dtype", "EngineConfig", "Mode", "SamplingParams"),
    "ddtree.engine.engine": ("Engine",),
    "ddtree.engine.request": ("Chunk", "FinishReason", "Generation", "Request", "TokenLogprobs"),
    "ddtree.engine.stream": ("TokenStream",),
    "ddtree.stats": ("GenerationStats", "RoundObserver", "RoundStats"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF.get(name, "ddtree.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
