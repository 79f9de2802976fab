"""The sections of options, one dataclass each; several commands share some."""

import dataclasses
import importlib.util
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kdtrain.config.choices import (
    BACKENDS,
    DIVERGENCES,
    IGNORES_T,
    LEARNS,
    LOGGERS,
    OBSERVERS,
    OPTIMIZERS,
    SCHEDULED,
    TAILS,
    TEMPERATURES,
)
from kdtrain.config.values import Conflicts, Options, flag, option, refuse
from kdtrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DataConfig(Options):
    """Where text comes from and how it becomes sequences."""

    data: str | None = option(None, once=True, reads="text", brief=True)
    """A file or folder, or a source; files are txt, md, py, jsonl, csv, parquet, ..., sources are listed below."""
    split: Literal["train", "validation", "test"] = "train"
    """Which split of the data to read."""
    seq_len: int = option(512, least=1, brief=True)
    """Tokens in a sequence."""
    num_sequences: int | None = option(None, least=1, brief=True)
    """At most this many sequences, all if not given."""
    validation_sequences: int = option(64, least=1)
    """At most this many sequences in the validation split."""
    format: Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion"] = option("auto", brief=True)
    """What a row is; by its columns if auto, and it decides which tokens are learned (docs/data.md)."""
    text_column: str = "text"
    """Column of rows that holds the text."""
    messages_column: str | None = None
    """Column of conversations, lists of messages."""
    parse_special_tokens: bool = False
    """Take a special token that the text spells, such as <|im_end|>, for the token, and not for text."""
    document_mask: bool | Literal["auto"] = option("auto", free=True)
    """Keep documents of one sequence from attending to each other; auto: conversations, where the models can."""
    streaming: bool = option(False, free=True)
    """Stream hub data instead of downloading it first."""
    num_workers: int = option(2, free=True, per_rank=True, least=0, with_cache=True)
    """Tokenizer threads."""

    def conflicts(self) -> Conflicts:
        idle = f"has no effect with --format {self.format}; leave one of them out"
        conversations = self.format in ("auto", "messages", "sharegpt")
        yield self.messages_column is not None and not conversations, f"--messages-column {idle}"
        yield self.text_column != "text" and self.format not in ("auto", "text"), f"--text-column {idle}"

    def conflicts_in_training(self) -> Conflicts:
        """Yield the conflict of a run that would train on the validation split."""
        yield self.split == "validation", "--split validation would train on the validation data; use train or test"

    def conflicts_with(self, cache: str) -> Conflicts:
        """Yield the conflicts of options of the text with the option `cache`, whose cache holds the text."""
        for each in dataclasses.fields(self):
            changed = getattr(self, each.name) != each.default and not each.metadata.get("with_cache")
            yield changed, f"{flag(each.name)} has no effect with {cache}, which holds its text; leave it out"

    @property
    def limits(self) -> dict[str, int | None]:
        """How many sequences of each split are packed or cached; None for all."""
        return {"train": self.num_sequences, "validation": self.validation_sequences}

    def sources(self, limits: Mapping[str, int | None]) -> dict[str, str]:
        """Return the split of the data for each of `limits`: a cache calls the requested one train, adds validation."""
        second = "validation" if "train" in limits else self.split
        return {name: {"train": self.split, "validation": second}[name] for name in limits}


