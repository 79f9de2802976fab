"""`distill` in several ranks: the training of one process, whatever the engine, and nothing hangs when a rank dies.

Ranks are forks of a process that has imported everything, over gloo; the last tests start torchrun, whose workers are
forks as well.
"""

import functools
import importlib.util
import itertools
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kdtrain.checkpoint.store import load
from kdtrain.config.commands import DistillConfig
from kdtrain.run.folder import run_lock
from tests.logged_runs import wandb_history, wandb_records
from tests.token_kinds import train

CHAT = ("--data", "chat.jsonl", "--messages-column", "messages", "--seq-len", 32, "--num-workers", 0)
SMALL = (*CHAT, "--num-sequences", 40, "--validation-sequences", 7)
"""Text whose micro-batches have different numbers of unmasked tokens."""
RUN = (
    *("distill", "--student", "student.toml", "--steps", 10, "--batch-size", 6, "--lr", 1e-2, "--warmup-steps", 2),
    *("--clip", 0.5, "--eval-freq", 5, "--checkpoint-freq", 5, "--log-to", "none", "--log-freq", 1, "--no-compile"),
)
CACHED = ("--cache", "chat-cache", "--precision", "fp32")
BF16 = ("--cache", "chat-cache", "--precision", "bf16", "--alpha", 0.9)  # an average over ranks is rounded elsewhere
ONLINE = ("--teacher", "teacher", *SMALL, "--precision", "fp32")
SHORT = ("--steps", 5)
DDP, FSDP = ("--parallel", "ddp"), ("--parallel", "fsdp")
TENSOR, TEACHER = ("--tensor-parallel", 2), ("--teacher-tensor-parallel", 2)

SAME = 1e-5
NUMBERS = {
    "loss",
    "tokens",
    "kd",
    "hidden",
    "T",
    "alpha",
    "teacher_ce",
    "grad_norm",
    *(f"validation/{name}" for name in ("loss", "kl", "agreement", "acceptance", "accuracy", "ece")),
}
CASES = {
    "cached": (
        CACHED,
        SAME,
        [  # the six sequences of a step as 1 x 6, 2 x 3 and 3 x 2 ranks x micro-batches
            (1, ("--micro-batch-size", 1)),
            (2, (*DDP, "--micro-batch-size", 1)),
            (2, (*FSDP, "--micro-batch-size", 1)),
            (3, (*DDP, "--micro-batch-size", 1)),
        ],
    ),
    "online": (
        (*ONLINE, "--hidden-loss", "mse", "--divergence", "jsd", "--temperature-mode", "adversarial", *SHORT),
        SAME,
        [
            (2, (*DDP, "--teacher-parallel", "replicate")),
            (2, (*FSDP, "--teacher-parallel", "fsdp")),
            (2, (*DDP, *TEACHER)),  # each rank reads its own sequences, and makes whole rows
            (2, (*TENSOR, *TEACHER)),  # both read the same, and each makes its columns
        ],
    ),
    "tensor ranks": (
        (*CACHED, "--temperature-mode", "likelihood", *SHORT),
        SAME,
        [(2, (*TENSOR, "--micro-batch-size", 2)), (4, (*TENSOR, *FSDP, "--micro-batch-size", 1))],
    ),
    "adapters in tensor ranks": (
        (*CACHED, "--lora-rank", 4, "--lora-dropout", 0.1, "--micro-batch-size", 3, *SHORT),
        SAME,
        [(2, TENSOR)],
    ),
    # rounding depends on the micro-batch: compare with one process that has the same micro-batches
    "bf16": ((*BF16, "--micro-batch-size", 3), 0.0, [(2, DDP)]),
    # and with weights of norms that are rounded as well, which Adam makes larger in ten steps
    "bf16 parts": ((*BF16, "--micro-batch-size", 3), 1e-2, [(2, FSDP)]),
    # a sum over ranks may move a number to the next one of its format
    "mxfp8": (
        ("--cache", "chat-cache", "--precision", "mxfp8", "--micro-batch-size", 3, *SHORT),
        1e-4,
        [(2, DDP), (2, FSDP)],
    ),
    "adaptive": (
        (
            *("--cache", "chat-cache", "--precision", "mxfp8", "--micro-batch-size", 3, "--time-resume"),
            *("--quant-rule", "loss", "--quant-loss-threshold", 0.001, "--quant-window-size", 2),
            *("--quant-min-dwell", 1, "--collect-tensors", "*mlp*", "--collect-every", 4, "--alpha", 0.9),
        ),
        SAME,
        [(2, FSDP)],
    ),
}
"""Options, how far a parameter may be from that of one process after the steps, and ranks with theirs."""


