"""What holds for every test: one thread, no network, no deadline that a busy machine could miss, no luck.

Generated cases are the same at every run, so that a change is judged by what it did; `make fuzz` draws others.

The environment is set here, before torch or transformers are imported, so that the commands which tests start
inherit it. A test that wants something else passes its own environment to its own process.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

# Two workers on two cores: a second thread each costs more than it brings.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("kdtrain", settings.get_profile("fuzz"), derandomize=True)
settings.load_profile("kdtrain")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `gpu` where there is no CUDA device."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not _has_cuda():
        config.hook.pytest_deselected(items=wanting)
        items[:] = [item for item in items if item not in wanting]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
