"""The folder that a rehearsal lives in."""

from pathlib import Path

from kdtrain.testing import run_ranks


def test_the_folder_of_a_rehearsal_stays_until_every_rank_is_done_with_it(tmp_path):
    run_ranks(Path(__file__).with_name("rehearsal_script.py"), 2, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
