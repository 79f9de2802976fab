"""Packages that an installation may not have, and imports that other libraries comment on."""

import contextlib
import importlib
import logging
from collections.abc import Iterator
from types import ModuleType

from kdtrain.errors import UsageError


def optional(package: str, extra: str, what: str) -> ModuleType:
    """Import a package that comes with an extra of kdtrain. UsageError: it is not installed.

    what: the option, file or feature that needs it, with which the message begins.
    """
    try:
        with quiet_import():
            return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and something that it needs is not
            raise
        raise UsageError(f"{what} needs the package {package}; pip install 'kdtrain[{extra}]'") from None


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Silence warnings of CUDA files that a machine cannot load, and torch's of types that it registers.

    transformers imports torchao, and peft bitsandbytes, wherever they are installed.
    """
    loggers = [logging.getLogger(name) for name in ("torchao", "bitsandbytes", "torch.utils._pytree")]
    before = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
