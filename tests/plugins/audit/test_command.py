"""`kdtrain audit`: a right cache passes, a wrong one is named, and what cannot be asked is refused."""

import json

import pytest

from kdtrain.plugins.audit.command import finding, page
from kdtrain.tables import show_page
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder


@pytest.fixture(scope="module")
def others(made):
    """Make beside the teacher of the cache one with other weights, and one with a larger vocabulary."""
    if not (made / "other").exists():
        for name, size, factor in (("other", 300, 6.6), ("wide", 320, 6.0)):
            teacher = tiny_model("llama", size, seed=1)
            for parameter in teacher.parameters():
                parameter.data.mul_(factor if parameter.ndim > 1 else 1)
            write_model_folder(made / name, teacher, tiny_tokenizer(size))
    return made


def test_the_teacher_of_a_cache_confirms_it(workbench):
    found = workbench.json("audit", "cache", "--teacher", "teacher", "--rows", 20)
    assert found["ok"] and found["findings"] == []
    audited = found["audit"]
    assert audited["same_weights"] is True and audited["rows"] == 20 and audited["diagnosis"] is None
    assert {test["name"] for test in audited["tests"]} >= {"label", "worst row", "entries", "tail", "ids"}
    code, out, _ = workbench.call("audit", "cache", "--teacher", "teacher", "--rows", 20)
    assert code == 0 and "the cache holds what the teacher predicts" in out


def test_another_teacher_is_a_finding_with_exit_code_1(workbench, others):
    code, out, _ = workbench.call("audit", "cache", "--teacher", "other", "--rows", 20, "--json")
    found = json.loads(out)
    assert code == 1 and not found["ok"]
    assert found["audit"]["same_weights"] is False and found["audit"]["diagnosis"]["divergence"] > 0
    (line,) = found["findings"]
    assert "not what other" in line and "best fit" in line
    code, out, _ = workbench.call("audit", "cache", "--teacher", "other", "--rows", 20)
    assert code == 1 and "fails" in out and "best fit" in out and "finding: " in out


def test_the_table_of_an_audit_fits_80_columns_whatever_its_figures(monkeypatch, capsys):
    figures = {"statistic": 331_086_584.2, "kind": "chi2(10)", "p": 3.4e-300, "figure": 331_086_584.2}
    failed = ["counts", "likelihood"]
    audit = {"teacher": "t", "same_weights": None, "rows": 60, "positions": 7680, "level": 0.01, "failed": failed}
    audit["tests"] = [{"name": name, **figures} for name in failed]
    audit["diagnosis"] = {"fault": "top-p 0.9", "share": 0.37, "divergence": 0.1, "rows": 16}
    monkeypatch.setenv("COLUMNS", "80")
    show_page([page(audit)[1]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.rstrip().endswith("fails") and "331 M" in line for line in lines[1:])
    assert "partly top-p 0.9 (37% of the difference), or other weights" in finding(audit)


def test_what_cannot_be_audited_is_refused(workbench, others):
    assert workbench.call("audit", "cache", "--teacher", "wide")[0] == 2
    assert "320 logits and the cache 300" in workbench.call("audit", "cache", "--teacher", "wide")[2]
    code, _, err = workbench.call("verify", "cache", "--teacher", "teacher")
    assert code == 2 and "--teacher is an option of kdtrain audit CACHE --teacher T" in err