DEFAULT_PROMPT = 64
"""Tokens of a prompt, by default, or half of a sequence where that is less."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Options):
    """Text that the teacher writes: it continues prompts of the data, and is cached with its distributions."""

    generate: bool = option(False, brief=True)
    """Let the teacher continue prompts of the data; what it writes is cached with its distributions, in one pass."""
    prompt_tokens: int | None = option(None, least=1, needs="generate")
    """First tokens of plain text that are its prompt; by default 64, or half of --seq-len where that is less."""
    max_new_tokens: int | None = option(None, least=1, needs="generate")
    """Tokens that the teacher writes at most; by default as many as fit into a sequence behind its prompt."""
    gen_temperature: float = option(1.0, least=0, most=100, needs="generate")
    """The temperature at which it writes; 0 always takes the most likely token."""
    gen_top_p: float = option(1.0, above=0, most=1, needs="generate")
    """Draw from the most likely tokens that have this probability together, and never from the others."""


DEFAULT_SAMPLES = 50
"""Samples a token by default: docs/quality.md."""


@dataclass(frozen=True, kw_only=True)
class CodecConfig(Options):
    """How a teacher's distribution is stored."""

    top_k: int = option(0, least=0, brief=True)
    """The most likely entries, stored exactly; of each distribution, without them the cache serves T = 1 only."""
    num_samples: int | None = option(None, least=0, brief=True)
    """Samples from the rest; 50 without --top-k, else none, stored with their counts (random-sampling distillation)."""
    dense: bool = option(False, brief=True)
    """Store the whole distribution instead; in fp16, the reference, and large."""

    def conflicts(self) -> Conflicts:
        many = f"--num-samples {self.num_samples} is too many; counts are kept in 8 bits, so use at most 255"
        yield self.samples > 255, many
        some = self.top_k + (self.num_samples or 0) > 0
        yield self.dense and some, "--dense stores every entry; leave --top-k and --num-samples out"
        nothing = not self.dense and self.top_k + self.samples == 0
        yield nothing, "--top-k 0 with --num-samples 0 stores nothing; raise one or use --dense"

    @property
    def samples(self) -> int:
        """Samples a token: as given, or the default."""
        if self.num_samples is not None:
            return self.num_samples
        return 0 if self.top_k or self.dense else DEFAULT_SAMPLES


_ESTIMATORS = {
    "k1": "its mean gradient is 0: the ratio alone is not a loss; use sampled-reverse-kl",
    "k3": "its mean gradient is that of the forward KL, with the noise of one draw; use forward-kl",
}
"""Estimates of the reverse KL from tokens that the student drew, which others differentiate, and why not here."""


def _check_divergence(given: str) -> None:
    name, colon, _ = given.partition(":")
    for estimate, why in _ESTIMATORS.items():
        refuse(name == estimate, f"--divergence {name} is no loss: {why}")
    DIVERGENCES.check(name)
    if colon:
        DIVERGENCES.get(name).number(given)


