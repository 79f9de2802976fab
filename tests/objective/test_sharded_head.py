from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sharded_head_script.py"


@pytest.mark.parametrize("world,scale", [(1, 1.0), (2, 1.0), (2, 1024.0)])
def test_a_head_sharded_over_ranks_gives_the_loss_and_the_gradient_of_the_whole_head(world, scale, run_ranks):
    run_ranks(SCRIPT, world, scale)
