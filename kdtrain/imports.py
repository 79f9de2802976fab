"""Packages that an installation may not have, and imports that other libraries comment on."""

import contextlib
import importlib
import logging
import sys
import warnings
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


_LEVELS = {
    **dict.fromkeys(("torchao", "bitsandbytes", "torch.utils._pytree", "huggingface_hub"), logging.ERROR),
    "torch._subclasses.fake_tensor": logging.CRITICAL,
}
"""Loggers that comment on binaries that nothing uses, and on a model that cannot run, before our own line about it."""


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Silence warnings of CUDA files that a machine cannot load, and torch's of types that it registers.

    transformers imports torchao, and peft bitsandbytes, wherever they are installed.
    """
    before = {name: logging.getLogger(name).level for name in _LEVELS}
    try:
        for name, level in _LEVELS.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep other libraries' bars and warnings off the terminal, and out of a notebook's cell, while a command runs."""
    shown = sys.modules.get("transformers.utils.logging")
    before = (shown.get_verbosity(), shown.is_progress_bar_enabled()) if shown else None
    with quiet_import(), warnings.catch_warnings():
        # a single process without a process group is intended
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            if shown:
                shown.set_verbosity_error()
                shown.disable_progress_bar()
            yield
        finally:
            if shown and before:
                shown.set_verbosity(before[0])
                if before[1]:
                    shown.enable_progress_bar()