FIXED_ALPHA = 0.9
"""The most that auto takes, and what stands for it where nothing is measured, or at the start of a schedule."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Options):
    """loss = (1 - alpha) * cross-entropy + alpha * T^2 * divergence, means over all unmasked tokens of a step."""

    alpha: float | Literal["auto"] = option("auto", least=0, most=1, alone="alpha_schedule", brief=True)
    """Weight of the divergence from the teacher; 0 to 1 or auto, by withheld text; cross-entropy has the rest."""
    alpha_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How alpha changes from --alpha, by default 0.9, at the first step to --alpha-end at the last."""
    alpha_end: float = option(0.0, needs="alpha_schedule", least=0, most=1)
    """Alpha at the end of its schedule."""
    divergence: str = option("forward-kl", check=_check_divergence, brief=True)
    """What is minimised; NAME or NAME:NUMBER, listed below (docs/objective.md)."""
    tail: str = option("ghost", check=TAILS.check, brief=True)
    """What replaces other entries; those that the cache does not hold, by a rule listed below."""
    temperature: float = option(1.0, above=0, brief=True)
    """Temperature T of both distributions; the start of a learnable T."""
    temperature_mode: str = option("fixed", check=TEMPERATURES.check, brief=True)
    """How T changes; listed below (docs/temperature.md)."""
    temperature_end: float = option(1.0, above=0)
    """Temperature at the end of the schedule."""
    temperature_min: float | None = option(None, above=0)
    """Lower bound of a learnable T; the cache's bound if not given."""
    temperature_max: float | None = option(None, above=0)
    """Upper bound of a learnable T; the cache's bound if not given."""
    temperature_lr: float = option(1e-2, above=0)
    """Peak learning rate of a learnable T; it follows the same schedule as --lr."""
    hidden_loss: Literal["none", "mse", "cosine"] = "none"
    """Also compare hidden states with an online teacher's, through learned projections (docs/objective.md)."""
    hidden_weight: float = option(1.0, needs="hidden_loss", above=0)
    """Weight of the hidden-state loss, which is added to cross-entropy and divergence."""
    hidden_layers: str = option("even", needs="hidden_loss")
    """Layers to compare: even (spread over the teacher's depth), last, or STUDENT:TEACHER pairs such as 2:3,4:6."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha_schedule != "constant":
            object.__setattr__(self, "alpha", self.first_alpha)

    def conflicts(self) -> Conflicts:
        low, high, start, end = self.temperature_min, self.temperature_max, self.temperature, self.temperature_end
        divergence = self.divergence.partition(":")[0]
        mode = f"--temperature-mode {self.temperature_mode}"
        crossed = low is not None and high is not None and low >= high
        yield crossed, f"--temperature-min {low} must be below --temperature-max {high}"
        other = f"{mode} goes from {start:g} to {end:g}; give another --temperature or --temperature-end"
        yield self.schedules_temperature and start == end, other
        nothing = f"{mode} has nothing to learn from at --alpha 0, where the loss has no divergence; raise --alpha"
        yield self.learns_temperature and not self.distils, nothing
        yield (
            self.learns_temperature and DIVERGENCES.has(divergence, IGNORES_T),
            f"{mode} cannot be used with --divergence {divergence}, whose loss does not depend on T; "
            "use --temperature-mode fixed, or another --divergence",
        )

    @property
    def learns_temperature(self) -> bool:
        """True if T is a parameter."""
        return TEMPERATURES.has(self.temperature_mode, LEARNS)

    @property
    def schedules_temperature(self) -> bool:
        """True if T goes from --temperature to --temperature-end."""
        return TEMPERATURES.has(self.temperature_mode, SCHEDULED)

    @property
    def distils(self) -> bool:
        """True if the divergence has a weight above 0 at any step."""
        return self.first_alpha > 0 or (self.alpha_schedule != "constant" and self.alpha_end > 0)

    @property
    def first_alpha(self) -> float:
        """Alpha before the first step; for `auto`, its value before anything is measured."""
        return FIXED_ALPHA if self.alpha == "auto" else self.alpha


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Options):
    """The optimizer and the learning-rate schedule."""

    lr: float | Literal["auto"] = option("auto", above=0, brief=True)
    """Peak learning rate; auto takes it by size for fresh weights, pretrained ones and adapters; find-lr finds it."""
    optimizer: str = option("adamw", check=OPTIMIZERS.check, later=True)
    """What updates the weights: adamw, or the name of a package's."""
    min_lr: float = option(1e-6, least=0)
    """Learning rate at the end of a decay."""
    lr_schedule: Literal["cosine", "wsd", "constant"] = option("cosine", brief=True)
    """Shape after warm-up; wsd is constant until the last --decay-steps."""
    warmup_steps: int = option(200, least=0)
    """Steps of linear warm-up from 0; at most half of the run."""
    decay_steps: int | None = option(None, least=1)
    """Steps of decay at the end of wsd; a fifth of all steps if not given."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """Shape of the decay of wsd."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    weight_decay: float = option(0.1, least=0)
    """Decoupled weight decay; none on norms, biases, embeddings and the temperature."""
    clip: float = option(1.0, least=0, most=math.inf)
    """Largest gradient norm; 0 disables clipping."""

    def conflicts(self) -> Conflicts:
        most = math.inf if isinstance(self.lr, str) else self.lr
        yield not 0 <= self.min_lr <= most, f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}"
        yield not all(0 <= beta < 1 for beta in self.betas), f"--betas {self.betas} must lie in [0, 1)"

    @property
    def peak_lr(self) -> float:
        """`lr` as the number that it is in a resolved run."""
        assert not isinstance(self.lr, str), "the run is not resolved"
        return self.lr


ALL_LINEAR = "all-linear"
_NAMES = re.compile(r"[\w.,-]+")
"""What is a list of names; anything else is a regular expression."""
_LONGEST = 10_000


