"""The plan: student and teacher whole or sharded, by what fits; what is refused, and what would help."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kdtrain.config.choices import TEACHERS
from kdtrain.config.commands import DistillConfig
from kdtrain.config.sections import LoraConfig, ParallelConfig
from kdtrain.errors import UsageError
from kdtrain.models.loading import configuration
from kdtrain.models.spec import ModelSpec
from kdtrain.parallel import tensor
from kdtrain.parallel.footprint import ModelFootprint
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.memory_plan import GIB, USABLE, Job, choose, estimated, plan_run, propose
from kdtrain.parallel.memory_plan import MemoryPlan as Plan
from kdtrain.precision.backends import FormatChoice, Torchao, TransformerEngine
from kdtrain.precision.emulated import FormatRecipe
from kdtrain.precision.formats import Formats
from kdtrain.precision.linear import Emulated
from kdtrain.precision.modes import compiles_teacher
from kdtrain.run.recipe import micro_batch
from kdtrain.tables import size
from kdtrain.testing import SHAPES


@dataclass(frozen=True)
class Model:
    name: str
    parameters: int
    layers: int = 10
    in_layers: int = 0
    width: int = 64
    vocabulary: int = 1000
    tied: bool = False
    kept: float = 10_000.0
    kept_by_checkpoints: float = 1_000.0
    kept_once: float = 0.0
    kept_once_by_checkpoints: float = 0.0
    weight_bytes: int = 4
    frozen: int = 0
    frozen_bytes: float = 4
    frozen_in_layers: int = 0
    frozen_head: bool = False
    packed: bool = False
    cut: int = 1

    @property
    def trained(self) -> int:
        return self.parameters - self.frozen


STUDENT = Model("small", 50_000_000, in_layers=49_000_000)
TEACHER = Model("large", 500_000_000, in_layers=490_000_000, weight_bytes=2)
JOB = Job(
    student=STUDENT, teacher=TEACHER, batch_size=16, micro_batch_size=None, seq_len=128, chunk_rows=128, compute_bytes=2
)
CACHED = replace(JOB, teacher=None)


def need(student: str, teacher: str, world: int = 4, job: Job = JOB) -> float:
    return estimated(Plan(student, teacher), job, world).total / USABLE  # type: ignore[arg-type]


def just(student: str, teacher: str, **other: Job) -> float:
    """Free memory in which this plan just fits."""
    return need(student, teacher, **other) + 1.0


LONG = replace(CACHED, seq_len=12_800)
BOTH = ParallelConfig()
ROWS = [
    # ranks, cached, options, free, student, teacher
    (1, False, BOTH, just("single", "replicate", world=1), "single", "replicate"),
    (1, True, BOTH, just("single", "none", world=1, job=CACHED), "single", "none"),
    (4, False, BOTH, just("ddp", "replicate"), "ddp", "replicate"),
    (4, False, BOTH, just("ddp", "replicate") - 2, "ddp", "fsdp"),
    (4, False, BOTH, just("ddp", "fsdp"), "ddp", "fsdp"),
    (4, False, BOTH, just("fsdp", "fsdp"), "fsdp", "fsdp"),
    (4, True, BOTH, just("ddp", "none", job=CACHED), "ddp", "none"),
    (4, True, BOTH, just("ddp", "none", job=CACHED) - 2, "fsdp", "none"),
    (4, False, ParallelConfig(parallel="fsdp"), 1e12, "fsdp", "replicate"),
    (4, False, ParallelConfig(parallel="fsdp", teacher_parallel="fsdp"), 1e12, "fsdp", "fsdp"),
    (4, False, ParallelConfig(teacher_parallel="fsdp"), 1e12, "ddp", "fsdp"),
    (4, False, ParallelConfig(parallel="ddp"), just("ddp", "fsdp"), "ddp", "fsdp"),
    (4, True, ParallelConfig(parallel="fsdp"), 1e12, "fsdp", "none"),
]


@pytest.mark.parametrize("world, cached, options, free, student, teacher", ROWS)
def test_the_first_plan_that_fits_is_taken_whole_copies_first(world, cached, options, free, student, teacher):
    plan = choose(options, world, online=not cached, job=CACHED if cached else JOB, free=free)
    assert (plan.student, plan.teacher) == (student, teacher)
    assert plan.total <= USABLE * free and plan.free == free
    assert plan.table()["GiB a rank"] == round(plan.total / GIB, 3)


def test_a_student_too_large_next_to_a_teacher_that_fits_is_sharded_alone():
    job = replace(JOB, student=TEACHER, teacher=STUDENT)
    free = just("fsdp", "replicate", job=job)
    assert free < need("ddp", "fsdp", job=job)
    plan = choose(BOTH, 4, online=True, job=job, free=free)
    assert (plan.student, plan.teacher) == ("fsdp", "replicate")


REFUSED = [
    # ranks, options, job, free, what the line says
    (4, BOTH, JOB, just("fsdp", "fsdp") - 2, ["small and its teacher large need", "each of 4 devices", "8 ranks"]),
    (4, ParallelConfig(parallel="ddp"), CACHED, 0.3 * GIB, ["--parallel auto", "student ddp"]),
    (4, ParallelConfig(teacher_parallel="replicate", parallel="ddp"), JOB, 1.4 * GIB, ["a cache (kdtrain cache-te"]),
    (1, BOTH, LONG, 1.9 * GIB, ["it would fit with --micro-batch-size 8", "the device"]),
    (1, BOTH, replace(CACHED, micro_batch_size=1, batch_size=1, seq_len=40_000), 0.85 * GIB, ["--activation-check"]),
    (1, BOTH, CACHED, 0.001 * GIB, ["take a smaller model, or larger devices"]),
]


@pytest.mark.parametrize("world, options, job, free, said", REFUSED)
def test_a_job_that_does_not_fit_is_refused_in_one_line_with_numbers_and_what_would_help(
    world, options, job, free, said
):
    with pytest.raises(UsageError) as caught:
        choose(options, world, online=job.teacher is not None, job=job, free=free)
    line = str(caught.value)
    assert "\n" not in line and f"{size(free / 2**20)} are free" in line
    assert [each for each in said if each not in line] == [], line


def test_the_ranks_that_share_a_copy_are_those_of_the_option_if_they_divide_all():
    for number in (3, 8):
        options = DistillConfig(student="s", out="o", cache="c", parallel=ParallelConfig(shard_size=number))
        with pytest.raises(UsageError, match=f"--shard-size {number} does not divide 4 ranks"):
            micro_batch(options, 4, None, None)
    assert choose(ParallelConfig(shard_size=2, parallel="fsdp"), 4, online=False).shard_size == 2


def test_without_sizes_or_free_memory_nothing_is_refused():
    assert choose(BOTH, 2, online=True) == Plan("ddp", "replicate")
    assert choose(BOTH, 2, online=False, job=CACHED, free=None).student == "ddp"


def test_the_parts_of_an_estimate_by_hand():
    p, tokens = STUDENT.parameters, 16 * 128
    plan = estimated(Plan("single", "none"), replace(CACHED, compute_bytes=4), 1)
    logits = 5 * 4 * 128 * 1000
    head = 4 * 1000 * 64 + 2 * 4 * tokens * 64 + logits
    assert plan.moment == "backward"
    assert plan.needs == {"weights and moments": 12 * p, "gradients": 4 * p, "activations": tokens * 10_000 / 10}
    longer = estimated(Plan("single", "none"), replace(LONG, compute_bytes=4), 1)
    assert longer.moment == "head"
    assert longer.needs["activations"] == 100 * tokens * 10_000
    assert longer.needs["output head"] == head + 99 * 2 * 4 * tokens * 64


def test_what_is_kept_once_counts_once_whatever_the_tokens_and_not_where_layers_are_gathered_in_bf16():
    weights = 2.0 * STUDENT.in_layers
    once = replace(LONG, student=replace(STUDENT, kept_once=weights + 5, kept_once_by_checkpoints=1e9))
    tokens = 16 * 12_800

    def activations(plan: Plan, job: Job, world: int = 1) -> float:
        return estimated(plan, job, world).needs["activations"]

    assert activations(Plan("single", "none"), once) == tokens * 10_000 + weights + 5
    assert activations(Plan("single", "none"), replace(once, activation_checkpointing=True)) == tokens * 1_000 + 1e9
    assert activations(Plan("fsdp", "none"), once, world=2) == tokens / 2 * 10_000 + 5
    assert activations(Plan("fsdp", "none"), replace(once, compute_bytes=4), 2) == tokens / 2 * 10_000 + weights + 5


def test_sharding_divides_the_state_and_accumulation_keeps_whole_gradients():
    p = STUDENT.parameters
    whole = estimated(Plan("fsdp", "none"), CACHED, 4)
    assert whole.needs["weights and moments"] == 12 * p / 4
    adds = estimated(Plan("fsdp", "none"), replace(CACHED, micro_batch_size=1), 4)
    assert adds.needs["gradients"] == 4 * p / 4 + 4 * p
    node = estimated(Plan("fsdp", "none", shard_size=2), CACHED, 4)
    assert node.needs["weights and moments"] == 12 * p / 2


def test_sharded_gradients_are_added_up_where_whole_ones_do_not_fit_or_where_they_are_asked_for():
    p, adds = STUDENT.parameters, replace(CACHED, micro_batch_size=1)
    sharded = estimated(Plan("fsdp", "none", accumulate="sharded"), adds, 4)
    assert sharded.needs["gradients"] == 4 * p / 4 + 4 * (p - STUDENT.in_layers + 2 * STUDENT.in_layers / 10)
    free = sharded.total / USABLE + 1
    assert choose(BOTH, 4, online=False, job=adds, free=free) == replace(sharded, needs={}, free=free)
    with pytest.raises(UsageError, match=r"it would fit with --accumulate auto, --parallel auto"):
        choose(ParallelConfig(accumulate="whole"), 4, online=False, job=adds, free=free)
    asked = choose(ParallelConfig(parallel="fsdp", accumulate="sharded"), 4, online=False, job=adds, free=1e12)
    assert asked.accumulate == "sharded" and asked.table()["gradients added up"] == "sharded"


def test_whole_gradients_count_with_the_activations_under_ddp_and_while_micro_batches_are_added_up():
    p = STUDENT.parameters
    held = {
        "one micro-batch": estimated(Plan("single", "none"), LONG, 1),
        "two": estimated(Plan("single", "none"), replace(LONG, micro_batch_size=8), 1),
        "DDP": estimated(Plan("ddp", "none"), LONG, 2),
        "FSDP": estimated(Plan("fsdp", "none"), LONG, 2),
        "FSDP, two": estimated(Plan("fsdp", "none"), replace(LONG, micro_batch_size=4), 2),
        "FSDP, sharded": estimated(Plan("fsdp", "none", accumulate="sharded"), replace(LONG, micro_batch_size=4), 2),
    }
    assert {plan.moment for plan in held.values()} == {"head"}
    assert {name: plan.needs.get("gradients", 0.0) for name, plan in held.items()} == {
        **{"one micro-batch": 0.0, "two": 4 * p, "DDP": 4 * p, "FSDP": 0.0, "FSDP, two": 4 * p, "FSDP, sharded": 2 * p}
    }


@pytest.mark.parametrize("job", [CACHED, LONG])
def test_on_a_cpu_the_copy_that_a_save_leaves_for_the_next_one_counts_all_the_time(job):
    without, copied = (estimated(Plan("single", "none"), replace(job, copies=each), 1) for each in (False, True))
    assert copied.needs == without.needs | {"copy for the save": 12 * STUDENT.parameters}
    assert copied.moment == without.moment
    halves = estimated(Plan("fsdp", "none"), replace(job, copies=True), 2)
    assert halves.needs["copy for the save"] == 6 * STUDENT.parameters


@pytest.mark.parametrize("student, world", [("single", 1), ("ddp", 4), ("fsdp", 4)])
def test_weights_that_are_not_trained_need_no_moments_gradients_or_copies(student, world):
    shared = 4 if student == "fsdp" else 1
    part = replace(STUDENT, frozen=48_000_000, frozen_in_layers=47_500_000, frozen_head=True)
    job = replace(CACHED, copies=True, snapshots=2, student=part)
    needs = estimated(Plan(student, "none"), job, world).needs
    assert needs["weights and moments"] == (4 * 50e6 + 8 * 2e6) / shared
    assert needs["snapshots"] == 2 * 12 * 2e6 / shared
    whole = estimated(Plan(student, "none"), replace(job, student=STUDENT), world)
    assert sum(needs.values()) < whole.total / 2


def test_packed_weights_count_by_their_bytes_and_are_never_sharded():
    part = replace(STUDENT, frozen=48_000_000, frozen_bytes=1.1, packed=True)
    job = replace(JOB, student=part, teacher=replace(TEACHER, packed=True))
    needs = estimated(Plan("ddp", "replicate"), job, 4).needs
    assert needs["weights and moments"] == pytest.approx(12 * 2e6 + 1.1 * 48e6)
    found = choose(ParallelConfig(), 4, online=True, job=job, free=1e12)
    assert (found.student, found.teacher) == ("ddp", "replicate")
    with pytest.raises(UsageError, match="student ddp, teacher replicate"):
        choose(ParallelConfig(), 4, online=True, job=job, free=1e8)


NO_CHOICE = type("Formats", (), {"choice": None})()
OWN_SCALES = Formats("bf16", FormatChoice("fp8", "transformer-engine", TransformerEngine(FormatRecipe("mx")), True, ""))
QUANTISED = Formats("bf16", FormatChoice("mxfp8", "emulated", Emulated(FormatRecipe("mx")), True, ""))


@pytest.mark.parametrize(
    "shape, changes, size, words",
    [
        ("gpt2", {}, 2, "has no plan for s (gpt2)"),
        ("llama", {}, 8, "does not divide num_attention_heads = 4 of s; choose 2, 4"),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24}, 2, "= 3 of s; use --para"),
        ("llama", {"num_key_value_heads": 1, "head_dim": 3}, 2, "not divide num_key_value_heads = 1"),
        ("llama", {"intermediate_size": 63}, 2, "intermediate_size = 63"),
        ("llama", {"vocab_size": 1}, 2, "none of the 1 tokens"),
        ("llama", {"model_type": "olmo2"}, 2, "the style colwise_gather_output"),
        ("llama", {"model_type": "mixtral", "num_local_experts": 2}, 2, "the style moe_tp_experts"),
    ],
)
def test_a_student_that_tensor_ranks_cannot_cut_is_refused_by_what_they_can(shape, changes, size, words):
    spec = ModelSpec(name="s", config=SHAPES[shape] | changes, init="scratch")
    given = DistillConfig(cache=("c",), student="s", out=Path("o"), parallel=ParallelConfig(tensor_parallel=size))
    with pytest.raises(UsageError) as caught:
        tensor.refuse_with(given, spec, 1 if "vocab_size" in changes else 300, None, NO_CHOICE)
    assert words in str(caught.value) and "--tensor-parallel" in str(caught.value)


def test_a_rank_whose_rows_of_a_padded_head_are_no_tokens_is_refused():
    config = configuration(ModelSpec(name="s", config=SHAPES["llama"], init="scratch"), 600)
    assert tensor.refuse_plan(config, "s", 2, 301)
    with pytest.raises(UsageError, match="a rank would have none of the 300 tokens of s"):
        tensor.refuse_plan(config, "s", 2, 300)


@pytest.mark.parametrize("library, found", [("torch", "2.10.1+cu128"), ("transformers", "5.16.2")])
def test_releases_whose_plans_are_too_old_are_refused_with_their_version(monkeypatch, library, found):
    installed = {"torch": "2.11.0", "transformers": "5.17.0"}
    monkeypatch.setattr(tensor.metadata, "version", lambda name: installed[name])
    config = configuration(ModelSpec(name="s", config=SHAPES["llama"], init="scratch"), 300)
    assert tensor.refuse_plan(config, "s", 2, 300)
    installed[library] = found
    with pytest.raises(
        UsageError, match=rf"needs {library} \S+ or newer, and {re.escape(found)} is installed; upgrade"
    ):
        tensor.refuse_plan(config, "s", 2, 300)


@pytest.mark.parametrize(
    "spec, formats, words",
    [
        ({}, OWN_SCALES, "--fp8-backend transformer-engine"),
        ({"lora": LoraConfig(lora_rank=4)}, QUANTISED, "--lora-rank"),
    ],
)
def test_formats_that_tensor_ranks_are_not_made_for_are_refused_by_name(spec, formats, words):
    student = ModelSpec(name="s", config=SHAPES["llama"], init="scratch", **spec)
    given = DistillConfig(cache=("c",), student="s", out=Path("o"), parallel=ParallelConfig(tensor_parallel=2))
    with pytest.raises(UsageError, match=f"^--tensor-parallel 2 cannot be used with .*{words}"):
        tensor.refuse_with(given, student, 300, None, formats)


@pytest.mark.parametrize(
    "mode, backend, size, words",
    [
        (
            "mxfp8",
            Emulated(FormatRecipe("mx")),
            4,
            r"the 64 numbers of layers.\*.self_attn.q_proj .* 32, .*; choose 2, or",
        ),
        ("fp8", Emulated(FormatRecipe("blockwise")), 2, "128, as fp8 needs; use --parallel fsdp"),
        ("fp8", Torchao(FormatRecipe("tensorwise")), 4, None),
        ("fp8", Emulated(FormatRecipe("rowwise")), 4, None),
    ],
)
def test_a_block_that_would_reach_over_a_cut_is_refused_with_the_numbers_of_ranks_that_cut_between_blocks(
    mode, backend, size, words
):
    config = SHAPES["llama"] | {"num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 256}
    student, parallel = ModelSpec(name="s", config=config, init="scratch"), ParallelConfig(tensor_parallel=size)
    given = DistillConfig(cache=("c",), student="s", out=Path("o"), parallel=parallel)
    formats = Formats("bf16", FormatChoice(mode, "emulated", backend, False, ""))
    if words is None:
        tensor.refuse_with(given, student, 300, None, formats)
    else:
        with pytest.raises(UsageError, match=f"^--tensor-parallel {size} cuts .*{words}"):
            tensor.refuse_with(given, student, 300, None, formats)


@pytest.mark.parametrize(
    "name, spec, words",
    [
        ("local", {"config": SHAPES["gpt2"]}, r"transformers 5\S* has no plan for t .gpt2.*; use --teacher-parallel"),
        ("local", {"config": SHAPES["llama"] | {"intermediate_size": 63}}, "not divide intermediate_size = 63 of t"),
        ("local", {"config": SHAPES["llama"], "weights": "int8"}, "cannot cut --teacher-weights int8"),
        ("self", {"config": SHAPES["llama"]}, "cannot cut --teacher self"),
    ],
)
def test_a_teacher_that_tensor_ranks_cannot_cut_is_refused_before_it_is_loaded(name, spec, words):
    spec["config"] = spec["config"] | {"vocab_size": 300}
    teacher = TEACHERS.get(name)(ModelSpec(name="t", init="scratch", **spec), torch.device("cpu"), "fp32")
    with pytest.raises(UsageError, match=f"^--teacher-tensor-parallel.*{words}"):
        teacher.cut(RankLayout(tensor_size=2), alike=1)


def test_a_teacher_of_tensor_ranks_is_planned_in_parts_but_for_its_output_head():
    config = SHAPES["llama"] | {"vocab_size": 300, "tie_word_embeddings": False}
    spec = ModelSpec(name="t", init="scratch", config=config)
    whole, cut = (TEACHERS.get("local")(spec, torch.device("cpu"), "fp32") for _ in range(2))
    cut.cut(RankLayout(tensor_size=2), alike=1)
    one, half = (each.footprint(16) for each in (whole, cut))
    assert (half.parameters, half.vocabulary, half.cut) == (one.parameters / 2, 300, 2)
    held = [
        estimated(Plan("ddp", "replicate"), replace(JOB, teacher=each), 2).needs["teacher"] - 4 * 16 / 2 * 128 * 32
        for each in (one, half)
    ]
    assert held == [4 * one.parameters, 4 * one.parameters / 2 + 4 * 300 * 32]


def test_the_layers_of_a_teacher_that_is_cut_are_not_compiled_and_the_log_has_why(caplog):
    caplog.set_level("INFO", "kdtrain")
    assert compiles_teacher(True, torch.device("cuda")) and not caplog.text
    assert not compiles_teacher(True, torch.device("cuda"), cut=True)
    assert "the teacher is not compiled: torch.compile fails on the parts of tensor ranks" in caplog.text


@pytest.mark.parametrize(
    "parallel, words",
    [
        ({"teacher_tensor_parallel": 2}, "has no effect without an online teacher"),
        ({"teacher_tensor_parallel": 2, "tensor_parallel": 3}, "one must divide the other"),
        ({"teacher_tensor_parallel": 2, "teacher_parallel": "fsdp"}, "leave --teacher-parallel fsdp out"),
    ],
)
def test_tensor_ranks_of_a_teacher_that_cannot_be_are_refused(parallel, words):
    with pytest.raises(UsageError, match=words):
        DistillConfig(cache=("c",), student="s", out=Path("o"), parallel=ParallelConfig(**parallel))


def test_a_part_of_a_model_is_what_a_tensor_rank_has_of_it():
    whole = ModelFootprint(
        name="m", parameters=1000, layers=2, in_layers=800, width=8, vocabulary=101, tied=False, kept=100.0
    )
    assert (whole.part(4, 16.0).parameters, whole.part(4, 16.0).vocabulary) == (250, 26)
    assert whole.part(4, 16.0).kept == 32 + (100 - 32) / 4  # of both layers all positions
    assert whole.part(4, None).kept == 100


FOOTPRINT = ModelFootprint(
    **{"name": "m", "parameters": 50_000_000, "layers": 10, "in_layers": 49_000_000, "width": 64},
    **{"vocabulary": 1000, "tied": False, "kept": 10_000.0},
)


def test_the_plan_says_which_part_does_not_fall_with_tensor_ranks():
    job = replace(LONG, student=FOOTPRINT)
    plans = {ranks: estimated(Plan("single", "none"), job.cut(ranks, rows=True), 1) for ranks in (2, 4, 8)}
    stays, tokens = plans[2].stays, 16 * 12_800
    # of each layer what its two blocks take in, in 16 bits
    assert stays["activations"] == pytest.approx(tokens * 10 * 2 * 64 * 2)
    assert stays["output head"] == pytest.approx(tokens * 2 * 2 * 64, rel=1e-4), "hidden states and theirs"
    for ranks, plan in plans.items():
        assert plan.stays == stays and plan.moment == "head"
        for name, each in plan.needs.items():
            falls = plans[2].needs[name] - stays[name]
            assert each - stays[name] == pytest.approx(falls * 2 / ranks, rel=1e-3, abs=1e5), name
    shown = plans[4].table()["of it, whatever the tensor ranks"]
    assert shown == {name: round(stays[name] / GIB, 3) for name in ("activations", "output head")}
    whole = estimated(Plan("single", "none"), job.cut(2, rows=False), 1)
    assert whole.stays["activations"] == tokens * 10_000, "rows that are not cut keep all activations on each rank"


PROPOSING = replace(CACHED, student=FOOTPRINT, micro_batch_size=1)


def test_the_ranks_that_would_help_are_counted_with_their_tensor_ranks():
    cut, options = PROPOSING.cut(8, rows=False), ParallelConfig(tensor_parallel=8)
    with pytest.raises(UsageError, match=r"on each of 8 devices .* it would fit with 16 ranks$"):
        choose(options, 1, online=False, job=cut, free=need("fsdp", "none", 2, cut) + 1)


@pytest.mark.parametrize(
    "share, world, able, found",
    [
        (1.001, 8, range(9), ""),
        (0.9, 8, range(9), "--tensor-parallel 2 (no rank has room for a whole copy; the ranks of a node cut it first)"),
        (0.4, 8, range(9), "--tensor-parallel 4 (no rank has room"),
        (0.1, 16, range(9), "--tensor-parallel 8 --parallel fsdp (no rank has room"),
        (0.4, 8, [2], "--tensor-parallel 2 --parallel fsdp (no rank has room"),
        (0.4, 8, [], ""),
        (0.001, 8, range(9), ""),
    ],
)
def test_where_a_copy_does_not_fit_tensor_ranks_of_a_node_are_proposed_first_and_then_sharded_parts(
    share, world, able, found, monkeypatch
):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    given = DistillConfig(cache=("c",), student="s", out=Path("o"), dry_run=True, world_size=world)
    room, job = share * need("ddp", "none", world, PROPOSING), PROPOSING
    text = propose(given, job, room, lambda ranks: ranks in able)
    assert text.startswith(found) and bool(text) == bool(found), text
    if share > 0.2 and found:
        plan = plan_run(given, job, room, lambda ranks: ranks in able)
        assert plan.student == "fsdp" and plan.table()["proposed"] == text
    elif found:
        with pytest.raises(UsageError, match=f"it would fit with {re.escape(text)}; or with 64 ranks"):
            plan_run(given, job, room, lambda ranks: ranks in able)
    for options in ({"parallel": "fsdp"}, {"tensor_parallel": 2}):
        other = replace(given, parallel=ParallelConfig(**options))
        assert "proposed" not in plan_run(other, job, 1e12, lambda _: True).table()
