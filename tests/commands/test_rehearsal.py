"""The folder that a rehearsal lives in."""

from pathlib import Path


def test_the_folder_of_a_rehearsal_stays_until_every_rank_is_done_with_it(tmp_path, run_ranks):
    (tmp_path / "runs").mkdir()
    run_ranks(Path(__file__).with_name("rehearsal_script.py"), 2, tmp_path / "runs" / "run")
    assert list((tmp_path / "runs").iterdir()) == []
