"""The pictures: each is drawn from the record that is published, and a missing record is one line."""

import pytest

from benchmarks import figures


@pytest.mark.parametrize("name", figures.PICTURES)
def test_each_published_record_is_drawn_and_a_missing_one_is_one_line(name, tmp_path, capsys):
    assert figures.main([name, str(figures.RESULTS / f"{name}.json"), str(tmp_path)]) == 0
    pictures = capsys.readouterr().out.split()
    assert pictures and all(str(tmp_path) in each for each in pictures)
    assert {each.name for each in tmp_path.iterdir()} <= {each.name for each in figures.FIGURES.iterdir()}
    with pytest.raises(SystemExit) as ended:
        figures.main([name, str(tmp_path / "none.json"), str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("does not exist; name the record that the benchmark wrote\n")


def test_the_picture_of_the_objective_is_as_wide_as_a_page_and_its_title_is_what_the_record_says(tmp_path):
    assert "0.50 to 1.01 of cross-entropy's time" in _title(0.5, 1.01)
    assert "0.25 to 4.00 of cross-entropy's time" in _title(0.25, 4.0)


def _title(*ratios: float) -> str:
    sides = {"cross-entropy": {"seconds": 2.0, "peak_mib": 1.0}, "products": {"seconds": 9.0, "peak_mib": 9.0}}
    sides |= {name: {"seconds": 2.0 * r, "peak_mib": 1.0} for name, r in zip(CACHED, ratios, strict=True)}
    row = {"tokens": 1, "width": 1, "vocabulary": 32_000, "dtype": "float32", "sides": sides}
    return figures.objective({"figures": {"a": row}}).get_suptitle()


CACHED = ("kdtrain-sparse-12", "kdtrain-sparse-50")
