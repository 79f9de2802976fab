"""Every option of every command, as frozen dataclasses: one field is one flag, one TOML key and one line of `--help`.

A command's configuration is a dataclass whose fields are either options or sections (dataclasses of options). Flags
are flat: `--lr` is `optimizer.lr`, and in a TOML file it stands as `lr` under `[optimizer]`. What cannot be is
refused in `__post_init__` by a `UsageError` that names the option; what needs the cache or a model to be judged is
refused by the stage that opens them. Nothing heavy is imported here, so that `--help` is instant.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kdtrain.errors import UsageError


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise UsageError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes sequences."""

    data: str | None = None
    """`stdlib`, a file or folder of txt, jsonl, parquet or arrow, or hf:NAME[:SUBSET]."""
    split: str = "train"
    """Which split of the data to read: train, validation or test."""
    seq_len: int = 512
    """Tokens in a sequence."""
    num_sequences: int | None = None
    """At most this many sequences; all there are when not given."""
    validation_sequences: int = 64
    """At most this many sequences of the validation split are kept beside train."""
    text_column: str = "text"
    """Column of jsonl, parquet, arrow or hub data that holds the text."""
    messages_column: str | None = None
    """Column that holds chat messages; only assistant turns are then learned."""
    document_mask: bool = False
    """Keep documents packed into one sequence from attending to each other."""
    streaming: bool = False
    """Stream hub data instead of downloading it first."""
    num_workers: int = 2
    """Processes that tokenise."""

    def __post_init__(self) -> None:
        _refuse(
            self.split not in ("train", "validation", "test"),
            f"--split '{self.split}' is unknown; use train, validation or test",
        )
        _refuse(self.seq_len < 1, f"--seq-len {self.seq_len} is too short; it must be at least 1")
        _refuse(
            self.num_sequences is not None and self.num_sequences < 1, "--num-sequences must be at least 1"
        )
        _refuse(self.validation_sequences < 1, "--validation-sequences must be at least 1")
        _refuse(self.num_workers < 0, "--num-workers must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """How a teacher's distribution is kept."""

    head: int = 16
    """The most likely entries of each distribution, kept exactly."""
    draws: int = 0
    """Samples from the rest of the vocabulary, kept with their counts (random-sampling distillation)."""
    dense: bool = False
    """Keep the whole distribution in fp16 instead; the reference, and large."""

    def __post_init__(self) -> None:
        _refuse(self.head < 0 or self.draws < 0, "--head and --draws must be 0 or more")
        _refuse(
            self.draws > 255,
            f"--draws {self.draws} is too many; counts are kept in 8 bits, so use at most 255",
        )
        _refuse(
            not self.dense and self.head + self.draws == 0,
            "--head 0 with --draws 0 keeps nothing; raise one of them or use --dense",
        )


@dataclass(frozen=True, kw_only=True)
class CacheTeacherConfig:
    """Run a teacher once over a data set and keep what it says in an HDF5 cache.

    The same command run again goes on where an interrupted one stopped.
    """

    teacher: str
    """A TOML of teachers/, a model folder, or a hub id."""
    out: Path
    """The folder of the cache."""
    config: Path | None = None
    """TOML file with the same options, grouped in sections; a flag wins over it."""
    batch_size: int = 16
    """Sequences in one forward of the teacher."""
    sequences_per_shard: int = 512
    """Sequences in one file of the cache; at most one file is lost when the command is killed."""
    precision: Literal["auto", "fp32", "bf16"] = "bf16"
    """Number format of the teacher's forward."""
    seed: int = 0
    """Seed of the draws."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""
    data: DataConfig = field(default_factory=DataConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)

    def __post_init__(self) -> None:
        _refuse(self.data.data is None, "--data is missing; give stdlib, a file, a folder or hf:NAME")
        _refuse(self.batch_size < 1, "--batch-size must be at least 1")
        _refuse(self.sequences_per_shard < 1, "--sequences-per-shard must be at least 1")

    def splits(self) -> dict[str, int | None]:
        """How many sequences of which split are cached; None is all there are."""
        return {"train": self.data.num_sequences, "validation": self.data.validation_sequences}


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """loss = (1 - alpha) * cross-entropy + alpha * T^2 * divergence, means over all unmasked tokens of a step."""

    alpha: float = 0.9
    """Weight of the divergence from the teacher against cross-entropy on the text, 0 to 1."""
    divergence: Literal["forward-kl"] = "forward-kl"
    """What is minimised between teacher and student."""
    tail: Literal["ghost", "drop", "renormalize"] = "ghost"
    """What stands for the vocabulary outside the kept entries: one bucket, nothing, or the head scaled to 1."""
    temperature: float = 2.0
    """Temperature T of both distributions; where a learnable one starts."""
    temperature_mode: Literal["fixed", "schedule", "adversarial", "likelihood", "minimize"] = "fixed"
    """How T moves: not, by a schedule, or learned by one of three rules (docs/temperature.md)."""
    temperature_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the schedule from --temperature to --temperature-end."""
    temperature_end: float = 1.0
    """Temperature at the end of the schedule."""
    temperature_min: float | None = None
    """Lower bound of a learnable T; the cache's own bound when not given."""
    temperature_max: float | None = None
    """Upper bound of a learnable T; the cache's own bound when not given."""
    temperature_lr: float = 1e-2
    """Peak learning rate of a learnable T; it follows the same schedule as --lr."""

    def __post_init__(self) -> None:
        _refuse(not 0 <= self.alpha <= 1, f"--alpha {self.alpha} is outside 0 to 1")
        for name in ("temperature", "temperature_end", "temperature_min", "temperature_max"):
            value = getattr(self, name)
            _refuse(
                value is not None and not 0 < value < float("inf"),
                f"--{name.replace('_', '-')} {value} must be above 0",
            )
        low, high = self.temperature_min, self.temperature_max
        _refuse(
            low is not None and high is not None and low >= high,
            f"--temperature-min {low} must be below --temperature-max {high}",
        )
        _refuse(self.temperature_lr <= 0, "--temperature-lr must be above 0")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 1e-6
    """Learning rate at the end of a decay."""
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd is constant until the last --decay-steps."""
    warmup_steps: int = 50
    """Steps of linear warm-up from 0."""
    decay_steps: int | None = None
    """Steps of decay at the end of wsd; a fifth of all steps when not given."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """Shape of the decay of wsd."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    weight_decay: float = 0.1
    """Decoupled weight decay; none on norms, biases, embeddings and the temperature."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        _refuse(not 0 < self.lr < float("inf"), f"--lr {self.lr} must be above 0")
        _refuse(
            not 0 <= self.min_lr <= self.lr, f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}"
        )
        _refuse(self.warmup_steps < 0, "--warmup-steps must be 0 or more")
        _refuse(self.decay_steps is not None and self.decay_steps < 1, "--decay-steps must be at least 1")
        _refuse(not all(0 <= beta < 1 for beta in self.betas), f"--betas {self.betas} must lie in [0, 1)")
        _refuse(self.weight_decay < 0 or self.clip < 0, "--weight-decay and --clip must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats and compilation."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Format of the student's matrix products; auto is bf16 where the device has it. Weights stay fp32."""
    compile: bool = True
    """Compile the student and the objective with torch.compile."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of torch.compile."""
    deterministic: bool = False
    """Refuse operations that are not bitwise repeatable on the device."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and going on."""

    checkpoint_freq: int = 250
    """Steps between checkpoints."""
    keep_rolling: int = 10
    """Newest checkpoints kept; the best one is kept besides."""
    resume: str = "auto"
    """auto, never, latest, best, or the name or path of a checkpoint."""
    auto_resume: bool = False
    """Never ask before going on with an earlier run."""
    overwrite: bool = False
    """With --resume never: move an earlier run in --out aside and start anew."""

    def __post_init__(self) -> None:
        _refuse(self.checkpoint_freq < 1, "--checkpoint-freq must be at least 1")
        _refuse(self.keep_rolling < 1, "--keep-rolling must be at least 1")


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What a run shows and writes about itself."""

    eval_freq: int = 250
    """Steps between validations."""
    eval_batches: int = 50
    """At most this many micro-batches in a validation."""
    log_freq: int = 10
    """Steps between plain lines in train.log."""
    tensorboard: bool = True
    """Write TensorBoard events into the run."""

    def __post_init__(self) -> None:
        for name in ("eval_freq", "eval_batches", "log_freq"):
            _refuse(getattr(self, name) < 1, f"--{name.replace('_', '-')} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Train a student from a cache, from an online teacher, or (with neither) by plain cross-entropy on text.

    The same command run again goes on from the newest valid checkpoint.
    """

    student: str
    """A TOML of students/, a model folder, or a hub id."""
    out: Path
    """The folder of the run."""
    cache: Path | None = None
    """A finished cache: the teacher's distributions and the tokens they belong to."""
    teacher: str | None = None
    """An online teacher instead of a cache: a TOML of teachers/, a model folder, or a hub id."""
    config: Path | None = None
    """TOML file with the same options, grouped in sections; a flag wins over it."""
    steps: int | None = None
    """Optimizer steps; 2,000 when neither this nor --epochs is given."""
    epochs: float | None = None
    """Passes over the training split, instead of --steps."""
    batch_size: int = 16
    """Sequences in an optimizer step; decides the result."""
    micro_batch_size: int | None = None
    """Sequences in one forward; decides the memory. The batch size must be a multiple of it."""
    seed: int = 0
    """Seed of the student's weights, the order of the data and dropout."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        _refuse(
            self.cache is not None and self.teacher is not None,
            "--cache and --teacher exclude each other; give one",
        )
        _refuse(
            self.cache is not None and self.data.data is not None,
            "--cache holds its own text; leave --data out",
        )
        _refuse(
            self.cache is None and self.data.data is None,
            "nothing to train on; give --cache FOLDER or --data SOURCE",
        )
        _refuse(
            self.steps is not None and self.epochs is not None,
            "--steps and --epochs exclude each other; give one",
        )
        _refuse(self.steps is not None and self.steps < 1, "--steps must be at least 1")
        _refuse(self.epochs is not None and self.epochs <= 0, "--epochs must be above 0")
        _refuse(self.batch_size < 1, "--batch-size must be at least 1")
        micro = self.micro_batch_size
        _refuse(micro is not None and micro < 1, "--micro-batch-size must be at least 1")
        _refuse(
            micro is not None and self.batch_size % micro != 0,
            f"--batch-size {self.batch_size} is no multiple of --micro-batch-size {micro}; accumulation must come out whole",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Measure a student: loss, perplexity, KL to the teacher, agreement, calibration, acceptance."""

    student: str
    """A run, a checkpoint, an exported model folder, a TOML or a hub id."""
    cache: Path | None = None
    """A finished cache; its validation split is used unless --split says train."""
    teacher: str | None = None
    """An online teacher instead: a TOML of teachers/, a model folder, or a hub id."""
    config: Path | None = None
    """TOML file with the same options, grouped in sections; a flag wins over it."""
    batch_size: int = 16
    """Sequences in one forward."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Number format of the forwards."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""
    data: DataConfig = field(default_factory=lambda: DataConfig(split="validation"))

    def __post_init__(self) -> None:
        _refuse(
            self.cache is not None and self.teacher is not None,
            "--cache and --teacher exclude each other; give one",
        )
        _refuse(
            self.cache is not None and self.data.data is not None,
            "--cache holds its own text; leave --data out",
        )
        _refuse(
            self.cache is None and self.data.data is None,
            "nothing to evaluate on; give --cache FOLDER or --data SOURCE",
        )
        _refuse(self.batch_size < 1, "--batch-size must be at least 1")


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show a cache, a run or a checkpoint as a table, or what this machine can do."""

    path: Path | None = None
    """A cache, a run or a checkpoint."""
    hardware: bool = False
    """Show devices, number formats and compilers of this machine instead."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __post_init__(self) -> None:
        _refuse(self.path is None and not self.hardware, "nothing to inspect; give a PATH or --hardware")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check every digest of a cache or a checkpoint; exit code 1 and the list of what is bad."""

    path: Path
    """A cache, a run or a checkpoint."""
    repair: bool = False
    """Drop the bad shards of a cache, so that cache-teacher builds them again."""
    json: bool = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained student as a folder that transformers.AutoModelForCausalLM loads."""

    run: Path
    """The folder of the run."""
    out: Path
    """The folder to write."""
    checkpoint: str = "best"
    """best, latest, or the name of a checkpoint."""
    overwrite: bool = False
    """Replace a folder that is already there."""
    json: bool = False
    """Print one JSON object on stdout."""


def sections(config: Any) -> dict[str, dict[str, Any]]:
    """The options of `config` by section, as plain values; options without a section stand under "run"."""
    result: dict[str, dict[str, Any]] = {"run": {}}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            result[each.name] = {
                inner.name: plain(getattr(value, inner.name)) for inner in dataclasses.fields(value)
            }
        else:
            result["run"][each.name] = plain(value)
    return result


def plain(value: Any) -> Any:
    """`value` as JSON and TOML know it: paths as text, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
