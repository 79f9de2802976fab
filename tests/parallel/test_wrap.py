"""The wrappers' exchanges, and ranks that together equal one process: see the scripts."""

from pathlib import Path

import pytest

SCRIPTS = [
    *(("wrap_script.py", 3), ("compiled_script.py", 2), ("tensor_script.py", 2), ("tensor_script.py", 4)),
    *(("tensor_quantised_script.py", 2), ("tensor_quantised_script.py", 4)),
]


@pytest.mark.parametrize("name, world", SCRIPTS)
def test_every_promise_of_the_script_holds_on_each_rank(name, world, run_ranks):
    script = Path(__file__).with_name(name)
    said, *_ = run_ranks(script, world)
    assert len(said.splitlines()) == script.read_text().split("PROMISES = (")[1].count(",\n")
