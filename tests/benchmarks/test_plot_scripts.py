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
