"""jingu: from raw text to a served language model, with one tool, one file and one training loop."""

from typing import TYPE_CHECKING, Any

from jingu.version import __version__

__all__ = [
    "Config",
    "Dataset",
    "JinguError",
    "Model",
    "__version__",
    "build_dataset",
    "export",
    "load",
    "train",
    "train_tokenizer",
]

if TYPE_CHECKING:
    from jingu.api import Config, Dataset, Model, build_dataset, export, load, train, train_tokenizer
    from jingu.errors import JinguError


def __getattr__(name: str) -> Any:
    """Import `jingu.api`, and with it PyTorch, only when one of its names is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jingu import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