def command(*options):
    """Return `RUN` with some options, whose student is another if they name one."""
    return (*(RUN[:1] + RUN[3:] if "--student" in options else RUN), *options)


@pytest.fixture(scope="module")
def ranks(ranks_of):
    """Add to the bench in ranks a cache of text of which not all tokens count, and a student of another tokenizer."""
    ranks_of.ok(
        1, "cache-teacher", "--teacher", "teacher", "--out", "chat-cache", *SMALL, "--top-k", 16, "--precision", "fp32"
    )
    train("gpt2", 500, (ranks_of.root / "corpus/this.txt").read_text()).save_pretrained(ranks_of.root / "words")
    ranks_of.student("other", tokenizer="words")
    return ranks_of


@pytest.fixture(scope="module")
def trained(ranks):
    """Return a function that trains in some ranks with some options and names the run; the same is trained once."""

    numbers = itertools.count()

    @functools.cache
    def train(world, *options, fault=None):
        out = f"run-{next(numbers)}"
        ended = ranks.launch(world, *command(*options), "--out", out, fault=fault)
        assert [each.code for each in ended] == [0] * world, ended[0].stderr
        assert [(each.stdout, each.stderr) for each in ended[1:]] == [("", "")] * (world - 1)
        return out

    return train


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Compute the largest difference between two students."""
    assert one.keys() == other.keys()
    names = [name for name in one if not name.startswith("optimizer.")]
    return max(float((one[name] - other[name]).abs().max()) for name in names)


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_what_one_process_trains(ranks, trained, name):
    options, near, ways = CASES[name]
    alone = trained(1, *options)
    expected, lines = ranks.tensors(alone), ranks.lines(alone)
    for world, how in ways:
        run = trained(world, *options, *how)
        assert distance(expected, ranks.tensors(run)) <= near, how
        for line, other in zip(lines, ranks.lines(run), strict=True):
            assert line.keys() == other.keys()
            for key in line.keys() & NUMBERS:
                bound = SAME if line["step"] < 2 else max(near, SAME)  # until the first update nothing is rounded twice
                assert other[key] == pytest.approx(line[key], rel=10 * bound), (how, line["step"], key)
        exported = ranks.root / run / "student" / "model.safetensors"
        assert exported.stat().st_size == (ranks.root / alone / "student" / "model.safetensors").stat().st_size


SELF = ("--teacher", "self", "--student", "teacher", *SMALL, "--precision", "fp32")
LORA = ("--lora-rank", 4)
WRITES = ("--on-policy", "--teacher", "teacher", *CHAT, "--max-new-tokens", 4, "--num-samples", 8)
SERVER = ("--teacher", "teacher", *SMALL, "--teacher-server", "http://127.0.0.1:9/v1")
FEATURES = {
    "alpha auto, spikes, hooks for NaN, parts within a node": (
        *(*CACHED, "--alpha", "auto", "--eval-freq", 1, "--spike-patience", 1, "--spike-lr-factor", 0.9),
        *("--nan-hooks", "always", "--shard-size", 1),
    ),
    "jsd, learned temperature": (*CACHED, "--divergence", "jsd", "--temperature-mode", "adversarial"),
    "reverse kl, frozen head, activation checkpointing": (
        *(*CACHED, "--divergence", "reverse-kl", "--freeze-head", "--activation-checkpointing"),
    ),
    "hidden states": (*ONLINE, "--hidden-loss", "mse"),
    "adapters that learn from the parts without them": (*SELF, *LORA, "--alpha", 0.5),
    "gradients added up": (*CACHED, "--micro-batch-size", 1, "--accumulate", "sharded"),
    "text that ranks write": (WRITES, "use --parallel ddp in place of --tensor-parallel"),
    "a cache made while training": (SERVER, "a cache that is made while training; make it first"),
    "DoRA": ((*CACHED, *LORA, "--lora-dora"), "--lora-dora, whose norms of columns go over ranks"),
    "packed weights": ((*CACHED, *LORA, "--base-weights", "bf16"), "packed layers are whole; use --parallel ddp"),
    "another tokenizer": (
        (*CACHED, "--cross-tokenizer", "--student", "other.toml"),
        "a teacher of another tokenizer, whose cells of tokens need whole rows",
    ),
    "tensors of layers": ((*CACHED, "--collect-tensors", "*mlp*"), "--collect-tensors reads whole layers"),
    "no sum over tokens": ((*ONLINE, "--divergence", "logit-mse"), "--divergence logit-mse over whole distributions"),
}
"""Options of two steps in fp32 that tensor ranks train as one process does, or with the sentence that refuses them."""
LAYOUTS = {"tp": (2, TENSOR), "tp and ddp": (4, (*TENSOR, *DDP)), "tp and fsdp": (4, (*TENSOR, *FSDP))}
REFUSED_IN = {
    ("gradients added up", "tp and ddp"): "--accumulate sharded has no effect with --parallel ddp",
    ("packed weights", "tp and fsdp"): "--base-weights bf16 cannot be sharded over ranks",
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("layout", ["tp", *(pytest.param(each, marks=pytest.mark.torture) for each in [*LAYOUTS][1:])])
def test_tensor_ranks_train_each_feature_as_one_process_or_refuse_it_by_a_sentence(ranks, trained, feature, layout):
    world, how = LAYOUTS[layout]
    options, words = FEATURES[feature], None
    if isinstance(options[0], tuple):
        options, words = options
    words = REFUSED_IN.get((feature, layout), words)
    options = ("--micro-batch-size", 3, *options, "--steps", 2)
    if words is not None:
        ended = ranks.launch(world, *command(*options, *how), "--out", "refused-feature")
        assert [each.code for each in ended] == [2] * world, ended[0].stderr
        assert words in ended[0].refusal() and not (ranks.root / "refused-feature").exists()
        return
    alone, run = trained(1, *options), trained(world, *options, *how)
    for line, other in zip(ranks.lines(alone), ranks.lines(run), strict=True):
        assert line.keys() == other.keys()
        for key in line.keys() & NUMBERS:
            bound = SAME if key == "loss" else 10 * SAME
            assert other[key] == pytest.approx(line[key], rel=bound, abs=1e-7), (line["step"], key)
    one, other = (load_file(ranks.root / each / "student" / "model.safetensors") for each in (alone, run))
    assert distance(one, other) <= SAME


@pytest.mark.parametrize("how", [DDP, FSDP])
def test_compiled_ranks_that_add_up_and_clip_train_what_one_process_trains(ranks, trained, how):
    compiled = [each for each in RUN if each != "--no-compile"]
    # what ranks add to a graph is where it breaks and who adds up; its code is compared in test_main_job.py
    ended = ranks.launch(
        2, *compiled, *CACHED, *how, "--micro-batch-size", 1, "--out", f"compiled-{how[1]}", TRACED="1"
    )
    assert [each.code for each in ended] == [0, 0], ended[0].stderr
    assert '"compiled": true' in (ranks.root / f"compiled-{how[1]}/environment.json").read_text()
    assert distance(ranks.tensors(trained(1, *CACHED)), ranks.tensors(f"compiled-{how[1]}")) <= SAME


@pytest.fixture(scope="module")
def whole(ranks, trained):
    """Return a function that names a run of ranks that nothing interrupts."""

    def run(how, world=2, micro=1):
        out = trained(world, *CACHED, *how, "--micro-batch-size", micro)
        for log in ("train.log", *(f"rank-{rank:05}.log" for rank in range(1, world))):
            assert "step 10/10" in (ranks.root / out / log).read_text()
        return out

    return run


BROKEN = {
    "fsdp": (2, FSDP, ("checkpoint.before-rename:kill:2@0", "micro:23@1", "checkpoint.write:kill:30000@1")),
    "ddp": (2, DDP, ("validate.batch:kill:2@1", "micro:23@0", "checkpoint.write:kill:30000@1")),
    "tensor": (2, TENSOR, ("checkpoint.before-rename:kill:2@0",)),
    "tensor and ddp": (4, (*TENSOR, *DDP), ("micro:5@3", "micro:20@0")),
}
"""Ranks, and where one is killed in one start after the other: mid-save, in a validation, mid-step."""


SLOW = [pytest.param(name, marks=pytest.mark.torture) for name in ("tensor", "tensor and ddp")]


@pytest.mark.parametrize("name", ["fsdp", "ddp", *SLOW])
def test_a_killed_rank_ends_the_others_and_the_same_command_finishes_with_the_same_bits(ranks, whole, name):
    (world, how, faults), out = BROKEN[name], f"killed-{name}".replace(" ", "-")
    command = (*RUN, *CACHED, *how, "--micro-batch-size", 1, "--out", out)
    for fault in faults:
        ended = ranks.launch(world, *command, fault=fault.replace("micro:", "train.after-micro-batch:kill:"))
        victim = ended.pop(int(fault[-1]))
        assert victim.code == -signal.SIGKILL and ranks.apart < 300
        for other in ended:
            assert other.code == 1
            assert "lost another rank" in other.stderr.splitlines()[-1]
            assert "Traceback" not in other.stderr
    ranks.ok(world, *command)
    assert ranks.differing(whole(how, world), out) == []


@pytest.mark.parametrize("how", [DDP, FSDP, TENSOR], ids=["ddp", "fsdp", "tensor"])
def test_a_signal_to_one_rank_stops_all_and_the_same_command_resumes_bitwise(ranks, whole, how):
    micro = 3 if how == TENSOR else 1  # tensor ranks take all micro-batches of a step
    command = (*RUN, *CACHED, *how, "--micro-batch-size", micro, "--out", f"asked-{how[1]}")
    middle, step = (3, 1) if how == TENSOR else (10, 3)
    ended = ranks.launch(2, *command, "--json", fault=f"train.after-micro-batch:term:{middle}@1")
    assert [each.code for each in ended] == [0, 0], ended[0].stderr
    assert (ended[0].json["stopped_by"], ended[0].json["step"], ended[1].stdout) == ("SIGTERM", step, "")
    ranks.ok(2, *command)
    assert ranks.differing(whole(how, micro=micro), f"asked-{how[1]}") == []


@pytest.mark.parametrize(
    "world, how", [(2, TENSOR), pytest.param(4, (*TENSOR, *FSDP), marks=pytest.mark.torture)], ids=["tp", "tp and fsdp"]
)
def test_tensor_ranks_with_dropout_switch_formats_at_the_steps_of_one_process_and_resume_bitwise(ranks, world, how):
    text = (ranks.root / "student.toml").read_text()
    (ranks.root / "dropping.toml").write_text(f"{text}attention_dropout = 0.3\n")
    command = (
        *("dropping.toml" if each == "student.toml" else each for each in RUN),
        *("--cache", "chat-cache", "--precision", "fp8", "--micro-batch-size", 3, "--time-resume"),
        *("--quant-rule", "loss", "--quant-loss-threshold", 0.001, "--quant-min-dwell", 1, *SHORT),
    )

    def switches(run):
        events = [json.loads(line) for line in (ranks.root / run / "events.jsonl").read_text().splitlines()]
        return [(each["step"], each["mode"]) for each in events if each["event"] == "switch"]

    ranks.ok(1, *command, "--out", "dropping-1")
    assert switches("dropping-1")[0][1] == "bf16"
    out = f"dropping-{world}"
    ranks.ok(world, *command, *how, "--out", out)
    assert switches(out) == switches("dropping-1")
    for line, other in zip(ranks.lines("dropping-1"), ranks.lines(out), strict=True):
        assert other.keys() == line.keys()
        assert "loss" not in line or other["loss"] == pytest.approx(line["loss"], rel=0.1)
    asked = (*command, *how, "--out", f"{out}-asked")
    ended = ranks.launch(world, *asked, fault="train.after-micro-batch:term:4@1")
    assert [each.code for each in ended] == [0] * world, ended[0].stderr
    ranks.ok(world, *asked)
    assert ranks.differing(out, f"{out}-asked") == []


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_signal_to_one_rank_before_the_ranks_have_met_stops_all_of_them_alike(ranks, stopped):
    command = (*RUN, *CACHED, *DDP, "--out", f"early-{stopped}", "--rank-timeout", 60, "--json")
    ended = ranks.launch(2, *command, fault=f"ranks.before-group:term:1@{stopped}")
    assert [each.code for each in ended] == [0, 0], [each.stderr for each in ended]
    assert (ended[0].json["stopped_by"], ended[1].stdout) == ("SIGTERM", "")
    assert ranks.apart < 20 and not (ranks.root / f"early-{stopped}").exists()


SHAPES = {
    "2 fsdp to 1": ((2, FSDP), (1, ())),
    "2 ddp to 3 fsdp": ((2, DDP), (3, FSDP)),
    "1 to 2 tensor": ((1, ()), (2, TENSOR)),
    "2 tensor to 4 fsdp": ((2, TENSOR), (4, (*TENSOR, *FSDP, "--micro-batch-size", 1))),
}


@pytest.mark.parametrize("name", [*list(SHAPES)[:-1], pytest.param("2 tensor to 4 fsdp", marks=pytest.mark.torture)])
def test_a_checkpoint_of_one_number_of_ranks_resumes_with_another(ranks, whole, name):
    (first, begun), (then, ended) = SHAPES[name]
    out = f"from-{name}".replace(" ", "-")
    command = (*RUN, *CACHED, "--out", out)
    ranks.ok(first, *command, *begun, "--eval-freq", 1000, "--resume", "auto", "--checkpoint-freq", 5)
    checkpoints = ranks.root / out / "checkpoints"
    middle = load(checkpoints / "step-00000005")
    (checkpoints / "latest").unlink()
    shutil.rmtree(checkpoints / "step-00000010")
    ranks.ok(then, *command, *ended, "--checkpoint-freq", 1)
    assert distance(ranks.tensors(whole(DDP)), ranks.tensors(out)) <= SAME
    # the loaded state is the written one, to the last bit
    again = load(checkpoints / "step-00000005").tensors
    assert all(torch.equal(each, again[name]) for name, each in middle.tensors.items())
    steps = [line["step"] for line in ranks.metrics(out)]
    assert steps == list(range(1, 11))
    for line, other in zip(ranks.metrics(whole(DDP)), ranks.metrics(out), strict=True):
        assert other["tokens"] == line["tokens"]
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-5)


@pytest.mark.parametrize("how", [DDP, FSDP, TENSOR], ids=["ddp", "fsdp", "tensor"])
def test_nan_on_one_rank_is_skipped_by_all(ranks, trained, how):
    options = (*CACHED, "--micro-batch-size", 1, "--nan-hooks", "first", *SHORT)
    alone = trained(1, *options, fault="train.loss:nan:4")
    ended = ranks.launch(2, *RUN, *options, *how, "--out", f"nan-{how[1]}", fault="train.loss:nan:4@1")
    assert [each.code for each in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert distance(ranks.tensors(alone), ranks.tensors(f"nan-{how[1]}")) <= SAME
    events = [json.loads(line) for line in (ranks.root / f"nan-{how[1]}" / "events.jsonl").read_text().splitlines()]
    assert [each["batch"] for each in events if each["event"] == "skip"] == [4]


def test_the_rank_whose_teacher_is_broken_names_the_tensor(ranks):
    command = (*RUN, *CACHED, *FSDP, "--micro-batch-size", 1, "--out", "broken-teacher")
    ended = ranks.launch(2, *command, fault="train.teacher:nan:6")
    assert [each.code for each in ended] == [0, 0], ended[0].stderr
    [found] = [line for line in ended[0].stderr.splitlines() if "run again in eager mode" in line]
    assert "teacher: logprobs is the first non-finite tensor" in found
    folder = found.rsplit(" ", 1)[1]
    sequences = load_file(ranks.root / folder / "batch.safetensors")["sequences"]
    assert 6 in sequences.tolist() and len(sequences) == 3


def test_the_clock_of_the_first_rank_asks_all_for_a_checkpoint(ranks):
    ended = ranks.launch(2, *RUN, *CACHED, *FSDP, "--out", "clock", "--checkpoint-minutes", 1e-6, "--keep-rolling", 1)
    assert [each.code for each in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    lines = [json.loads(line) for line in (ranks.root / "clock/events.jsonl").read_text().splitlines()]
    saved = [each["name"] for each in lines if each["event"] == "checkpoint"]
    assert {f"clock-{step:08d}" for step in (1, 2, 3, 4, 6, 8, 9)} <= set(saved)
    assert (ranks.root / "clock/checkpoints/clock-00000009").is_dir()


@pytest.mark.parametrize("how", [FSDP, pytest.param(TENSOR, marks=pytest.mark.torture)], ids=["fsdp", "tensor"])
def test_a_spike_is_rolled_back_by_all_ranks(ranks, how):
    spiky = ("--spike-patience", 2, "--steps", 30, "--checkpoint-freq", 10, "--alpha", 0.9)
    for world, out in ((1, f"spike-alone-{how[0]}"), (2, f"spike-{how[0]}")):
        more = how if world > 1 else ()
        ended = ranks.launch(world, *RUN, *CACHED, *spiky, *more, "--out", out, KDTRAIN_FAULT="train.loss:x30:25-26")
        assert [each.code for each in ended] == [0] * world, ended[0].stderr
        events = (ranks.root / out / "events.jsonl").read_text()
        assert events.count('"rollback"') == 1
    assert distance(ranks.tensors(f"spike-alone-{how[0]}"), ranks.tensors(out)) <= 10 * SAME


@pytest.mark.parametrize("how", [FSDP, TENSOR], ids=["fsdp", "tensor"])
def test_a_rank_that_hangs_is_noticed_in_time(ranks, how):
    command = (*RUN, *CACHED, *how, "--rank-timeout", 2, "--out", f"hung-{how[1]}")
    ended = ranks.launch(2, *command, fault="train.after-step:hang:3@1")
    assert [each.code for each in ended] == [1, 1]
    assert "rank 0 lost another rank" in ended[0].refusal() and "Timed out" in ended[0].refusal()
    assert ranks.apart > 3  # rank 0 did not wait for it


def test_a_full_disk_of_one_rank_is_reported_once_and_ends_all(ranks):
    command = (*RUN, *CACHED, *FSDP, "--disk-patience", 0, "--out", "no-space-of-one")
    ended = ranks.launch(2, *command, fault="checkpoint.write:enospc:30000-9999999@1")
    assert [each.code for each in ended] == [1, 1]
    said = [line for each in ended for line in each.stderr.splitlines() if line.startswith("kdtrain: ")]
    assert len(said) == 1 and "No space left on device" in said[0] and "no-space-of-one/checkpoints" in said[0]


REFUSED = {
    "not a multiple": (("--batch-size", 5), "--batch-size 5 is not a multiple of 2 ranks"),
    "no multiple with micro-batches": (("--micro-batch-size", 2), "--micro-batch-size 2"),
    "shard size": (("--parallel", "fsdp", "--shard-size", 3), "--shard-size 3"),
    "unknown flag": (("--parralel", "ddp"), "--parallel"),
    "cache that is not there": (("--cache", "nowhere"), "nowhere"),
    "sanity": (("--sanity",), "torchrun"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_run_is_refused_on_all_ranks_by_one_line(ranks, name):
    options, words = REFUSED[name]
    cached = () if "--cache" in options else CACHED
    ended = ranks.launch(2, *RUN, *cached, "--out", "refused", *options)
    assert [each.code for each in ended] == [2, 2], ended
    assert words in ended[0].refusal()
    assert ended[1].stderr == ""
    assert not (ranks.root / "refused").exists()


def test_a_launch_into_a_folder_that_another_trains_in_is_refused_on_all_ranks_by_one_line(ranks):
    out = ranks.root / "taken"
    with run_lock(DistillConfig(student="student.toml", cache=ranks.root / "chat-cache", out=out)):
        ended = ranks.launch(2, *RUN, *CACHED, "--out", "taken")
    assert [each.code for each in ended] == [2, 2], ended
    assert "another process is training in taken; wait for it" in ended[0].refusal()
    assert ended[1].stderr == ""
    assert not out.exists()


WATCHED = ("--log-to", "wandb:p") if importlib.util.find_spec("wandb") else ()
RESTARTED = {
    # the third save of a process: the second attempt has one left
    "killed-0": ("checkpoint.after-rename:kill:3@0", "-9", ("--resume", "latest", *WATCHED)),
    # a run that may be overwritten is not, by its own second try
    "ended-1": ("train.after-step:enospc:7@1", "1", ("--resume", "never", "--overwrite")),
}


@pytest.fixture(scope="module")
def restarted(ranks):
    """Run one of `RESTARTED` in two ranks, which torchrun restarts once; return what it printed."""

    @functools.cache
    def run(out):
        fault, _, more = RESTARTED[out]
        (ended,) = ranks.server.run(
            *(Path(__file__).with_name("torchrun_script.py"), "--standalone", "--nproc-per-node", 2),
            *("--max-restarts", 1, "--monitor-interval", 0.02, "-m", "kdtrain"),
            *(*RUN, *CACHED, *FSDP, "--micro-batch-size", 1, "--out", out, *more),
            folder=ranks.root,
            KDTRAIN_FAULT=fault,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    return run


@pytest.mark.parametrize("out", RESTARTED)
def test_torchrun_restarts_a_failed_run_and_it_resumes_from_the_newest_checkpoint(ranks, whole, restarted, out):
    started = time.monotonic()
    stderr = restarted(out)
    assert time.monotonic() - started < 500  # less than what ranks wait for each other
    assert f"exitcode: {RESTARTED[out][1]})" in stderr
    assert "resuming from" in (ranks.root / out / "train.log").read_text()
    assert ranks.differing(whole(FSDP), out) == []


@pytest.mark.skipif(not WATCHED, reason="needs the package wandb")
def test_one_unattended_command_begins_resumes_and_extends_a_run_of_the_real_wandb(ranks, restarted):
    assert restarted("killed-0").count("killed-0 holds no run yet: a new one begins") == 1
    run, more = ranks.root / "killed-0", RESTARTED["killed-0"][2]
    longer = (*RUN, *CACHED, "--out", "killed-0", *more, "--steps", 12, "--on-event", "tee -a got")
    assert "holds no run" not in ranks.run(*longer, fault="train.gradient:nan:12").ok().stderr
    assert [line["step"] for line in ranks.metrics("killed-0")] == list(range(1, 13))
    events = [json.loads(line) for line in (ranks.root / "got").read_text().splitlines()]
    assert [(each["event"], each["step"]) for each in events] == [("skip", 11)]

    known = json.loads((run / "wandb.json").read_text())["id"]
    kept = sorted(run.glob("wandb/offline-run-*"))
    assert len(kept) == 3 and {path.name.split("-")[-1] for path in kept} == {known}
    assert (run / "wandb/latest-run").resolve() == kept[-1]
    steps = [[row["step"] for row in wandb_history(each) if "train/loss" in row] for each in wandb_records(run)]
    assert steps[1:] == [[8, 9, 10], [11, 12]]  # a kill loses what the package has not flushed
