"""Packages that may be missing, and what an import prints."""

import json
import subprocess
import sys

import pytest

from kdtrain import imports
from kdtrain.config.sections import MonitorConfig
from kdtrain.data.corpus import documents
from kdtrain.errors import UsageError
from kdtrain.plugins.loggers import TensorBoard


@pytest.fixture
def bare(monkeypatch):
    """Hide the extras, as in an installation without them."""
    for name in ("datasets", "pyarrow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)


def test_the_librarys_names_print_nothing():
    program = "import kdtrain as kd; [getattr(kd, name) for name in kd.__all__]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_cache_is_read_without_the_compiler():
    program = "import sys, kdtrain.cache.read.reader; sys.exit('torch._inductor.config' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_what_needs_an_extra_names_it(bare, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    needs = r"needs the package {0}; pip install 'kdtrain\[{1}\]'$"
    with pytest.raises(UsageError, match="a.parquet " + needs.format("pyarrow", "data")):
        next(documents(str(tmp_path / "a.parquet"), "train"))
    with pytest.raises(UsageError, match="hf:org/name " + needs.format("datasets", "data")):
        next(documents("hf:org/name", "train"))
    with pytest.raises(UsageError, match="--log-to tensorboard " + needs.format("tensorboard", "tensorboard")):
        TensorBoard.ready("")


def test_tensorboard_is_written_by_default_where_it_is_installed(monkeypatch):
    assert MonitorConfig().loggers == [("tensorboard", "")]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert MonitorConfig().loggers == []
    assert MonitorConfig(log_to="tensorboard").loggers == [("tensorboard", "")]


def test_text_and_rows_of_text_need_no_extra(bare, tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\nc\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a\nb\nc\n"}))
    for name in ("a.txt", "a.jsonl"):
        assert [each.text for each in documents(str(tmp_path / name), "train")]


def test_a_package_that_breaks_while_it_loads_is_not_called_missing(monkeypatch, tmp_path):
    (tmp_path / "half_there.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        imports.optional("half_there", "data", "a.jsonl")