def _check_targets(given: str) -> None:
    if given != ALL_LINEAR and not _NAMES.fullmatch(given):  # many names take long to compile
        refuse(len(given) > _LONGEST, f"--lora-targets is a regular expression of over {_LONGEST} characters")
        try:
            re.compile(given)
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(
                f"--lora-targets '{given[:200]}' is neither names nor a regular expression: {error}"
            ) from None
    refuse(not all(given.split(",")), f"--lora-targets '{given}' has an empty name; join names with single commas")


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Options):
    """Train low-rank adapters (LoRA, by peft) beside frozen weights; also a table [lora] in the student's spec."""

    lora_rank: int | None = option(None, least=1, brief=True)
    """Rank of the adapters, which alone are trained; by default that of the spec, or all weights are trained."""
    lora_alpha: float | None = option(None, above=0)
    """An adapter's product is scaled by alpha / rank; 32 if not given, at which the best rate hardly depends on it."""
    lora_dropout: float | None = option(None, least=0, most=0.99)
    """Dropout on what goes into an adapter; none if not given."""
    lora_targets: str | None = option(None, check=_check_targets)
    """Layers with an adapter: all-linear if not given, names joined with commas, or a regular expression."""
    lora_layers: int | None = option(None, least=1)
    """Only the last so many transformer layers have adapters; all if not given."""
    lora_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rank-stabilised LoRA, arXiv 2312.03732)."""
    lora_dora: bool = False
    """Also learn the length of each row of the adapted weights (DoRA, arXiv 2402.09353); slower."""

    @property
    def lora_pattern(self) -> str | None:
        """The regular expression of `lora_targets`; None for names, or for all layers."""
        targets = self.lora_targets or ALL_LINEAR
        return None if targets == ALL_LINEAR or _NAMES.fullmatch(targets) else targets

    @property
    def lora_names(self) -> list[str] | None:
        """The names of `lora_targets`; None for a regular expression, or for all layers."""
        targets = self.lora_targets or ALL_LINEAR
        return None if targets == ALL_LINEAR or self.lora_pattern else targets.split(",")

    def over(self, spec: "LoraConfig | None" = None) -> "LoraConfig | None":
        """Return the adapters of a run, with every value: `spec`, with the values given here; None without any.

        UsageError: an option is given, and no rank.
        """
        given = {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, False)}
        if spec is None and self.lora_rank is None:
            for name in sorted(given):
                raise UsageError(f"{flag(name)} has no effect without --lora-rank; add it, or leave {flag(name)} out")
            return None
        usual: dict[str, Any] = {"lora_alpha": 32.0, "lora_dropout": 0.0, "lora_targets": ALL_LINEAR}
        own = {} if spec is None else dataclasses.asdict(spec)
        return LoraConfig(**usual | {name: value for name, value in own.items() if value is not None} | given)

    def __str__(self) -> str:
        kind = "DoRA" if self.lora_dora else "LoRA"
        where = "" if self.lora_layers is None else f" of the last {self.lora_layers} layers"
        targets = self.lora_targets or ALL_LINEAR
        targets = targets if len(targets) < 60 else f"{len(targets.split(','))} layers"
        root = "sqrt(rank)" if self.lora_rslora else "rank"
        return f"{kind} of rank {self.lora_rank} (alpha {self.lora_alpha or 32:g} / {root}) on {targets}{where}"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Options):
    """Saving and resuming."""

    checkpoint_freq: int = option(250, free=True, least=1, brief=True)
    """Steps between checkpoints."""
    checkpoint_minutes: float = option(10.0, free=True, least=0)
    """Minutes without a checkpoint after which one is saved anyway; 0 disables. Rollbacks do not use these."""
    keep_rolling: int = option(10, free=True, least=1)
    """How many of the newest --checkpoint-freq checkpoints are kept; the best one always is."""
    keep_epochs: int = option(5, free=True, least=1)
    """How many of the newest end-of-epoch checkpoints are kept."""
    keep_special: int = option(3, free=True, least=1)
    """How many of the newest other checkpoints are kept: interruptions, rollbacks, changes of precision."""
    disk_patience: int = option(10, free=True, least=0)
    """Minutes that a save waits for space on a full disk, after old checkpoints are removed, before the run ends."""
    async_save: bool = option(True, free=True)
    """Write checkpoints in the background; takes as much memory again as weights and optimizer state."""
    resume: str = option("auto", free=True, reads="checkpoint")
    """auto (a terminal has to confirm it), latest (never asks), never, best, or the name or path of a checkpoint."""
    overwrite: bool = option(False, free=True)
    """With --resume never: move an earlier run in --out aside and start a new one."""
    load: Path | None = option(None, once=True, reads="saved", brief=True)
    """Start from a run, a checkpoint or a model folder; from the first two with moments, T and position in the data."""
    override_opt_param_scheduler: bool = option(False, needs="load")
    """With --load: start the learning-rate schedule at step 0 instead of continuing the loaded one."""


def _check_command(given: str) -> None:
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise UsageError(f"--on-event {given!r} cannot be split into words: {error}") from None
    refuse(not words, "--on-event is empty; give a command, or leave it out")
    refuse("on-event" not in OBSERVERS.names(), "--on-event needs kdtrain/plugins/loggers, which is gone; leave it out")


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(Options):
    """Logging, validation and sample texts."""

    eval_freq: int = option(250, free=True, least=1, brief=True)
    """Steps between validations; a quarter of all steps in a shorter run."""
    eval_batches: int = option(50, free=True, least=1)
    """At most this many micro-batches in a validation."""
    log_freq: int = option(10, free=True, least=1)
    """Steps between plain lines in train.log."""
    log_to: str = option("auto", free=True)
    """Loggers that show the run, as NAME or NAME:TEXT joined with commas; auto: tensorboard if installed; or none."""
    sample_freq: int = option(1000, free=True, least=0)
    """Steps between sample texts of the student; 0 for none."""
    on_event: str | None = option(
        None, free=True, per_rank=True, once=True, private="runs a command", check=_check_command
    )
    """Command that gets each switch, rollback, skip, divergence, stop, full disk and error as JSON on its stdin."""

    def conflicts(self) -> Conflicts:
        names, given = [name for name, _ in self.loggers], f"--log-to '{self.log_to}'"
        yield "" in names, f"{given} has an empty name; join names with single commas, or use none"
        yield "none" in names, f"{given} has none beside others; use none alone, or leave it out"
        yield len({*names}) < len(names), f"{given} names a logger twice; name each once"
        for name in names:
            LOGGERS.check(name)

    @property
    def loggers(self) -> list[tuple[str, str]]:
        """The name and the text of each logger of `--log-to`."""
        if self.log_to.strip() == "auto":
            installed = importlib.util.find_spec("tensorboard") and "tensorboard" in LOGGERS.names()
            return [("tensorboard", "")] if installed else []
        parts = [each.strip().partition(":") for each in self.log_to.split(",")]
        return [] if self.log_to.strip() == "none" else [(name, text) for name, _, text in parts]


@dataclass(frozen=True, kw_only=True)
class GuardsConfig(Options):
    """What a run does about non-finite steps, loss spikes and divergence."""

    max_skips: int = option(10, free=True, least=0)
    """Consecutive steps that may be skipped because loss or gradient is non-finite; one more ends the run."""
    nan_hooks: Literal["first", "always", "off"] = option("first", free=True)
    """Find the module that made a step non-finite: rerun the first such step with hooks, always hook (slow), or off."""
    spike_patience: int = option(3, least=0)
    """Losses 6 robust deviations, and half, above the median that roll the run back if in a row; 0 disables."""
    spike_lr_factor: float = option(0.5, above=0, most=1)
    """Factor on the learning rate at each rollback."""
    max_rollbacks: int = option(3, free=True, least=0)
    """Most rollbacks in a run; 0 disables them."""
    max_loss_ratio: float = option(1.2, free=True, above=1, most=math.inf)
    """A run has diverged when its cross-entropy stays above this many times its value before the first step."""


@dataclass(frozen=True, kw_only=True)
class StoppingConfig(Options):
    """When a run ends before its last step: on a plateau, or on gradient spikes."""

    early_stopping: bool = option(False, free=True)
    """Act on a plateau, where the validation loss no longer falls (--on-plateau)."""
    early_stopping_interval: int = option(250, free=True, least=1)
    """Steps between checks of the newest validation loss; a check without a new loss does not count."""
    early_stopping_patience: int = option(5, free=True, least=1)
    """Consecutive checks without a better loss that make a plateau."""
    early_stopping_min_delta: float = option(0.01, free=True, least=0)
    """Nats by which the loss must fall below the best one to count as better."""
    stopping_warmup: int = option(50, free=True, least=0)
    """First steps, in which neither a plateau nor an exploding gradient is looked for."""
    on_plateau: Literal["decay", "stop"] = option("decay", free=True)
    """On a plateau in the stable phase of --lr-schedule wsd, start the decay or stop; elsewhere the run stops."""
    explosion_threshold: float = option(1000.0, free=True, above=0, most=math.inf)
    """Gradient norm before clipping; three steps in a row above it end the run with exit 1, in any run."""


@dataclass(frozen=True, kw_only=True)
class CacheParallelConfig(Options):
    """Caching one teacher in several processes, started by torchrun."""

    teacher_parallel: Literal["auto", "replicate", "fsdp"] = option("auto", free=True)
    """How the ranks hold the teacher: a full copy each (replicate) or sharded (fsdp); auto takes what fits."""
    teacher_tensor_parallel: int = option(1, free=True, least=1)
    """Ranks of a node that compute each forward of the teacher together, each with a part of its layers."""
    device_memory: float | None = option(None, free=True, per_rank=True, above=0)
    """GiB of memory on each device, for the plan; the free memory if not given."""
    rank_timeout: float = option(600.0, free=True, per_rank=True, above=0)
    """Seconds that a rank waits for the others before the command ends."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(CacheParallelConfig):
    """Training in several processes, started by torchrun."""

    parallel: Literal["auto", "ddp", "fsdp"] = option("auto", free=True)
    """How the ranks hold the student: a full copy each (ddp) or sharded (fsdp); auto takes what fits."""
    shard_size: int | None = option(None, free=True, least=1)
    """With fsdp: ranks that share one copy of a model, such as those of a node; all ranks if not given."""
    tensor_parallel: int = option(1, free=True, least=1)
    """Ranks of a node that compute each forward of the student together, each with a part of every weight."""
    accumulate: Literal["auto", "whole", "sharded"] = option("auto", free=True)
    """With fsdp: micro-batches add up whole gradients, or shards, exchanged each time; auto takes what fits."""

    def conflicts(self) -> Conflicts:
        yield (
            self.parallel == "ddp" and self.accumulate != "auto",
            f"--accumulate {self.accumulate} has no effect with --parallel ddp, where each rank holds whole gradients; "
            "leave it out, or use --parallel fsdp",
        )
        teacher, student = self.teacher_tensor_parallel, self.tensor_parallel
        both = f"--teacher-tensor-parallel {teacher} and --tensor-parallel {student}"
        yield teacher % student and student % teacher, f"{both}: one must divide the other; choose others"
        yield (
            self.teacher_parallel == "fsdp" and teacher not in (1, student),
            f"{both}: a teacher's parts are sharded too only where both are equal; leave --teacher-parallel fsdp out",
        )

    def cuts_rows(self, seq_len: int, objective: ObjectiveConfig) -> bool:
        """Return whether tensor ranks cut the positions between blocks too; a hidden-state loss reads all of them."""
        return seq_len % self.tensor_parallel == 0 and objective.hidden_loss == "none"


