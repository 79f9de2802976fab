"""The plot scripts: --help shows the usage, and a missing record is one line."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("plot_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_says_what_is_drawn_from_what_and_a_missing_record_is_one_line(script, tmp_path):
    told = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert told.returncode == 0 and told.stdout.startswith(f"usage: {script.name}") and "record" in told.stdout
    wrong = subprocess.run([sys.executable, str(script), str(tmp_path / "none.json")], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.endswith("does not exist; name the record that the benchmark wrote\n")
