"""The wrappers' exchanges, and ranks that together equal one process: see wrap_script.py."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "wrap_script.py"


@pytest.mark.parametrize("world", [2, 3])
def test_every_promise_of_the_script_holds_on_each_rank(world, run_ranks):
    said, *_ = run_ranks(SCRIPT, world)
    assert len(said.splitlines()) == SCRIPT.read_text().split("PROMISES = (")[1].count(",\n")