QUANTIZED = ("fp8", "mxfp8", "mxfp4")
"""The modes whose linear layers are quantised."""


def _check_backend(name: str) -> None:
    if name != "auto":
        BACKENDS.check(name)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Options):
    """Number formats and compilation."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "mxfp8", "mxfp4"] = option("auto", brief=True)
    """Format of matrix products; auto is bf16 where the device has it, else fp16 on a GPU and fp32 on a CPU."""
    tf32: bool = option(False, precisions=("fp32",))
    """Multiply fp32 numbers as TF32 (10 bits of mantissa), with fp32 sums, on a GPU since Ampere; faster."""
    fp8_backend: str = option("auto", precisions=QUANTIZED, check=_check_backend)
    """Backend of quantised products, listed below; auto takes one with hardware support here, else emulation."""
    fp8_recipe: Literal["tensorwise", "rowwise", "blockwise"] | None = option(None, precisions=("fp8",))
    """What shares a scale in fp8: a tensor, a row, or a tile of 128; a tensor if not given."""
    fp8_format: Literal["hybrid", "e4m3", "e5m2"] | None = option(None, precisions=("fp8", "mxfp8"))
    """Elements of fp8 and mxfp8; hybrid has e5m2 gradients. If not given, hybrid for tensorwise fp8, else e4m3."""
    scaling_control: Literal["max", "max_minus_1"] | None = option(None, precisions=("mxfp8", "mxfp4"))
    """How the scale of an MX block follows from its largest value (docs/precision.md); max if not given."""
    quant_stochastic_rounding: bool = option(False, precisions=QUANTIZED)
    """Round quantised gradients up or down at random instead of to the nearest value; emulated formats only."""
    quant_skip_first: int = option(0, precisions=QUANTIZED, least=0)
    """Transformer layers at the input that are never quantised."""
    quant_skip_last: int = option(0, precisions=QUANTIZED, least=0)
    """Transformer layers at the output that are never quantised."""
    compile: bool = option(True, free=True, brief=True)
    """Compile student and objective; without it training starts at once and is slower."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = option("default", free=True, needs="compile")
    """Mode of torch.compile: reduce-overhead needs steps of one micro-batch; max-autotune takes no CUDA graphs."""
    deterministic: bool = False
    """Refuse operations that are not bitwise repeatable on the device: only so is a resume on a GPU bitwise exact."""

    @property
    def torch_compile_mode(self) -> str | None:
        """The `mode` of `torch.compile`.

        A CUDA graph that is replayed overwrites the gradients of its last replay, to which the next micro-batch would
        add its own (pytorch #169545). Tuned kernels do not need one.
        """
        return {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}.get(self.compile_mode, self.compile_mode)

    def conflicts_with(self, mode: str) -> Conflicts:
        """Yield the conflicts of options that have no effect in `mode`."""
        for each in dataclasses.fields(self):
            wanted = each.metadata.get("precisions", (mode,))
            idle = mode not in wanted and getattr(self, each.name) != each.default
            yield idle, f"{flag(each.name)} has no effect on {mode}; it needs --precision {' or '.join(wanted)}"


