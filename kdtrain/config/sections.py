"""The sections of options, one dataclass each; several commands share some."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kdtrain.config.choices import BACKENDS, DIVERGENCES, IGNORES_T, LEARNS, SCHEDULED, TAILS, TEMPERATURES
from kdtrain.config.values import settle
from kdtrain.errors import UsageError


def refuse(wrong: bool, message: str) -> None:
    """Raise a `UsageError` with `message` if `wrong`."""
    if wrong:
        raise UsageError(message)


def flag(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


def refuse_below(least: int, config: Any, *names: str) -> None:
    """Raise a `UsageError` for an option of `config` that is given and less than `least`."""
    for name in names:
        value = getattr(config, name)
        refuse(value is not None and not value >= least, f"{flag(name)} {value} must be at least {least}")


def refuse_not_positive(config: Any, *names: str) -> None:
    """Raise a `UsageError` for an option of `config` that is given and not a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        refuse(value is not None and not 0 < value < float("inf"), f"{flag(name)} {value} must be above 0")


def refuse_bad_seed(seed: int) -> None:
    """Raise a `UsageError` for a seed that a generator cannot take."""
    refuse(not 0 <= seed < 2**63, f"--seed {seed} must lie between 0 and 2^63 - 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes sequences."""

    data: str | None = None
    """A file or folder of text (txt, md, py, ...), jsonl, parquet or arrow, or one of the sources listed below."""
    split: str = "train"
    """Which split of the data to read: train, validation or test."""
    seq_len: int = 512
    """Tokens in a sequence."""
    num_sequences: int | None = None
    """At most this many sequences; all if not given."""
    validation_sequences: int = 64
    """At most this many sequences in the validation split."""
    text_column: str = "text"
    """Column of jsonl, parquet, arrow or hub data that holds the text."""
    messages_column: str | None = None
    """Column of chat messages; the student then learns from assistant turns only."""
    document_mask: bool = False
    """Keep documents packed into one sequence from attending to each other."""
    streaming: bool = False
    """Stream hub data instead of downloading it first."""
    num_workers: int = 2
    """Tokenizer threads."""

    def __post_init__(self) -> None:
        settle(self)
        refuse(
            self.split not in ("train", "validation", "test"),
            f"--split '{self.split}' is unknown; use train, validation or test",
        )
        refuse_below(1, self, "seq_len", "num_sequences", "validation_sequences")
        refuse_below(0, self, "num_workers")

    def refuse_training_on_validation(self) -> None:
        """Raise a `UsageError` if the run would train on the validation split."""
        refuse(self.split == "validation", "--split validation would train on the validation data; use train or test")

    def refuse_changes(self, but: str = "") -> None:
        """Raise a `UsageError` for an option of the text other than `but`: the cache holds the text."""
        for each in dataclasses.fields(self):
            changed = getattr(self, each.name) != each.default and each.name not in (but, "num_workers")
            refuse(changed, f"{flag(each.name)} has no effect with --cache, which holds its text; leave it out")


DEFAULT_SAMPLES = 50
"""Samples a token where nothing else is asked for: docs/quality.md."""


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """How a teacher's distribution is stored."""

    top_k: int = 0
    """The most likely entries of each distribution, stored exactly; without them the cache serves T = 1 only."""
    num_samples: int | None = None
    """Samples from the rest, stored with their counts (random-sampling distillation); 50 without --top-k, else none."""
    dense: bool = False
    """Store the whole distribution in fp16 instead: the reference, and large."""

    def __post_init__(self) -> None:
        settle(self)
        refuse_below(0, self, "top_k", "num_samples")
        refuse(
            self.samples > 255,
            f"--num-samples {self.num_samples} is too many; counts are kept in 8 bits, so use at most 255",
        )
        refuse(
            not self.dense and self.top_k + self.samples == 0,
            "--top-k 0 with --num-samples 0 stores nothing; raise one or use --dense",
        )

    @property
    def samples(self) -> int:
        """Samples a token: those asked for, or the default."""
        if self.num_samples is not None:
            return self.num_samples
        return 0 if self.top_k or self.dense else DEFAULT_SAMPLES


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """loss = (1 - alpha) * cross-entropy + alpha * T^2 * divergence, means over all unmasked tokens of a step."""

    alpha: float = 0.9
    """Weight of the divergence from the teacher against cross-entropy on the text, 0 to 1."""
    alpha_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How alpha changes from --alpha at the first step to --alpha-end at the last."""
    alpha_end: float = 0.0
    """Alpha at the end of its schedule."""
    divergence: str = "forward-kl"
    """What is minimised between teacher and student, as NAME or NAME:NUMBER; listed below (docs/objective.md)."""
    tail: str = "ghost"
    """What replaces the entries that the cache does not hold; listed below."""
    temperature: float = 1.0
    """Temperature T of both distributions; the start of a learnable T."""
    temperature_mode: str = "fixed"
    """How T changes over the run; listed below (docs/temperature.md)."""
    temperature_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the schedule from --temperature to --temperature-end."""
    temperature_end: float = 1.0
    """Temperature at the end of the schedule."""
    temperature_min: float | None = None
    """Lower bound of a learnable T; the cache's bound if not given."""
    temperature_max: float | None = None
    """Upper bound of a learnable T; the cache's bound if not given."""
    temperature_lr: float = 1e-2
    """Peak learning rate of a learnable T; it follows the same schedule as --lr."""
    hidden_loss: Literal["none", "mse", "cosine"] = "none"
    """Also compare hidden states with an online teacher's, through learned projections (docs/objective.md)."""
    hidden_weight: float = 1.0
    """Weight of the hidden-state loss, which is added to cross-entropy and divergence."""
    hidden_layers: str = "even"
    """Layers to compare: even (spread over the teacher's depth), last, or STUDENT:TEACHER pairs such as 2:3,4:6."""

    def __post_init__(self) -> None:
        settle(self)
        for name in ("alpha", "alpha_end"):
            value = getattr(self, name)
            refuse(not 0 <= value <= 1, f"{flag(name)} {value} is outside 0 to 1")
        divergence, colon, _ = self.divergence.partition(":")
        DIVERGENCES.check(divergence)
        if colon:
            DIVERGENCES.get(divergence).number(self.divergence)
        TAILS.check(self.tail)
        TEMPERATURES.check(self.temperature_mode)
        temperatures = ("temperature", "temperature_end", "temperature_min", "temperature_max", "temperature_lr")
        refuse_not_positive(self, *temperatures, "hidden_weight")
        low, high = self.temperature_min, self.temperature_max
        refuse(
            low is not None and high is not None and low >= high,
            f"--temperature-min {low} must be below --temperature-max {high}",
        )
        mode = f"--temperature-mode {self.temperature_mode}"
        refuse(
            self.schedules_temperature and self.temperature == self.temperature_end,
            f"{mode} goes from {self.temperature:g} to {self.temperature_end:g}; give another --temperature or "
            "--temperature-end",
        )
        refuse(
            self.learns_temperature and not self.distils,
            f"{mode} has nothing to learn from at --alpha 0, where the loss has no divergence; raise --alpha",
        )
        refuse(
            self.learns_temperature and DIVERGENCES.has(divergence, IGNORES_T),
            f"{mode} cannot be used with --divergence {divergence}, whose loss does not depend on T; "
            "use --temperature-mode fixed, or another --divergence",
        )
        for name in ("hidden_weight", "hidden_layers"):
            given = getattr(self, name) != getattr(type(self), name)
            refuse(
                given and self.hidden_loss == "none",
                f"{flag(name)} has no effect without --hidden-loss; give mse or cosine, or leave it out",
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
        return self.alpha > 0 or (self.alpha_schedule != "constant" and self.alpha_end > 0)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 1e-6
    """Learning rate at the end of a decay."""
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd is constant until the last --decay-steps."""
    warmup_steps: int = 200
    """Steps of linear warm-up from 0; at most half of the run."""
    decay_steps: int | None = None
    """Steps of decay at the end of wsd; a fifth of all steps if not given."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """Shape of the decay of wsd."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    weight_decay: float = 0.1
    """Decoupled weight decay; none on norms, biases, embeddings and the temperature."""
    clip: float = 1.0
    """Largest gradient norm; 0 disables clipping."""

    def __post_init__(self) -> None:
        settle(self)
        refuse_not_positive(self, "lr")
        refuse(not 0 <= self.min_lr <= self.lr, f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}")
        refuse_below(0, self, "warmup_steps", "clip")
        refuse_below(1, self, "decay_steps")
        refuse(not all(0 <= beta < 1 for beta in self.betas), f"--betas {self.betas} must lie in [0, 1)")
        refuse(not 0 <= self.weight_decay < float("inf"), f"--weight-decay {self.weight_decay} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    checkpoint_freq: int = 250
    """Steps between checkpoints."""
    checkpoint_minutes: float = 10.0
    """Minutes without a checkpoint after which one is saved anyway; 0 disables. Rollbacks do not use these."""
    keep_rolling: int = 10
    """How many of the newest --checkpoint-freq checkpoints are kept; the best one always is."""
    keep_epochs: int = 5
    """How many of the newest end-of-epoch checkpoints are kept."""
    keep_special: int = 3
    """How many of the newest other checkpoints are kept: interruptions, rollbacks, changes of precision."""
    keep_aside: int = 2
    """How many of the newest set-aside checkpoints (.left-1, .damaged-1) are kept; files not of kdtrain always are."""
    disk_patience: int = 10
    """Minutes that a save waits for space on a full disk, after old checkpoints are removed, before the run ends."""
    async_save: bool = True
    """Write checkpoints in the background; takes as much memory again as weights and optimizer state."""
    resume: str = "auto"
    """auto, never, latest, best, or the name or path of a checkpoint."""
    auto_resume: bool = False
    """Resume an earlier run without the question that a terminal is asked."""
    overwrite: bool = False
    """With --resume never: move an earlier run in --out aside and start a new one."""
    load: Path | None = None
    """Start from another run (its best checkpoint) or a checkpoint: weights, moments, T and position in the data."""
    override_opt_param_scheduler: bool = False
    """With --load: start the learning-rate schedule at step 0 instead of continuing the loaded one."""

    def __post_init__(self) -> None:
        settle(self)
        refuse(not 0 <= self.checkpoint_minutes < float("inf"), "--checkpoint-minutes must be 0 or more")
        refuse_below(1, self, "checkpoint_freq", "keep_rolling", "keep_epochs", "keep_special")
        refuse_below(0, self, "keep_aside", "disk_patience")
        refuse(
            self.override_opt_param_scheduler and self.load is None,
            "--override-opt-param-scheduler has no effect without --load; add it",
        )


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Logging, validation and sample texts."""

    eval_freq: int = 250
    """Steps between validations; a quarter of all steps in a shorter run."""
    eval_batches: int = 50
    """At most this many micro-batches in a validation."""
    log_freq: int = 10
    """Steps between plain lines in train.log."""
    tensorboard: bool = True
    """Write TensorBoard events into the run."""
    histogram_freq: int = 250
    """Steps between histograms of parameters and gradients in TensorBoard and W&B; 0 for none."""
    sample_freq: int = 1000
    """Steps between sample texts of the student; 0 for none."""
    wandb_project: str | None = None
    """Also log to this project of Weights & Biases; needs the package wandb."""
    wandb_name: str | None = None
    """Name of the run in W&B; that of --out if not given."""
    on_event: str | None = None
    """Command that gets each switch, rollback, skip, divergence, stop, full disk and error as JSON on its stdin."""

    def __post_init__(self) -> None:
        settle(self)
        if self.on_event is not None:
            try:
                empty = not shlex.split(self.on_event)
            except ValueError as error:
                raise UsageError(f"--on-event {self.on_event!r} cannot be split into words: {error}") from None
            refuse(empty, "--on-event is empty; give a command, or leave it out")
        refuse_below(1, self, "eval_freq", "eval_batches", "log_freq")
        refuse_below(0, self, "histogram_freq", "sample_freq")
        refuse(self.wandb_project == "", "--wandb-project is empty; give a project, or leave it out")
        refuse(self.wandb_name is not None and self.wandb_project is None, "--wandb-name needs --wandb-project")


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """What a run does about non-finite steps, loss spikes and divergence."""

    max_skips: int = 10
    """Consecutive steps that may be skipped because loss or gradient is non-finite; one more ends the run."""
    nan_hooks: Literal["first", "always", "off"] = "first"
    """Find the module that made a step non-finite: rerun the first such step with hooks, always hook (slow), or off."""
    spike_rule: Literal["mad", "factor", "none"] = "mad"
    """A loss is a spike if it exceeds the median by 6 robust deviations and by half (mad), or by --spike-factor."""
    spike_factor: float = 3.0
    """With --spike-rule factor: a loss above its moving average times this is a spike."""
    spike_patience: int = 3
    """Consecutive spikes after which the run rolls back to a checkpoint before them."""
    spike_lr_factor: float = 0.5
    """Factor on the learning rate at each rollback."""
    max_rollbacks: int = 3
    """Most rollbacks in a run; 0 disables them."""
    divergence_factor: float = 1.2
    """A run has diverged when its cross-entropy stays above this many times its value before the first step."""

    def __post_init__(self) -> None:
        settle(self)
        refuse_below(0, self, "max_skips", "max_rollbacks")
        refuse_below(1, self, "spike_patience")
        refuse(not 1 < self.spike_factor < float("inf"), f"--spike-factor {self.spike_factor} must be above 1")
        refuse(
            self.spike_rule != "factor" and self.spike_factor != GuardsConfig.spike_factor,
            f"--spike-factor has no effect with --spike-rule {self.spike_rule}; leave it out",
        )
        refuse(not 0 < self.spike_lr_factor <= 1, f"--spike-lr-factor {self.spike_lr_factor} must lie in (0, 1]")
        refuse(not self.divergence_factor > 1, f"--divergence-factor {self.divergence_factor} must be above 1")


@dataclass(frozen=True, kw_only=True)
class StoppingConfig:
    """When a run ends before its last step: on a plateau, or on gradient spikes."""

    early_stopping: bool = False
    """Act on a plateau, where the validation loss no longer falls (--on-plateau)."""
    early_stopping_interval: int = 250
    """Steps between checks of the newest validation loss; a check without a new loss does not count."""
    early_stopping_patience: int = 5
    """Consecutive checks without a better loss that make a plateau."""
    early_stopping_min_delta: float = 0.01
    """Nats by which the loss must fall below the best one to count as better."""
    early_stopping_warmup: int = 50
    """First steps, in which loss and gradient are not checked."""
    on_plateau: Literal["decay", "stop"] = "decay"
    """On a plateau in the stable phase of --lr-schedule wsd, start the decay or stop; elsewhere the run stops."""
    grad_spike_threshold: float = 1000.0
    """Gradient norm before clipping above which a step counts as a gradient spike."""
    grad_spike_patience: int = 3
    """Consecutive gradient spikes after which the run ends with exit 1, with or without --early-stopping."""

    def __post_init__(self) -> None:
        settle(self)
        refuse_below(1, self, "early_stopping_interval", "early_stopping_patience", "grad_spike_patience")
        refuse_below(0, self, "early_stopping_warmup")
        refuse(
            not 0 <= self.early_stopping_min_delta < float("inf"),
            f"--early-stopping-min-delta {self.early_stopping_min_delta} must be 0 or more",
        )
        refuse(not self.grad_spike_threshold > 0, f"--grad-spike-threshold {self.grad_spike_threshold} must be above 0")


@dataclass(frozen=True, kw_only=True)
class CacheParallelConfig:
    """Caching one teacher in several processes, started by torchrun."""

    teacher_parallel: Literal["auto", "replicate", "fsdp"] = "auto"
    """How the ranks hold the teacher: a full copy each (replicate) or sharded (fsdp); auto takes what fits."""
    device_memory: float | None = None
    """GiB of memory on each device, for the plan; the free memory if not given."""
    rank_timeout: float = 600.0
    """Seconds that a rank waits for the others before the command ends."""

    def __post_init__(self) -> None:
        settle(self)
        refuse_not_positive(self, "device_memory", "rank_timeout")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(CacheParallelConfig):
    """Training in several processes, started by torchrun."""

    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How the ranks hold the student: a full copy each (ddp) or sharded (fsdp); auto takes what fits."""
    shard_size: int | None = None
    """With fsdp: ranks that share one copy of a model, such as those of a node; all ranks if not given."""
    accumulate: Literal["auto", "whole", "sharded"] = "auto"
    """With fsdp: micro-batches add up whole gradients, or shards, exchanged each time; auto takes what fits."""
    log_all_ranks: bool = False
    """Write a log of each rank into the run, rank-00001.log for rank 1."""

    def __post_init__(self) -> None:
        settle(self)
        super().__post_init__()
        refuse_below(1, self, "shard_size")
        refuse(
            self.parallel == "ddp" and self.accumulate != "auto",
            f"--accumulate {self.accumulate} has no effect with --parallel ddp, where each rank holds whole gradients; "
            "leave it out, or use --parallel fsdp",
        )


_QUANTIZING = ("stochastic_rounding", "skip_first", "skip_last")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats and compilation."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "mxfp8", "mxfp4"] = "auto"
    """Format of the matrix products; auto is bf16 where the device has it, else fp16 on a GPU and fp32 on a CPU."""
    tf32: bool = False
    """Multiply fp32 numbers as TF32 (10 bits of mantissa), with fp32 sums, on a GPU since Ampere; faster."""
    fp8_backend: str = "auto"
    """Backend of quantised products, listed below; auto takes one with hardware support here, else emulation."""
    fp8_recipe: Literal["tensorwise", "rowwise", "blockwise", "current"] | None = None
    """What shares a scale in fp8: a tensor (also called current), a row, or a tile of 128; a tensor if not given."""
    fp8_format: Literal["hybrid", "e4m3", "e5m2"] | None = None
    """Elements of fp8 and mxfp8; hybrid has e5m2 gradients. If not given, hybrid for tensorwise fp8, else e4m3."""
    scaling_control: Literal["max", "max_minus_1", "rceil", "ceil", "even"] | None = None
    """How the scale of an MX block follows from its largest value (docs/precision.md); max if not given."""
    quant_stochastic_rounding: bool = False
    """Round quantised gradients up or down at random instead of to the nearest value; emulated formats only."""
    quant_skip_first: int = 0
    """Transformer layers at the input that are never quantised."""
    quant_skip_last: int = 0
    """Transformer layers at the output that are never quantised."""
    collect_tensors: str | None = None
    """Write statistics of the linear layers whose names match this pattern, such as '*.mlp.*', to tensors.h5."""
    collect_every: int = 100
    """Steps between two collections."""
    collect_raw: bool = False
    """With --collect-tensors: store the numbers too, at most 65,536 of a tensor, until the file has 512 MiB."""
    compile: bool = True
    """Compile the student and the objective with torch.compile."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of torch.compile: reduce-overhead needs steps of one micro-batch; max-autotune takes no CUDA graphs."""
    deterministic: bool = False
    """Refuse operations that are not bitwise repeatable on the device: only so is a resume on a GPU bitwise exact."""

    def __post_init__(self) -> None:
        settle(self)
        refuse_below(0, self, "quant_skip_first", "quant_skip_last")
        refuse_below(1, self, "collect_every")
        refuse(
            self.collect_raw and self.collect_tensors is None,
            "--collect-raw has no effect without --collect-tensors; name the layers, such as '*.mlp.*'",
        )
        refuse(
            not self.compile and self.compile_mode != "default",
            f"--compile-mode {self.compile_mode} has no effect with --no-compile; leave one of them out",
        )
        if self.fp8_backend != "auto":
            BACKENDS.check(self.fp8_backend)

    @property
    def torch_compile_mode(self) -> str | None:
        """The `mode` of `torch.compile`.

        A CUDA graph that is replayed overwrites the gradients of its last replay, to which the next micro-batch would
        add its own (pytorch #169545). Tuned kernels do not need one.
        """
        return {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}.get(self.compile_mode, self.compile_mode)

    def refuse_idle(self, mode: str) -> None:
        """Raise a `UsageError` for an option that has no effect in `mode`."""
        users = {
            "tf32": ("fp32",),
            "fp8_recipe": ("fp8",),
            "fp8_format": ("fp8", "mxfp8"),
            "scaling_control": ("mxfp8", "mxfp4"),
            **dict.fromkeys(("fp8_backend", *(f"quant_{each}" for each in _QUANTIZING)), ("fp8", "mxfp8", "mxfp4")),
        }
        for each in dataclasses.fields(self):
            idle = each.name in users and mode not in users[each.name] and getattr(self, each.name) != each.default
            wanted = " or ".join(users.get(each.name, ()))
            refuse(idle, f"{flag(each.name)} has no effect on {mode}; it needs --precision {wanted}")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Adaptive quantisation: training falls back to a high-precision format and returns, by rule."""

    time_resume: bool = False
    """Train quantised (in fp8 if --precision is auto) and fall back by the rules below."""
    quant_rule: str | None = None
    """What triggers the fallback: loss, gap, spike, schedule, or several joined with +; schedule+gap if not given."""
    quant_loss_threshold: float = 0.1
    """Nats: the loss that triggers rule loss; for rule gap the most that quantisation may cost, whatever its noise."""
    quant_window_size: int = 5
    """Steps in a window, which ends with a checkpoint; quantisation returns after a whole window without a trigger."""
    quant_checkpoint_interval: int = 1
    """Steps between snapshots within a window."""
    quant_snapshot: Literal["memory", "disk"] = "memory"
    """Where snapshots are stored."""
    quant_recovery_buffer: int = 2
    """How many snapshots, and checkpoints of windows, are kept for recovery."""
    quant_fallback_strategy: Literal["bf16", "fp16"] = "bf16"
    """The high-precision format; evaluation and layers that are never quantised always run in it."""
    quant_fallback_scope: Literal["all", "forward"] = "all"
    """Which products of a layer fall back to the high-precision format: all three, or the forward's only."""
    quant_probe_every: int = 100
    """Steps between two measurements of the cost of quantisation, for rule gap."""
    quant_min_dwell: int = 10
    """Fewest steps from a switch to the next one that a rule triggers."""
    quant_max_switches: int = 20
    """Switches after which the run stays in the fallback."""

    def __post_init__(self) -> None:
        settle(self)
        counts = ("quant_window_size", "quant_checkpoint_interval", "quant_recovery_buffer", "quant_probe_every")
        refuse_below(1, self, *counts)
        refuse_below(0, self, "quant_min_dwell", "quant_max_switches")
        refuse_not_positive(self, "quant_loss_threshold")
        unknown = set((self.quant_rule or "gap").split("+")) - {"loss", "gap", "spike", "schedule"}
        refuse(
            bool(unknown),
            f"--quant-rule '{self.quant_rule}' is unknown; use loss, gap, spike, schedule, or gap+schedule",
        )

    def rules(self, lr_schedule: str) -> tuple[str, ...]:
        """The names of the rules for a run whose learning rate follows `lr_schedule`."""
        default = "gap" if lr_schedule == "constant" else "schedule+gap"
        return tuple((self.quant_rule or default).split("+"))

    def mode(self, precision: str) -> str:
        """The mode of --precision `precision`: auto is fp8 if quantisation is adaptive."""
        return "fp8" if precision == "auto" and self.time_resume else precision

    def refuse_idle(self, mode: str, lr_schedule: str) -> None:
        """Raise a `UsageError` for options without effect, and for a --time-resume that cannot work."""
        for each in dataclasses.fields(self):
            changed = not self.time_resume and getattr(self, each.name) != each.default
            refuse(changed, f"{flag(each.name)} has no effect without --time-resume; add it")
        refuse(
            self.time_resume and mode not in ("fp8", "mxfp8", "mxfp4"),
            f"--time-resume has nothing to fall back from with --precision {mode}; use fp8, mxfp8 or mxfp4",
        )
        refuse(
            "schedule" in self.rules(lr_schedule) and lr_schedule == "constant",
            "--quant-rule schedule needs a decay phase, and --lr-schedule constant has none; use wsd or cosine",
        )
