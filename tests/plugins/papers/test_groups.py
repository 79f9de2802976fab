"""Groups of runs: told apart only beyond what seeds explain."""

import pytest

import kdtrain as kd
from kdtrain.plugins.papers.groups import caution, difference, differing, read_groups, t_quantile
from tests.logged_runs import write_run


def test_groups_name_the_options_in_which_they_differ_their_seeds_and_runs_that_have_not_ended(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)]
    groups = read_groups([*folders, write_run(tmp_path / "c", alpha=0.5, ended=False)])
    assert differing(groups) == ["alpha"] and groups[0].seeds == "2 runs, seeds 0, 1"
    assert "not ended, or killed: c" in caution(groups)
    with pytest.raises(kd.UsageError, match="name at most 64"):
        read_groups(folders * 33)


def test_a_difference_is_the_mean_over_pairs_of_one_seed_with_the_interval_of_students_t(tmp_path):
    folders = [write_run(tmp_path / f"a{seed}", 2.0 + seed / 10, seed) for seed in range(3)]
    folders += [
        write_run(tmp_path / f"b{seed}", 2.0 + seed / 10 + 0.05 + seed / 100, seed, alpha=0.5) for seed in range(3)
    ]
    groups = read_groups(folders)
    off = difference(groups, groups[1], "last_validation_loss")
    # differences 0.05, 0.06, 0.07; 95 % of Student's t at 2 degrees of freedom: 4.303 * 0.01 / sqrt(3)
    assert (
        off.mean == pytest.approx(0.06) and off.half == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4) and off.beyond
    )
    assert difference(groups, groups[0], "last_validation_loss") is None


@pytest.mark.parametrize(
    "level, freedom, value",
    [
        (0.05, 1, 12.7062),
        (0.05, 2, 4.3027),
        (0.05, 3, 3.1824),
        (0.01, 4, 4.6041),
        (0.05, 10, 2.2281),
        (0.001, 30, 3.646),
    ],
)
def test_quantiles_of_students_t_are_those_of_the_tables(level, freedom, value):
    assert t_quantile(level, freedom) == pytest.approx(value, rel=1e-4)


def test_without_a_second_seed_nothing_is_beyond_it_and_a_run_that_was_repeated_is_no_seed(tmp_path):
    folders = [
        write_run(tmp_path / "a", 2.0),
        write_run(tmp_path / "again", 2.0),
        write_run(tmp_path / "b", 9.0, alpha=0),
    ]
    groups = read_groups(folders)
    assert len(groups) == 2 and groups[0].deviation("kl") is None
    off = difference(groups, groups[1], "last_validation_loss")
    assert off.mean == pytest.approx(7.0) and off.beyond is None
    assert any(note.startswith("one seed only") for note in caution(groups))
