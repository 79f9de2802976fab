"""The student's own text: captured, in rounds, replayed, whatever happens meanwhile."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import kdtrain as kd

ENDS = [*range(0, 300, 20), 299]


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def writes(bench, distilled):
    """The command's options, with a teacher that has several end tokens, and a student that asks for other draws."""
    shutil.copytree(bench.root / "teacher", bench.root / "scorer")
    (bench.root / "scorer" / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    shutil.copytree(bench.root / "run" / "student", bench.root / "exported")
    asks = ("cache-teacher", "--teacher", "scorer", *bench.data, "--num-sequences", 12, "--validation-sequences", 4)
    asks += ("--precision", "fp32", "--sequences-per-shard", 6, "--batch-size", 4, "--generate", "--seed", 3)
    return (*asks, "--prompt-tokens", 8, "--max-new-tokens", 20)


def test_a_student_writes_its_teacher_scores_and_both_log_probabilities_are_kept(bench, writes):
    made = bench.run(*writes, "--top-k", 8, "--by", "exported", "--out", "own", "--json").json
    assert made["format_version"] == 5 and sum(made["generated"]["train"].values()) > 12
    cache = kd.Cache(bench.root / "own")
    policy = cache.manifest.settings.data["generated"]["policy"]
    assert policy["spec"] == "exported" and (policy["round"], policy["attempt"]) == (0, 1)
    batch = cache["train"].read(range(12))
    here = batch.loss_mask
    assert not here[:, :7].any() and here[:, 7].all()
    for folder, found in ("exported", batch.targets.policy), ("scorer", batch.targets.label_logprob):
        model = AutoModelForCausalLM.from_pretrained(bench.root / folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logprobs = model(batch.tokens[:, :-1]).logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
        atol = 1e-4 if folder == "exported" else 0.02  # the teacher's numbers are kept as codes
        torch.testing.assert_close(found.view_as(here)[here], logprobs[here], rtol=0.01, atol=atol)
    assert (batch.targets.policy.view_as(here)[~here] == 0).all()
    for row, mask in zip(batch.tokens.numpy(), here.numpy(), strict=True):
        written = row[1:][mask].tolist()
        assert (written[-1] in ENDS or len(written) == 20) and not {*written[:-1]} & {*ENDS}
    assert bench.run("verify", "own").ok()
    assert "written by a student" in bench.run("inspect", "own").ok().stdout


def test_a_killed_capture_of_a_students_text_ends_in_the_same_bytes(bench, writes):
    asks = (*writes, "--by", "run")
    bench.run(*asks, "--out", "whole").ok()
    for point in ("cache.shard.after-batch:kill:3", "cache.before-finish:kill"):
        assert bench.run(*asks, "--out", "killed", fault=point).code == -signal.SIGKILL
    bench.run(*asks, "--out", "killed").ok()
    assert content(bench.root / "killed") == content(bench.root / "whole")
    assert kd.Cache(bench.root / "whole").manifest.settings.data["generated"]["policy"]["step"] in (4, 8)


def test_what_a_students_generation_config_asks_of_draws_is_not_used_and_logged_once(bench, writes):
    path, settings = bench.root / "exported" / "generation_config.json", {"top_k": 2, "repetition_penalty": 1.5}
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, "do_sample": True, **settings}))
    ended = bench.run(*writes, "--by", "exported", "--out", "asked").ok()
    path.write_text(json.dumps(before))
    bench.run(*writes, "--by", "exported", "--out", "plain").ok()
    asked, plain = (kd.Cache(bench.root / name) for name in ("asked", "plain"))
    assert (asked["train"].text(range(12))["tokens"] == plain["train"].text(range(12))["tokens"]).all()
    assert ended.stderr.count("repetition_penalty 1.5, top_k 2) is not used") == 1


def test_what_a_student_wrote_is_neither_merged_cut_nor_refined(bench, writes):
    bench.run(*writes, "--by", "exported", "--out", "one").ok()
    bench.run(*writes, "--by", "exported", "--out", "two", "--seed", 4).ok()
    assert "is neither merged nor cut" in bench.run("merge", "one", "two", "--out", "sum").refusal()
    assert "is neither merged nor cut" in bench.run("subset", "one", "--rows", "0:4", "--out", "cut").refusal()
    refined = bench.run("cache-teacher", "--teacher", "scorer", "--refine", "one", "--out", "more")
    assert "a student wrote its text" in refined.refusal()
    assert (
        "--by has no effect without --generate"
        in bench.run(*("cache-teacher", "--teacher", "scorer", *bench.data, "--by", "run", "--out", "idle")).refusal()
    )


def test_a_cache_of_text_that_no_student_wrote_keeps_its_version_and_its_rows_are_checked(bench, writes):
    assert kd.Cache(bench.root / "cache").manifest.settings.format_version == 3
    assert "written" not in json.loads((bench.root / "cache" / "manifest.json").read_text())["codec"]
    batch = kd.Cache(bench.root / "one")["train"].read(range(2))
    assert {"policy"} == batch.fields().keys() - kd.Cache(bench.root / "cache")["train"].read([0]).fields().keys()
    assert np.isfinite(batch.targets.policy.numpy()).all()
