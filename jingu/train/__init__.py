"""The loop, and what a step is made of."""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Lets `jingu.train(config)` train a run though `jingu.train` is also the name of this package."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from jingu.api import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
