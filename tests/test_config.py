"""The options: their defaults, their sections, and the values that they refuse."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from kdtrain import cli
from kdtrain.config import commands
from kdtrain.config import sections as section_kinds
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig, EvaluateConfig, InspectConfig
from kdtrain.config.sections import (
    CheckpointConfig,
    CodecConfig,
    DataConfig,
    MonitorConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    QuantizationConfig,
)
from kdtrain.config.values import configured, fields_of, flag, option, refuse_value, sections
from kdtrain.errors import UsageError

PACKAGE = Path(section_kinds.__file__).parent
MODULES = (commands, section_kinds)
CLASSES = [*dict.fromkeys(each for module in MODULES for name, each in vars(module).items() if name.endswith("Config"))]


def distill(**changes):
    return DistillConfig(**{"student": "s", "out": Path("o"), "cache": Path("c"), **changes})


def flags(kind):
    """List every option of a command with its section."""
    return [(each.name, section) for section, each in fields_of(kind)]


@pytest.mark.parametrize("kind", [each.config for each in cli.COMMANDS.entries.values()], ids=cli.COMMANDS.entries)
def test_no_flag_of_a_command_means_two_options(kind):
    names = [name for name, _ in flags(kind)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_every_option_has_a_line_of_help(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            following = [*node.body[1:], None]
            for this, after in zip(node.body, following, strict=True):
                if isinstance(this, ast.AnnAssign) and not ast.unparse(this.annotation).endswith("Config"):
                    text = after.value.value if isinstance(after, ast.Expr) else ""
                    assert text and "\n" not in text, f"{node.name}.{ast.unparse(this.target)}"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_option_cannot_be_changed_or_given_by_position(kind):
    parameters = kind.__dataclass_params__
    assert parameters.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))


def test_the_defaults_are_those_of_the_design():
    config = distill()
    assert (config.batch_size, config.micro_batch_size, config.steps, config.seed) == (16, None, None, 0)
    rates = ("auto", "adamw", 1e-6, "cosine", 200, None, "cosine", (0.9, 0.95), 0.1, 1.0)
    assert dataclasses.astuple(config.optimizer) == rates
    objective = config.objective
    assert (objective.alpha, objective.divergence, objective.tail) == ("auto", "forward-kl", "ghost")
    assert (objective.temperature, objective.temperature_mode) == (1.0, "fixed")
    assert (config.monitor.eval_freq, config.monitor.eval_batches) == (250, 50)
    assert dataclasses.astuple(config.guards) == (10, "first", 3, 0.5, 3, 1.2)
    assert dataclasses.astuple(config.stopping) == (False, 250, 5, 0.01, 50, "decay", 1000.0)
    assert (config.checkpoint.checkpoint_freq, config.checkpoint.keep_rolling) == (250, 10)
    cache = CacheTeacherConfig(teacher="t", out=Path("o"), data=DataConfig(data="stdlib"))
    assert (cache.batch_size, cache.sequences_per_shard, cache.precision) == (16, 512, "auto")
    assert (cache.codec.top_k, cache.codec.samples, cache.codec.dense) == (0, 50, False)
    assert (cache.data.seq_len, cache.data.validation_sequences, cache.data.num_workers) == (512, 64, 2)


def test_a_cache_has_samples_where_nothing_else_is_asked_for():
    given = [{}, {"top_k": 12}, {"dense": True}, {"top_k": 8, "num_samples": 24}, {"num_samples": 9}]
    assert [CodecConfig(**each).samples for each in given] == [50, 0, 0, 24, 9]


def objective(mode, **more):
    return ObjectiveConfig(temperature_mode=mode, **more)


LEARNED = ("adversarial", "likelihood", "minimize")
TEXT = DataConfig(data="stdlib")
REFUSED = [
    (lambda: distill(cache=None), "--cache FOLDER or --data SOURCE"),
    (lambda: distill(data=TEXT), "--data"),
    (lambda: distill(teacher="t"), "--teacher"),
    (lambda: distill(cache=None, teacher="t"), "--data"),
    (lambda: distill(steps=1, epochs=1.0), "--epochs"),
    (lambda: distill(batch_size=8, micro_batch_size=3), "--batch-size 8 is not a multiple of --micro-batch-size 3"),
    (lambda: CacheTeacherConfig(teacher="t", out=Path("o")), "--data"),
    (lambda: EvaluateConfig(student="s"), "--cache"),
    (lambda: EvaluateConfig(student="s", cache=Path("c"), teacher="t"), "--teacher"),
    (lambda: EvaluateConfig(student="s", cache=Path("c"), data=TEXT), "--data"),
    (
        lambda: EvaluateConfig(student="s", teacher="t", data=dataclasses.replace(TEXT, validation_sequences=9)),
        "--validation-sequences has no effect on evaluate",
    ),
    (lambda: InspectConfig(), "--hardware"),
    (lambda: DataConfig(split="dev"), "--split 'dev': choose train, validation or test"),
    (lambda: CodecConfig(num_samples=256), "--num-samples 256"),
    (lambda: CodecConfig(top_k=0, num_samples=0), "--dense"),
    (lambda: ObjectiveConfig(temperature_min=2.0, temperature_max=2.0), "--temperature-min"),
    *((lambda mode=mode: objective(mode, divergence="logit-mse"), "does not depend on T") for mode in LEARNED),
    *((lambda mode=mode: objective(mode, alpha=0.0), "nothing to learn from at --alpha 0") for mode in LEARNED),
    (lambda: distill(cache=None, data=TEXT, objective=objective("likelihood")), "needs a teacher to learn T from"),
    (
        lambda: distill(cache=None, data=TEXT, objective=objective("fixed", hidden_loss="mse")),
        "--hidden-loss mse needs an online teacher",
    ),
    (lambda: ObjectiveConfig(hidden_weight=2.0), "--hidden-weight has no effect without --hidden-loss"),
    (lambda: ObjectiveConfig(hidden_layers="last"), "--hidden-layers has no effect without --hidden-loss"),
    (lambda: OptimizerConfig(lr=1e-7), "--min-lr"),
    (lambda: OptimizerConfig(betas=(0.9, 1.0)), "--betas"),
    (
        lambda: PrecisionConfig(compile=False, compile_mode="max-autotune"),
        "--compile-mode has no effect without --compile",
    ),
    (lambda: ParallelConfig(parallel="ddp", accumulate="sharded"), "--accumulate sharded has no effect"),
    (lambda: distill(precision=PrecisionConfig(precision="auto", tf32=True)), "--tf32 has no effect on"),
    (lambda: distill(precision=PrecisionConfig(precision="fp8", tf32=True)), "--tf32 has no effect on"),
    *(
        (lambda given=given: MonitorConfig(log_to=given), f"--log-to '{given}' {words}")
        for given, words in (
            ("", "has an empty name"),
            ("tensorboard,", "has an empty name"),
            (":x", "has an empty name"),
            ("none, tensorboard", "has none beside others"),
            ("none,none", "has none beside others"),
            ("tensorboard, tensorboard:x", "names a logger twice"),
        )
    ),
    (lambda: CheckpointConfig(override_opt_param_scheduler=True), "without --load; add it"),
    (lambda: QuantizationConfig(quant_rule="gap"), "--quant-rule has no effect without --time-resume"),
    (lambda: ObjectiveConfig(alpha=1.5), "--alpha 1.5 must be at least 0 and at most 1"),
    (lambda: OptimizerConfig(lr=float("inf")), "--lr inf must be above 0 and finite"),
    (lambda: DataConfig(seq_len=2**60), "beyond what can be counted; choose at most 2^53"),
    (lambda: configured(DistillConfig, None, {"cahce": "c"}), "unknown option 'cahce'; perhaps"),
    (lambda: configured(DistillConfig, None, {"lr": -1.0}), "--lr -1.0"),
    (lambda: configured(DistillConfig, None, {"cache": "c", "out": "o"}), "--student is missing"),
]


@pytest.mark.parametrize("make, words", REFUSED)
def test_an_impossible_value_is_refused_by_the_name_of_the_option(make, words):
    with pytest.raises(UsageError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_number_outside_of_its_bounds_is_refused_by_the_name_of_its_option(kind):
    for each in dataclasses.fields(kind):
        bounds = each.metadata
        wrong = [bounds["least"] - 1] if "least" in bounds else [bounds["above"]] if "above" in bounds else []
        wrong += [float("nan"), *([] if "most" in bounds else [float("inf")])] if wrong else []
        wrong += [bounds["most"] + 1] if bounds.get("most", float("inf")) < float("inf") else []
        for value in wrong:
            with pytest.raises(UsageError, match=f"^{flag(each.name)} {value} must be "):
                refuse_value(each, (value,) if bounds.get("several") else value)


@pytest.mark.parametrize("mode", LEARNED)
def test_a_learned_temperature_works_with_every_divergence_that_depends_on_it(mode):
    for divergence in ("forward-kl", "reverse-kl", "jsd", "skew-kl", "skew-reverse-kl", "tvd"):
        assert ObjectiveConfig(temperature_mode=mode, divergence=divergence).learns_temperature
    ObjectiveConfig(temperature_mode=mode, alpha=0.0, alpha_end=0.5, alpha_schedule="linear")
    for still in ("fixed", "schedule", "cosine"):
        assert not ObjectiveConfig(
            temperature_mode=still, temperature=2.0, divergence="logit-mse", alpha=0.0
        ).learns_temperature


def test_sections_are_plain_values_by_section():
    table = sections(distill(micro_batch_size=4, batch_size=8))
    assert list(table) == [
        *("run", "data", "objective", "optimizer", "lora", "precision", "quantization", "guards"),
        *("stopping", "checkpoint", "monitor", "parallel", "collect", "rounds", "server"),
    ]
    assert table["run"]["out"] == "o"
    assert table["run"]["epochs"] is None
    assert table["optimizer"]["betas"] == [0.9, 0.95]
    assert {(name, section) for section, inner in table.items() for name in inner} == set(flags(DistillConfig))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_option_has_only_attributes_that_are_explained(kind):
    explained = re.findall(r"^ {8}([\w, ]+):", option.__doc__, re.MULTILINE)
    known = {name for names in explained for name in names.split(", ")}
    assert {name for each in dataclasses.fields(kind) for name in each.metadata} - {"plugins"} <= known


def test_an_option_may_have_its_default_although_what_it_needs_is_missing():
    QuantizationConfig(quant_window_size=5)
    PrecisionConfig(compile=False, compile_mode="default")
    assert OptimizerConfig(clip=float("inf")).clip == float("inf")


def test_options_are_given_by_their_names_whatever_their_section():
    config = configured(DistillConfig, None, {"cache": "c", "student": "s", "out": "o", "lr": 3e-3, "compile": False})
    assert (config.optimizer.lr, config.precision.compile, config.cache) == (3e-3, False, ("c",))
    changed = configured(DistillConfig, config, {"lr": 1e-3})
    assert (changed.optimizer.lr, changed.precision.compile) == (1e-3, False)
