"""The student's own text: captured, in rounds, replayed, whatever happens meanwhile."""

import json
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kdtrain as kd
from kdtrain.testing import tiny_model, write_model_folder
from tests.stand_in import standing_in

ENDS = [*range(0, 300, 20), 299]


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def writes(bench, distilled):
    """Return the command's options, with a teacher of several end tokens, and a student that asks for other draws."""
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


def answers_of(cache):
    """Return the text of a capture as another program would write it, without log p."""
    found = []
    for split in cache:
        whole = cache[split].text(np.arange(len(cache[split])))
        for row, mask in zip(whole["tokens"], whole["loss_mask"], strict=True):
            places = np.flatnonzero(mask == 1)
            prompt, answer = row[: places[0] + 1].tolist(), row[places + 1].tolist()
            found.append({"prompt": prompt, "answer": answer, "split": split})
    return found


def test_answers_that_another_program_wrote_give_the_rows_of_the_capture_that_they_come_from(bench, writes):
    bench.run(*writes, "--top-k", 6, "--num-samples", 4, "--by", "exported", "--out", "here").ok()
    cache = kd.Cache(bench.root / "here")
    lines = answers_of(cache)
    policies = [
        cache[split].read(range(n)).targets.policy.view(n, -1) for split, n in (("train", 12), ("validation", 4))
    ]
    logprobs = [row.tolist() for row in torch.cat(policies)]
    asks = ("cache-teacher", "--teacher", "scorer", "--seq-len", 32, "--precision", "fp32", "--seed", 3)
    asks += ("--sequences-per-shard", 6, "--batch-size", 4, "--top-k", 6, "--num-samples", 4, "--answers", "told.jsonl")
    path = bench.root / "told.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert "has no logprobs; name the student that wrote it with --by" in bench.run(*asks, "--out", "told").refusal()
    bench.run(*asks, "--by", "exported", "--out", "told-by").ok()
    system = (*asks, "--by", "exported", "--out", "wrong", "--teacher-system", "Be brief.")
    assert "has prompts of token ids, which --teacher-system cannot change" in bench.run(*system).refusal()
    path.write_text("".join(f"{json.dumps(each | {'prompt': 'a', 'teacher_prompt': 'b'})}\n" for each in lines))
    assert "has a teacher_prompt on each line, which --teacher-system" in bench.run(*system).refusal()
    for line, known in zip(lines, logprobs, strict=True):
        first = len(line["prompt"]) - 1
        line |= {"logprobs": known[first : first + len(line["answer"])], "policy": "engine-7"}
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    bench.run(*asks, "--out", "told").ok()
    policy = kd.Cache(bench.root / "told").manifest.settings.data["generated"]["policy"]
    assert (policy["spec"], policy["weights_digest"]) == ("engine-7", None)
    for name in ("told", "told-by"):
        other = kd.Cache(bench.root / name)
        assert other.manifest.settings.format_version == 5 and other.manifest.generated == cache.manifest.generated
        for split in cache:
            one, two = (each[split].read(range(len(cache[split]))) for each in (cache, other))
            for field, values in one.fields().items():
                torch.testing.assert_close(two.fields()[field], values, rtol=0, atol=0, msg=f"{name} {split} {field}")
    assert bench.run("verify", "told").ok()
    path.write_text(path.read_text().replace("engine-7", "7" * 64))
    assert "is of other weights than --by" in bench.run(*asks, "--by", "exported", "--out", "wrong").refusal()
    path.write_text('{"prompt": "a"}\n')
    assert "told.jsonl, line 1 is not a prompt with its answer" in bench.run(*asks, "--out", "wrong").refusal()
    for more in (("--data", "corpus"), ("--dry-run",)):
        assert f"leave {more[0]} out" in bench.run(*asks, *more, "--out", "wrong").refusal()
    assert not (bench.root / "wrong").exists()


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


ROUNDS = ("--on-policy", "--teacher", "teacher", "--data", "corpus", "--seq-len", 32, "--num-workers", 0)
ROUNDS += ("--num-sequences", 30, "--validation-sequences", 4, "--prompt-tokens", 8, "--max-new-tokens", 10)
ROUNDS += ("--round-rows", 12, "--rollout-batch-size", 6, "--cold-start", 1)
"""Rounds of two steps, behind one on the text of the prompts."""


@pytest.fixture(scope="module")
def run(forks):
    def run(out, *argv, world=1, fault=None, code=0, steps=7):
        words = ("distill", "--student", "student.toml", "--out", out, *forks.eager, *forks.fast, "--steps", steps)
        more = ("--checkpoint-freq", 1, "--eval-freq", 3, "--no-async-save")
        ended = forks.launch(world, *words, *more, *argv, fault=fault)
        assert ended[0].code == code, ended[0].stderr
        return ended[0]

    return run