def _check_rule(given: str) -> None:
    unknown = {*given.split("+")} - {"loss", "gap", "spike", "schedule"}
    refuse(bool(unknown), f"--quant-rule '{given}' is unknown; use loss, gap, spike, schedule, or gap+schedule")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(Options):
    """Adaptive quantisation: training falls back to a high-precision format and returns, by rule."""

    time_resume: bool = False
    """Train quantised (in fp8 if --precision is auto) and fall back by the rules below."""
    quant_rule: str | None = option(None, needs="time_resume", check=_check_rule)
    """What triggers the fallback: loss, gap, spike, schedule, or several joined with +; schedule+gap if not given."""
    quant_loss_threshold: float = option(0.1, needs="time_resume", above=0)
    """Nats: the loss that triggers rule loss (docs/precision.md); for rule gap the most that quantisation may cost."""
    quant_window_size: int = option(5, needs="time_resume", least=1)
    """Steps in a window, which ends with a checkpoint; quantisation returns after a whole window without a trigger."""
    quant_checkpoint_interval: int = option(1, needs="time_resume", least=1)
    """Steps between snapshots within a window."""
    quant_snapshot: Literal["memory", "disk"] = option("memory", needs="time_resume")
    """Where snapshots are stored."""
    quant_recovery_buffer: int = option(2, needs="time_resume", least=1)
    """How many snapshots, and checkpoints of windows, are kept for recovery."""
    quant_fallback_strategy: Literal["bf16", "fp16"] = option("bf16", needs="time_resume")
    """The high-precision format; evaluation and layers that are never quantised always run in it."""
    quant_fallback_scope: Literal["all", "forward"] = option("all", needs="time_resume")
    """Which products of a layer fall back to the high-precision format: all three, or the forward's only."""
    quant_probe_every: int = option(100, needs="time_resume", least=1)
    """Steps between two measurements of the cost of quantisation, for rule gap."""
    quant_min_dwell: int = option(10, needs="time_resume", least=0)
    """Fewest steps from a switch to the next one that a rule triggers."""

    def rules(self, lr_schedule: str) -> tuple[str, ...]:
        """Return the names of the rules for a run whose learning rate follows `lr_schedule`."""
        default = "gap" if lr_schedule == "constant" else "schedule+gap"
        return tuple((self.quant_rule or default).split("+"))

    def mode(self, precision: str) -> str:
        """Return the mode of --precision `precision`: auto is fp8 if quantisation is adaptive."""
        return "fp8" if precision == "auto" and self.time_resume else precision

    def conflicts_with(self, mode: str, lr_schedule: str) -> Conflicts:
        """Yield the conflicts of a --time-resume that cannot work, in `mode`."""
        high = f"--time-resume has nothing to fall back from with --precision {mode}; use fp8, mxfp8 or mxfp4"
        yield self.time_resume and mode not in QUANTIZED, high
        endless = "--quant-rule schedule needs a decay phase, and --lr-schedule constant has none; use wsd or cosine"
        yield "schedule" in self.rules(lr_schedule) and lr_schedule == "constant", endless
