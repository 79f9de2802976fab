"""`kdtrain verify --teacher`: a right cache passes, a wrong one is named, and what cannot be asked is refused."""

import json

import pytest

from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder


@pytest.fixture(scope="module")
def others(made):
    """Beside the teacher of the cache: one with other weights, and one with a larger vocabulary."""
    if not (made / "other").exists():
        for name, size, factor in (("other", 300, 6.6), ("wide", 320, 6.0)):
            teacher = tiny_model("llama", size, seed=1)
            for parameter in teacher.parameters():
                parameter.data.mul_(factor if parameter.ndim > 1 else 1)
            write_model_folder(made / name, teacher, tiny_tokenizer(size))
    return made


def test_the_teacher_of_a_cache_confirms_it(workbench):
    found = workbench.json("verify", "cache", "--teacher", "teacher", "--rows", 20)
    assert found["ok"] and found["findings"] == []
    audited = found["audit"]
    assert audited["same_weights"] is True and audited["rows"] == 20 and audited["diagnosis"] is None
    assert {test["name"] for test in audited["tests"]} >= {"label", "worst row", "entries", "tail", "ids"}
    code, out, _ = workbench.call("verify", "cache", "--teacher", "teacher", "--rows", 20)
    assert code == 0 and "the cache says what the teacher says" in out


def test_another_teacher_is_a_finding_with_exit_code_1(workbench, others):
    code, out, _ = workbench.call("verify", "cache", "--teacher", "other", "--rows", 20, "--json")
    found = json.loads(out)
    assert code == 1 and not found["ok"] and found["problems"] == []
    assert found["audit"]["same_weights"] is False and found["audit"]["diagnosis"]["divergence"] > 0
    (line,) = found["findings"]
    assert "not what other" in line and "best fit" in line
    code, out, _ = workbench.call("verify", "cache", "--teacher", "other", "--rows", 20)
    assert code == 1 and "fails" in out and "best fit" in out


def test_without_a_teacher_a_cache_is_looked_at(workbench):
    found = workbench.json("verify", "cache")
    assert found["ok"] and found["look"]["rows"] > 0
    assert found["look"]["teacher_loss"] > 0 and found["look"]["entropy"] > 0


def test_what_cannot_be_audited_is_refused(workbench, others):
    assert workbench.call("verify", "cache", "--teacher", "wide")[0] == 2
    assert "320 logits and the cache 300" in workbench.call("verify", "cache", "--teacher", "wide")[2]
    code, _, err = workbench.call("verify", "cache", "--teacher", "teacher", "--repair")
    assert code == 2 and "leave --teacher out" in err
    code, _, err = workbench.call("verify", "cache", "--rows", 20)
    assert code == 2 and "--teacher" in err
