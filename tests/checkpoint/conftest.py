"""A store of three checkpoints."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kdtrain.checkpoint.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_kit import STATES, tensors

from kdtrain import faults


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Save three checkpoints, at steps 10, 20 and 30."""
    store = Store(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        store.save(f"step-{step:08d}", step, tensors(step), STATES)
    return store


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make saves fail with an error at a point, `times` times."""

    def plan(name: str, error: Exception, times: int = 1) -> None:
        errors = [error] * times

        def point(reached: str, amount: int = 1) -> None:
            if reached == name and errors:
                raise errors.pop()

        monkeypatch.setattr(faults, "point", point)

    return plan


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    """Silence DCP, which logs several debug lines a tensor: they take longer here than a save."""
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