@pytest.fixture(scope="module")
def whole(run):
    return run("whole-run", *ROUNDS)


def texts(forks, out):
    """Return the tokens of each round of a run, by its name."""
    folders = sorted((forks.root / out / "rollouts").glob("round-*"))
    return {each.name: kd.Cache(each)["train"].text(range(12))["tokens"].tolist() for each in folders}


def same_weights(forks, one, other):
    mine, theirs = forks.tensors(one), forks.tensors(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def assert_same(forks, one, other):
    """Assert equal checkpoints and losses; metrics.jsonl has times of writing besides."""
    assert forks.differing(one, other) == []
    assert forks.state(one)["source"] == forks.state(other)["source"]
    losses = [[(line["step"], line["loss"]) for line in forks.metrics(out)] for out in (one, other)]
    assert losses[0] == losses[1] and texts(forks, one) == texts(forks, other)


def test_each_round_is_a_cache_by_the_weights_of_its_beginning(forks, whole):
    assert [*texts(forks, "whole-run")] == ["round-0001", "round-0002", "round-0003"]
    caches = [kd.Cache(forks.root / "whole-run" / "rollouts" / name) for name in texts(forks, "whole-run")]
    policies = [each.manifest.settings.data["generated"]["policy"] for each in caches]
    assert [(each["round"], each["attempt"], each["step"]) for each in policies] == [(1, 1, 1), (2, 1, 3), (3, 1, 5)]
    assert len({each["weights_digest"] for each in policies}) == 3
    assert forks.state("whole-run")["source"]["rounds"] == [[1, 1], [2, 1], [3, 1]]
    cold, *lines = forks.metrics("whole-run")
    assert "rollouts/round" not in cold and cold["loss"] == cold["ce"] and cold["kd"] == 0
    assert [line["rollouts/round"] for line in lines] == [1, 1, 2, 2, 3, 3]
    for number, line in enumerate(lines):
        assert ("rollouts/length" in line) == (number % 2 == 0) and line["loss"] == line["kd"]
    first = lines[0]
    assert 0 < first["rollouts/overlap"] <= 1 and first["rollouts/held_out/reverse_kl_error"] > 0
    batch = caches[0]["train"].read(range(12))
    policy, mask = batch.targets.policy, batch.loss_mask.flatten()
    assert first["rollouts/entropy"] == pytest.approx(-float(policy[mask].mean()), rel=1e-5)
    forks.run("verify", "whole-run").ok()


KILLS = {
    "in a capture": "cache.shard.after-batch:kill:9",
    "between two rounds": "cache.manifest.after-publish:kill:4",
    "in a step": "train.after-micro-batch:kill:4",
}
MORE_KILLS = {
    "as prompts are written": "cache.shard.before-close:kill:1",
    "as the shape is": "rounds.shape.before-rename:kill",
    "as a shard is closed": "cache.shard.before-close:kill:5",
    "as a shard is published": "cache.shard.after-publish:kill:7",
    "at the end of a capture": "cache.before-finish:kill:3",
    "after a step": "train.after-step:kill:6",
    "in a save": "checkpoint.before-manifest:kill:2",
}


@pytest.mark.parametrize("moment", [*KILLS, *(pytest.param(each, marks=pytest.mark.torture) for each in MORE_KILLS)])
def test_a_run_that_is_killed_anywhere_ends_in_the_same_checkpoint(forks, run, whole, moment):
    shutil.rmtree(forks.root / "killed-run", ignore_errors=True)
    rare = (*ROUNDS, "--checkpoint-freq", 4)  # so that a round is read again, or trained on again
    run("killed-run", *rare, fault=(KILLS | MORE_KILLS)[moment], code=-9)
    run("killed-run", *rare)
    assert_same(forks, "killed-run", "whole-run")


def test_a_signal_in_a_capture_stops_between_two_decoding_steps_and_the_same_command_resumes(forks, run, whole):
    stopped = run("stopped-run", *ROUNDS, fault="cache.shard.after-batch:term:8")
    assert "stopped by SIGTERM after step 3" in stopped.stderr
    assert not (forks.root / "stopped-run" / "rollouts" / "round-0002" / "manifest.json").exists()
    run("stopped-run", *ROUNDS)
    assert_same(forks, "stopped-run", "whole-run")


def test_a_replay_is_the_run_bit_for_bit_and_with_another_loss_it_is_not(forks, run, whole):
    run("replay", "--rollouts", "whole-run")
    assert same_weights(forks, "replay", "whole-run")
    losses = [[line["loss"] for line in forks.metrics(out)] for out in ("replay", "whole-run")]
    assert losses[0] == losses[1] and not (forks.root / "replay" / "rollouts").exists()
    run(
        "other-loss", "--rollouts", "whole-run", "--divergence", "sampled-reverse-kl", code=1
    )  # on this text it got worse
    assert not same_weights(forks, "other-loss", "whole-run")
    first, second = (line["rollouts/weight"] for line in forks.metrics("other-loss")[1:3])
    assert first == pytest.approx(1, abs=1e-4) and abs(second - 1) > 1e-3
    far = forks.run("distill", "--rollouts", "whole-run", "--student", "student.toml", "--out", "far", "--steps", 8)
    assert far.code == 1 and "has no round 4" in far.stderr


def test_a_rollback_leaves_the_round_it_is_in_and_begins_another_attempt_behind_it(forks, run, whole):
    nan = "train.gradient:nan:4-5"
    argv = ("--max-skips", 1)
    run("back", *ROUNDS, *argv, fault=nan)
    state = forks.state("back")
    assert state["progress"]["rollbacks"] == 1 and state["source"]["attempt"] == 2
    assert [*texts(forks, "back")] == ["round-0001", "round-0002", "round-0003-2", "round-0004-2", "round-0005-2"]
    run("back-replay", "--rollouts", "back", *argv, fault=nan)
    assert same_weights(forks, "back-replay", "back")
    run("back-killed", *ROUNDS, *argv, fault=f"{nan},cache.shard.after-batch:kill:15", code=-9)
    run("back-killed", *ROUNDS, *argv)
    assert same_weights(forks, "back-killed", "back")


def test_a_replay_reads_of_each_round_the_attempt_that_the_run_went_on_with(forks, run):
    rare = (*ROUNDS, "--checkpoint-freq", 2, "--eval-freq", 2)
    run("left", *rare, steps=5, fault="train.after-micro-batch:kill:4", code=-9)
    run("left", *rare, "--micro-batch-size", 1, steps=5)  # whose step 3, done again, has other last bits
    run("skipped", *ROUNDS, "--max-skips", 1, fault="train.gradient:nan:5-6")
    for name, abandoned, attempts in ("left", "round-0002", [1, 2]), ("skipped", "round-0003", [1, 1, 2]):
        assert {abandoned, f"{abandoned}-2"} <= texts(forks, name).keys()
        run(f"{name}-replay", "--rollouts", name, steps=1 + 2 * len(attempts))
        lines = forks.metrics(f"{name}-replay")
        assert [line["rollouts/attempt"] for line in lines if "rollouts/attempt" in line] == attempts


def test_a_fork_continues_the_run_from_its_checkpoint(forks, run, whole):
    checkpoint = next((forks.root / "whole-run" / "checkpoints").glob("step-*03"))
    run("fork", "--rollouts", "whole-run", "--load", checkpoint, code=1)  # from its best checkpoint
    assert same_weights(forks, "fork", "whole-run")


def test_share_0_is_the_offline_run_and_half_of_it_mixes_both(forks, run):
    fixed = ("--cache", "cache", "--top-k", 12)
    run("offline", "--cache", "cache")
    run("share-0", *ROUNDS, *fixed, "--rollout-share", 0)
    assert same_weights(forks, "share-0", "offline") and not (forks.root / "share-0" / "rollouts").exists()
    run("rare", *ROUNDS, *fixed, "--rollout-share", 0.0004)  # of 42 sequences
    assert not any("rollouts/round" in line for line in forks.metrics("rare"))
    mixed = (*ROUNDS, *fixed, "--rollout-share", 0.5, "--alpha", 0.25, "--cold-start", 1)
    run("half", *mixed)
    lines = forks.metrics("half")
    assert "rollouts/round" not in lines[0] and [line["rollouts/round"] for line in lines[1:]] == [1, 1, 1, 1, 2, 2]
    for line in lines[1:]:  # alpha is 1 on what the student wrote
        fixed_loss = 0.25 * line["kd"] + 0.75 * line["ce"]
        assert line["loss"] != pytest.approx(fixed_loss, rel=1e-3)
    run("half-again", *mixed, fault="train.after-step:kill:4", code=-9)
    run("half-again", *mixed)
    assert_same(forks, "half-again", "half")


def test_two_ranks_write_and_train_on_the_same_rounds(forks, run, whole):
    run("ranks", *ROUNDS, "--micro-batch-size", 3, world=2)
    one, two = texts(forks, "whole-run"), texts(forks, "ranks")
    assert one["round-0001"] == two["round-0001"] and one.keys() == two.keys()
    run("ranks-killed", *ROUNDS, "--micro-batch-size", 3, world=2, fault="cache.shard.after-batch:kill:4@0", code=-9)
    run("ranks-killed", *ROUNDS, "--micro-batch-size", 3, world=2)
    assert_same(forks, "ranks-killed", "ranks")


def test_stale_rounds_stay_in_the_mix_and_a_round_that_grows_writes_more(forks, run):
    run("stale", *ROUNDS, "--stale-rounds", 1, "--max-new-tokens", "4:12")
    lengths = [line["rollouts/length"] for line in forks.metrics("stale") if "rollouts/length" in line]
    assert lengths[0] <= 4 < lengths[1] <= 8 < lengths[2] <= 12
    assert forks.state("stale")["source"]["rounds"] == [[1, 1], [2, 1], [3, 1]]


def test_what_the_teacher_alone_sees_is_in_its_numbers_and_not_in_the_row(bench, writes):
    asks = (*writes, "--by", "exported", "--top-k", 8)
    bench.run(*asks, "--out", "sees", "--teacher-system", "Shout: ").ok()
    bench.run(*asks, "--out", "blind").ok()
    sees, blind = (kd.Cache(bench.root / name)["train"].read(range(12)) for name in ("sees", "blind"))
    assert torch.equal(sees.tokens, blind.tokens) and torch.equal(sees.loss_mask, blind.loss_mask)
    teacher = AutoModelForCausalLM.from_pretrained(bench.root / "scorer", dtype=torch.float32).eval()
    prefix = torch.tensor(AutoTokenizer.from_pretrained(bench.root / "scorer").encode("Shout: ")).expand(12, -1)
    with torch.no_grad():
        logprobs = teacher(torch.cat([prefix, sees.tokens[:, :-1]], 1)).logits.log_softmax(-1)[:, prefix.shape[1] :]
    wanted, here = logprobs.gather(-1, sees.tokens[:, 1:, None])[..., 0], sees.loss_mask
    torch.testing.assert_close(sees.targets.label_logprob.view_as(here)[here], wanted[here], rtol=0.01, atol=0.02)
    assert not torch.allclose(blind.targets.label_logprob.view_as(here)[here], wanted[here], atol=0.1)
    chat = ("--data", "chat.jsonl", "--seq-len", 96, "--num-workers", 0, "--num-sequences", 8)
    chat += ("--validation-sequences", 4)
    talk = ("cache-teacher", "--teacher", "scorer", *chat, "--generate", "--by", "exported", "--max-new-tokens", 8)
    bench.run(*talk, "--out", "chat-sees", "--teacher-system", "Be brief.").ok()
    assert kd.Cache(bench.root / "chat-sees").manifest.settings.data["generated"]["policy"]["teacher_system"]


ENGINE = """
import json, os, shutil, signal, sys, time
model, prompts, out = sys.argv[1:]
number = out.split("round-")[1][:4]
if os.path.exists("stop" + number):
    os.remove("stop" + number)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
if os.path.exists("broken" + number):
    print("loading the model")
    sys.exit("no room on the device")
if os.path.exists("answers" + number):
    shutil.copy("answers" + number, out)
    sys.exit()
import contextlib, io
from kdtrain.commands.generate import main
from kdtrain.config.commands import GenerateConfig
with open(out, "w") as file:
    for line in map(json.loads, open(prompts)):
        said, most = io.StringIO(), line["max_tokens"]
        how = {"raw": True, "temperature": 0.0, "json": True, "device": "cpu"}
        with contextlib.redirect_stdout(said):
            main(GenerateConfig(student=model, prompt=line["prompt"], max_tokens=most, **how))
        ids = json.loads(said.getvalue())["ids"]
        ids += [299] if len(ids) < most else []
        file.write(json.dumps({"prompt": line["tokens"], "answer": ids}) + "\\n")
"""


def test_a_command_that_writes_the_rounds_gives_the_rows_of_our_own_decoder_and_the_run_resumes_where_it_fails(
    forks, run
):
    (forks.root / "engine.py").write_text(ENGINE)
    greedy = (*ROUNDS, "--gen-temperature", 0)
    command = ("--write-with", f"{sys.executable} engine.py {{model}} {{prompts}} {{out}}")
    run("greedy", *greedy, steps=5)
    drawn = ("distill", "--rollouts", "greedy", "--student", "student.toml", "--out", "never")
    refusal = forks.run(*drawn, "--divergence", "sampled-reverse-kl").refusal()
    assert "was drawn at --gen-temperature 0 --gen-top-p 1" in refusal
    for name in ("stop0002", "broken0002"):
        (forks.root / name).touch()
    stopped = run("engine", *greedy, *command, steps=5)
    assert "stopped by SIGTERM after step 3" in stopped.stderr and not (forks.root / "stop0002").exists()
    failed = run("engine", *greedy, *command, steps=5, code=1)
    assert "the command ended with 1; the same command resumes here" in failed.stderr
    assert "loading the model | no room on the device" in failed.stderr
    (forks.root / "broken0002").unlink()
    run("engine", *greedy, *command, steps=5)
    assert texts(forks, "engine") == texts(forks, "greedy") and len(texts(forks, "greedy")) == 2
    assert same_weights(forks, "engine", "greedy")
    (written,) = (forks.root / "engine" / "rollouts" / "answers").glob("round-0001*.jsonl")
    shutil.copy(written, forks.root / "answers0001")
    run("engine-ranks", *greedy, *command, "--micro-batch-size", 3, steps=3, world=2)
    assert texts(forks, "engine-ranks")["round-0001"] == texts(forks, "greedy")["round-0001"]
    answers = [each.name for each in (forks.root / "engine" / "rollouts" / "answers").iterdir()]
    assert {each[:10] for each in answers} == {"round-0001", "round-0002"} and len(answers) == 4  # no student's weights
    assert "write-with" not in (forks.root / "engine" / "config.toml").read_text().replace("_", "-")
    (forks.root / "engine.py").write_text("open(__import__('sys').argv[3], 'w').write('{}')")
    wrong = run("engine-wrong", *greedy, *command, steps=3, code=1)
    assert "line 1 is not a prompt with its answer" in wrong.stderr and "correct the command" in wrong.stderr
    words = ("distill", "--student", "student.toml", "--out", "never", *greedy, "--write-with")
    assert "--write-with has no {out}" in forks.run(*words, "engine {model} {prompts}").refusal()
    none = run("engine-none", *greedy, "--write-with", "./none {model} {prompts} {out}", code=1)
    assert "--write-with: ./none cannot be started: No such file" in none.stderr


@pytest.fixture(scope="module")
def seen(bench):
    """`seen.jsonl`: prompts with completions, each with a prompt of the teacher's own."""
    rows = [(f"Q{n}: what?\n", f"the answer is {n}.", f"Be brief in {n} ways. Q{n}: what?\n") for n in range(40)]
    lines = [dict(zip(("prompt", "completion", "teacher_prompt"), row, strict=True)) for row in rows]
    (bench.root / "seen.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return {row[0]: row[2] for row in rows}


def assert_seen(bench, cache, seen, teacher):
    """Assert that the teacher's numbers are those of its own prompt before the same answer."""
    tokenizer = AutoTokenizer.from_pretrained(bench.root / teacher)
    model = AutoModelForCausalLM.from_pretrained(bench.root / teacher, dtype=torch.float32).eval()
    batch = cache["train"].read(range(len(cache["train"])))
    found_BT = batch.targets.label_logprob.view_as(batch.loss_mask)
    for row, mask, found in zip(batch.tokens, batch.loss_mask, found_BT, strict=True):
        start, answer = int(mask.int().argmax()) + 1, row[1:][mask]
        prompt = tokenizer.encode(seen[tokenizer.decode(row[:start])], add_special_tokens=False)
        with torch.no_grad():
            logprobs = model(torch.tensor([[*prompt, *answer]])).logits[0, :-1].log_softmax(-1)
        wanted = logprobs[len(prompt) - 1 :].gather(-1, answer[:, None])[:, 0]
        torch.testing.assert_close(found[mask], wanted, rtol=0.01, atol=0.02)
    return batch


def test_a_teacher_reads_its_own_prompts_before_fixed_text_and_before_what_a_student_writes(bench, writes, seen):
    asks = ("cache-teacher", "--teacher", "scorer", "--data", "seen.jsonl", "--seq-len", 48, "--num-workers", 0)
    asks += ("--precision", "fp32", "--num-sequences", 12, "--validation-sequences", 4, "--top-k", 8)
    bench.run(*asks, "--teacher-prompts", "--out", "seen-fixed").ok()
    fixed = kd.Cache(bench.root / "seen-fixed")
    tokenizer = AutoTokenizer.from_pretrained(bench.root / "scorer")
    batch = assert_seen(bench, fixed, seen, "scorer")
    texts = [tokenizer.decode(row[1:][mask]) for row, mask in zip(batch.tokens, batch.loss_mask, strict=True)]
    assert all(text.startswith("the answer is") for text in texts)
    assert fixed.manifest.settings.format_version == 3 and len(fixed.manifest.settings.teacher["prompts"]) == 64
    by = ("--generate", "--by", "exported", "--max-new-tokens", 8)
    bench.run(*asks, *by, "--teacher-prompts", "--out", "seen-by").ok()
    assert_seen(bench, kd.Cache(bench.root / "seen-by"), seen, "scorer")
    assert kd.Cache(bench.root / "seen-by").manifest.settings.format_version == 5
    bench.run(*asks, "--teacher-system", "Shout!\n", "--out", "seen-system").ok()
    assert_seen(bench, kd.Cache(bench.root / "seen-system"), {each: f"Shout!\n{each}" for each in seen}, "scorer")
    plain = (*asks[:4], "corpus", *asks[5:], "--teacher-prompts", "--out", "never")
    assert "plain text" in bench.run(*plain).refusal()
    both = bench.run(*asks, "--teacher-prompts", "--teacher-system", "a", "--out", "never")
    assert "both say what the teacher alone reads" in both.refusal()
    lines = [json.loads(line) for line in (bench.root / "seen.jsonl").read_text().splitlines()]
    (bench.root / "odd.jsonl").write_text("".join(f"{json.dumps(each | {'teacher_prompt': 3})}\n" for each in lines))
    odd = (*asks[:4], "odd.jsonl", *asks[5:], "--teacher-prompts", "--out", "never")
    assert "its teacher_prompt must be a text, as its prompt is" in bench.run(*odd).refusal()
    assert "has no column 'teacher_prompt'; option --teacher-prompts needs it" in (
        bench.run(*asks[:4], "chat.jsonl", *asks[5:], "--teacher-prompts", "--out", "never").refusal()
    )
    assert not (bench.root / "never").exists()


def test_in_rounds_the_teacher_reads_its_own_prompts_and_may_be_the_student_without_its_adapters(forks, run, seen):
    words = ("--on-policy", "--data", "seen.jsonl", "--seq-len", 48, "--num-workers", 0, "--top-k", 8)
    words += ("--num-sequences", 30, "--validation-sequences", 4, "--max-new-tokens", 8, "--round-rows", 12)
    words += ("--teacher-prompts", "--alpha", 1)
    run("seen-run", *words, "--teacher", "teacher", steps=4)
    round_1 = kd.Cache(forks.root / "seen-run" / "rollouts" / "round-0001")
    assert_seen(forks, round_1, seen, "teacher")
    run("seen-killed", *words, "--teacher", "teacher", steps=4, fault="cache.shard.after-batch:kill:5", code=-9)
    run("seen-killed", *words, "--teacher", "teacher", steps=4)
    assert_same(forks, "seen-killed", "seen-run")
    pytest.importorskip("peft")
    more = ("--out", "own-run", *forks.eager, *forks.fast, "--steps", 3)
    asks = ("distill", "--student", "teacher", "--teacher", "self", *words, *more)
    forks.run(*asks, "--lora-rank", 2).ok()
    first, second = (kd.Cache(forks.root / "own-run" / "rollouts" / f"round-000{n}") for n in (1, 2))
    batch = assert_seen(forks, first, seen, "teacher")
    assert_seen(forks, second, seen, "teacher")
    digests = [each.manifest.settings.data["generated"]["policy"]["weights_digest"] for each in (first, second)]
    assert digests[0] != digests[1] and first.manifest.settings.teacher == second.manifest.settings.teacher
    ours, theirs = (each[batch.loss_mask.flatten()] for each in (batch.targets.policy, batch.targets.label_logprob))
    assert not torch.allclose(ours, theirs, atol=0.1)
    assert "add --lora-rank, or name the student's spec" in forks.run(*asks).refusal()


def answered(tokenizer, system, number, answer):
    """Return the tokens of a prompt with an answer, and how many of them are the answer's."""
    return torch.tensor([tokenizer.encode(f"{system}Q{number}: what?\n{answer}")]), len(answer)


def two_styles(tokenizer):
    """Train a model that answers YES. behind `Shout: `, and else yes."""
    model = tiny_model("llama", 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        loss = 0.0
        for system, answer in ("Shout: ", "YES."), ("", "yes."):
            batch = [answered(tokenizer, system, 10 + (8 * step + row) % 40, answer) for row in range(8)]
            tokens = torch.cat([each for each, _ in batch])
            logits = model(tokens).logits[:, -len(answer) - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -len(answer) :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def test_by_one_command_a_student_learns_the_style_that_its_teacher_has_by_a_system_prompt(forks):
    tokenizer = AutoTokenizer.from_pretrained(forks.root / "teacher")
    teacher = two_styles(tokenizer)
    write_model_folder(forks.root / "styled", teacher, tokenizer)
    lines = [json.dumps({"prompt": f"Q{number}: what?\n", "completion": "YES."}) for number in range(10, 50)]
    (forks.root / "styles.jsonl").write_text("\n".join(lines))
    words = ("distill", "--on-policy", "--teacher", "styled", "--student", "styled", "--teacher-system", "Shout: ")
    words += ("--data", "styles.jsonl", "--seq-len", 24, "--num-workers", 0, "--max-new-tokens", 5, "--top-k", 8)
    words += ("--num-sequences", 24, "--validation-sequences", 4, "--round-rows", 12, "--steps", 12, "--out", "style")
    forks.run(*words, *forks.eager, *forks.fast).ok()
    student = AutoModelForCausalLM.from_pretrained(forks.root / "style" / "student", dtype=torch.float32).eval()

    def kl(system, model):
        """KL(teacher behind the system prompt || model without it), over an answer in capitals."""
        both = []
        for each, prompt in (teacher, system), (model, ""):
            tokens, size = answered(tokenizer, prompt, 55, "YES.")
            with torch.no_grad():
                both.append(each(tokens).logits[0, -size - 1 : -1].log_softmax(-1))
        return float((both[0].exp() * (both[0] - both[1])).sum(-1).mean())

    assert kl("Shout: ", student) < 0.2 * kl("Shout: ", teacher)
    assert kl("Shout: ", student) < 0.2 * kl("", student)


LOSSES = {
    "reverse-kl": ("--top-k", 8),
    "sampled-reverse-kl": (),
    "sampled-reverse-kl-top": ("--top-k", 4, "--num-samples", 6),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_divergence_on_drawn_tokens_resumes_within_a_round_and_its_replay_is_the_run(forks, run, name):
    loss = ("--divergence", name.removesuffix("-top"))
    run(name, *ROUNDS, *LOSSES[name], *loss, steps=3, fault="train.after-micro-batch:kill:3", code=-9)
    run(name, *ROUNDS, *LOSSES[name], *loss, steps=3)
    run(f"{name}-replay", "--rollouts", name, *loss, steps=3)
    assert same_weights(forks, f"{name}-replay", name)
    codec = kd.Cache(forks.root / name / "rollouts" / "round-0001").manifest.settings.codec
    kept = dict(zip(LOSSES[name][::2], LOSSES[name][1::2], strict=True))
    assert codec.top_k == kept.get("--top-k", 0)
    assert codec.num_samples == kept.get("--num-samples", 0 if codec.top_k else 50)
    _, first, second = forks.metrics(name)
    assert all(line["rollouts/learning_s"] > 0 for line in (first, second))
    shown = ("weight", "effective_samples", "truncated")
    if name == "reverse-kl":
        assert first["kd"] > 0 and not any(f"rollouts/{each}" in second for each in shown)
        return
    assert [first[f"rollouts/{each}"] for each in shown] == pytest.approx([1, 1, 0], abs=1e-6)
    weight, effective, truncated = (second[f"rollouts/{each}"] for each in shown)
    assert abs(weight - 1) > 1e-5 and 0 < effective < 0.9999 and 0 <= truncated < 1


@pytest.fixture(scope="module")
def served(bench, writes):
    """Serve the teacher with several end tokens; return the address."""
    model = AutoModelForCausalLM.from_pretrained(bench.root / "scorer").eval()
    tokenizer = AutoTokenizer.from_pretrained(bench.root / "scorer")
    with standing_in(model, tokenizer, name="scorer") as server:
        yield ("--teacher-server", server.url)


def assert_same_rows(one, other):
    """Assert that two caches have the same texts and the same numbers, which are kept as codes of their own."""
    for split in one:
        ours, theirs = (each[split].read(range(len(one[split]))) for each in (one, other))
        mask = ours.loss_mask.flatten()
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.loss_mask, theirs.loss_mask)
        torch.testing.assert_close(theirs.targets.policy, ours.targets.policy, rtol=0, atol=1e-5)
        assert torch.equal(theirs.targets.ids[mask], ours.targets.ids[mask])
        for name in ("logprobs", "label_logprob"):
            numbers = (getattr(each.targets, name)[mask] for each in (theirs, ours))
            torch.testing.assert_close(*numbers, rtol=0.01, atol=0.02)


def test_a_served_teacher_gives_the_rows_of_a_local_one(bench, writes, served):
    asks = (*writes, "--by", "exported", "--top-k", 8, "--teacher-system", "Shout: ")
    bench.run(*asks, "--out", "local-own").ok()
    bench.run(*asks, *served, "--out", "served-own").ok()
    assert_same_rows(*(kd.Cache(bench.root / name) for name in ("local-own", "served-own")))


def test_rounds_that_servers_score_are_those_of_a_local_teacher_and_resume(forks, run, served):
    words = tuple("scorer" if each == "teacher" else each for each in ROUNDS)
    words += ("--top-k", 8, "--divergence", "reverse-kl")
    run("local-run", *words, steps=3)
    run("served-run", *words, *served, steps=3, fault="cache.shard.after-batch:kill:7", code=-9)
    ended = run("served-run", *words, *served, steps=3)
    assert "the same teacher as when the cache was begun" in ended.stderr
    ours, theirs = (kd.Cache(forks.root / name / "rollouts" / "round-0001") for name in ("local-run", "served-run"))
    assert_same_rows(ours, theirs)
    losses, others = ([line["loss"] for line in forks.metrics(name)] for name in ("local-run", "served-run"))
    assert losses == pytest.approx(others, abs=1e-2)
    idle = forks.run("distill", "--student", "student.toml", "--out", "never", *words, *served, "--server-top-k", 9)
    assert "--server-top-k is for the answers about --data" in idle.refusal()


def test_rounds_of_conversations_with_adapters_keep_whole_distributions(forks, run):
    pytest.importorskip("peft")
    words = ("--on-policy", "--teacher", "teacher", "--data", "chat.jsonl", "--seq-len", 96, "--num-workers", 0)
    words += ("--num-sequences", 30, "--validation-sequences", 4, "--max-new-tokens", 8, "--round-rows", 12)
    more = ("--dense", "--divergence", "jsd", "--lora-rank", 2, "--steps", 3, "--out", "chat-run")
    ended = forks.run("distill", "--student", "teacher", *words, *more, *forks.eager, *forks.fast)
    assert ended.code == 1 and "never got better" in ended.stderr  # it begins as its teacher
    caches = [kd.Cache(forks.root / "chat-run" / "rollouts" / f"round-000{number}") for number in (1, 2)]
    digests = {each.manifest.settings.data["generated"]["policy"]["weights_digest"] for each in caches}
    batch, tokenizer = caches[0]["train"].read(range(12)), AutoTokenizer.from_pretrained(forks.root / "teacher")
    assert len(digests) == 2 and batch.targets.width == 300
    model = AutoModelForCausalLM.from_pretrained(forks.root / "teacher", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(batch.tokens[:, :-1]).logits.log_softmax(-1)[batch.loss_mask]
    found = batch.targets.logprobs[batch.loss_mask.flatten()].float()
    torch.testing.assert_close(found.exp(), wanted.exp(), rtol=0.02, atol=1e-4)
    for row, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        prompt = tokenizer.decode(row[: int(mask.int().argmax()) + 1])
        assert prompt.startswith("<user>") and "<assistant>" not in prompt and 1 <= int(mask.sum()) <= 8


def test_the_best_checkpoint_has_the_highest_score_where_a_function_of_ones_own_marks_it(forks, run):
    (forks.root / "marks.py").write_text("def score(prompt, answer, row):\n    return sum(map(ord, answer))\n")
    words = (*ROUNDS, "--score-with", "marks:score", "--best-by", "score", "--eval-freq", 1)
    run("scored", *words, steps=5)
    validations = [line for line in forks.lines("scored") if "validation/loss" in line]
    scores, losses = ({each["step"]: each[f"validation/{name}"] for each in validations} for name in ("score", "loss"))
    assert [*scores] == [0, 1, 2, 3, 4, 5] and len({*scores.values()}) > 1
    best = max(scores, key=scores.get)
    assert best != min(losses, key=losses.get)
    assert (forks.root / "scored" / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
    result = json.loads((forks.root / "scored" / "result.json").read_text())
    assert [result[f"best_{name}"] for name in ("step", "score", "validation_loss")] == [
        best,
        scores[best],
        losses[best],
    ]
    run("scored-killed", *words, steps=5, fault="train.after-step:kill:4", code=-9)
    run("scored-killed", *words, steps=5)
    assert_same(forks, "scored-killed", "scored")
    assert forks.state("scored-killed")["progress"] == forks.state("scored")["progress"]
    wrong = forks.run("distill", "--student", "student.toml", "--out", "never", *ROUNDS, "--best-by", "score")
    assert "--best-by score needs --score-with" in wrong.refusal()
    (forks.root / "marks.py").write_text("def score(prompt, answer, row):\n    return 1 / 0\n")
    assert "marks:score: ZeroDivisionError" in run("scored-wrong", *words, steps=5, code=1).stderr


def test_a_collapse_ends_the_run_where_that_is_asked_for_and_a_score_of_ones_own_is_logged(forks, run):
    (forks.root / "scores.py").write_text("def score(prompt, answer, row):\n    return len(prompt) + row\n")
    words = (*ROUNDS, "--score-with", "scores:score")
    ended = run("collapsed", *words, "--on-collapse", "stop", "--gen-temperature", 0, "--max-new-tokens", 24, code=1)
    assert "--on-collapse stop ends the run here" in ended.stderr
    assert json.loads((forks.root / "collapsed" / "result.json").read_text())["stop_reason"] == "collapse"
