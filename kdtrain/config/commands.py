"""The configuration of each command: its own options, and the sections it takes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kdtrain.config.choices import EXPORTS, SOURCES, Weights
from kdtrain.config.sections import (
    CacheParallelConfig,
    CheckpointConfig,
    CodecConfig,
    DataConfig,
    GuardsConfig,
    LoraConfig,
    MonitorConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    QuantizationConfig,
    StoppingConfig,
    TextConfig,
)
from kdtrain.config.values import (
    USUAL_STEPS,
    Conflicts,
    Extended,
    Options,
    Printed,
    fields_of,
    marked,
    option,
    refuse,
    sections,
    written,
)
from kdtrain.files import same_path


def check_device(name: str) -> None:
    """Raise UsageError if `name` is not a device."""
    known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", name)
    refuse(known is None, f"--device '{name[:80]}' is unknown; use auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class CacheTeacherConfig(Extended):
    """Run a teacher once over a data set and store its distributions in an HDF5 cache.

    The same command resumes an interrupted one.
    """

    teacher: str = option(once=True, reads="teacher spec")
    """A TOML, a model folder, a hub id, or one that ships; stdlib-5m."""
    out: Path
    """The folder of the cache."""
    refine: str | None = option(None, once=True, reads="cache", brief=True)
    """A cache to draw between, instead of --data; of this teacher's samples, with as many more, for kdtrain merge."""
    config: Path | None = option(None, per_rank=True, once=True, brief=True, reads="file")
    """TOML file with these options, in sections; a flag wins over it."""
    teacher_weights: Weights | None = option(None, brief=True)
    """Hold the teacher in fewer bits; what that costs is measured and stored (on a GPU, docs/lora.md)."""
    batch_size: int = option(16, least=1, brief=True)
    """Sequences in one forward of the teacher."""
    sequences_per_shard: int = option(512, least=1)
    """Sequences in one file of the cache; at most one file is lost when the command is killed."""
    precision: Literal["auto", "fp32", "bf16"] = option("auto", brief=True)
    """Number format of the forward; auto is bf16 where the device has it, else fp32; a resumed cache keeps its own."""
    compile: bool = True
    """Compile the teacher's layers with torch.compile, on a GPU; a CPU never does."""
    seed: int = option(0, least=0, most=2**63 - 1)
    """Seed of the samples."""
    device: str = option("auto", check=check_device)
    """auto, cpu, cuda or cuda:N."""
    dry_run: bool = option(False, brief=True)
    """Show tokens, disk and time of the cache; two batches are answered and written, and the files removed."""
    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=TextConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    parallel: CacheParallelConfig = field(default_factory=CacheParallelConfig)

    def conflicts(self) -> Conflicts:
        if self.text.generate:
            yield from self._conflicts_with_prompts()
        if self.refine is not None:
            yield from conflicts_with_own(self.out, [str(self.refine)])
            yield from self.data.conflicts_with("--refine")
            for name, changed in (
                ("--top-k, --num-samples and --dense", self.codec != CodecConfig()),
                ("--sequences-per-shard", self.sequences_per_shard != 512),
                ("--seed", self.seed != 0),
            ):
                yield changed, f"{name}: --refine takes it from its cache; leave it out"
            return
        yield from self.data.conflicts_in_training()
        own_text = getattr(self.writer, "answers", None) is not None
        yield self.data.data is None and not own_text, "--data is missing; give stdlib, a file, a folder or hf:NAME"

    EXTENDED = "cache-teacher"
    EXAMPLES = ("kdtrain cache-teacher --teacher teachers/stdlib-5m.toml --data stdlib --out cache/t",)

    def _conflicts_with_prompts(self) -> Conflicts:
        data, given = self.data, self.text.prompt_tokens
        yield self.refine is not None, "--generate: --refine takes its text from its cache; leave one out"
        mask = "--document-mask has no effect with --generate: a sequence is one prompt and its answer; leave it out"
        yield data.document_mask is True, mask
        for shared, words in (
            (self.parallel.teacher_parallel == "fsdp", "--teacher-parallel fsdp"),
            (self.parallel.teacher_tensor_parallel > 1, "--teacher-tensor-parallel"),
        ):
            yield shared, f"--generate needs the whole teacher on each rank; leave {words} out, or serve the teacher"
        if data.messages_column is not None or data.format not in ("auto", "text"):
            by = "--messages-column" if data.messages_column is not None else f"--format {data.format}"
            idle = f"--prompt-tokens has no effect with {by}: what stands before the last answer is the prompt"
            yield given is not None, idle
        else:
            room = f"--prompt-tokens {given} leaves no room in --seq-len {data.seq_len}"
            yield (given or 0) >= data.seq_len, f"{room}; use less, or a longer sequence"

    @property
    def writer(self) -> Any:
        """The section of a plugin whose model writes the text instead of the teacher; None: the teacher writes it."""
        return next(self.having("writes"), None)


def conflicts_with_own(out: Path, caches: Sequence[str]) -> Conflicts:
    """Yield the conflict of a cache that would be written into a folder that it is made from."""
    which = "one of the caches" if len(caches) > 1 else "the cache itself"
    yield any(same_path(out, each) for each in caches), f"--out {out} is {which}; choose another"


def partners(pairs: tuple[str, ...]) -> dict[str, str]:
    """Return the student's special token for each of the teacher's in `--special-tokens`; empty: it is left out."""
    return {one: other for one, _, other in (each.partition("=") for each in pairs)}


def _check_pairs(pairs: tuple[str, ...]) -> None:
    for number, each in enumerate(pairs):
        refuse(
            each.find("=") < 1,
            f"--special-tokens '{each[:80]}' is not TEACHER'S=STUDENT'S; leave the second out, "
            "as '<pad>=', for a token that is dropped",
        )
        token = each.partition("=")[0]
        refuse(token in partners(pairs[:number]), f"--special-tokens gives '{token[:80]}' twice; give it one partner")


def _special_tokens() -> Any:
    return option((), several=True, later=True, needs="cross_tokenizer", check=_check_pairs, shown="A=B")


def _conflicts_of_sources(cache: object, teacher: str | None, data: DataConfig, verb: str) -> Conflicts:
    yield cache and teacher is not None, "--cache and --teacher exclude each other; give one"
    yield cache and data.data is not None, "--cache holds its own text; leave --data out"
    yield not cache and data.data is None, f"nothing to {verb} on; give --cache FOLDER or --data SOURCE"
    if cache:
        yield from data.conflicts_with("--cache")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Extended):
    """Train a student from a cache, from an online teacher, or (with neither) by plain cross-entropy on text.

    The same command resumes an interrupted run from its newest valid checkpoint.
    """

    student: str = option(once=True, reads="spec", brief=True)
    """A TOML, a model folder, a hub id, or one that ships; stdlib-1m, ..."""
    out: Path = option(free=True)
    """The folder of the run."""
    cache: tuple[str, ...] = option((), several=True, shown="PATH", reads="cache", brief=True)
    """A finished cache; a folder, hf:datasets/ORG/NAME[@REVISION] or https://..., and given again a mixture."""
    cache_weights: tuple[float, ...] = option((), several=",", shown="X,X", above=0, later=True)
    """What a step draws of each --cache, as 3,1; by default in proportion to their sequences."""
    cross_tokenizer: bool = option(False, later=True)
    """The student may have another tokenizer than the teacher (docs/tokenizers.md)."""
    special_tokens: tuple[str, ...] = _special_tokens()
    """What a special token of the teacher is for the student, as '<|eot_id|>=<|im_end|>'; the log shows the rest."""
    teacher: str | None = option(None, once=True, reads="teacher spec", brief=True)
    """An online teacher instead of --cache; one that ships (stdlib-5m), a TOML, a folder, a hub id, or self."""
    teacher_weights: Weights | None = option(None, needs="teacher")
    """Hold the online teacher's weights in bf16, int8 or nf4 (a GPU); what that costs is measured (docs/lora.md)."""
    source: str = option("cache", check=SOURCES.check)
    """What reads the sequences of --cache or of the packed --data; listed below."""
    config: Path | None = option(None, free=True, per_rank=True, once=True, brief=True, reads="file")
    """TOML file with these options, in sections; a flag wins over it."""
    steps: int | None = option(None, free=True, least=1, brief=True)
    """Optimizer steps; 2,000 if neither this nor --epochs is given."""
    epochs: float | None = option(None, free=True, above=0, brief=True)
    """Passes over the training split, instead of --steps."""
    batch_size: int = option(16, least=1, brief=True)
    """Sequences in an optimizer step, over all ranks; decides the result."""
    micro_batch_size: int | Literal["auto"] | None = option(None, free=True, least=1, brief=True)
    """Sequences in one forward of a rank (memory); times the ranks it must divide --batch-size. auto: by the plan."""
    activation_checkpointing: bool = option(False, free=True)
    """Store only the inputs of the student's layers and recompute the rest: less memory, a third more time."""
    freeze_head: bool = False
    """Train all but the student's output head, and the embedding where it is tied to it; adapters never train it."""
    base_weights: Weights | None = None
    """Hold the frozen weights beside adapters in bf16, int8 or nf4 (a GPU) instead of fp32 (docs/lora.md)."""
    allow_mismatch: tuple[Literal["tokenizer", "cache"], ...] = option((), free=True)
    """Accept a student whose tokenizer is not the cache's, or a cache other than the one the run started with."""
    seed: int = option(0, least=0, most=2**63 - 1)
    """Seed of the student's weights, the order of the data and dropout."""
    device: str = option("auto", free=True, check=check_device)
    """auto, cpu, cuda or cuda:N."""
    dry_run: bool = option(False, free=True, brief=True)
    """Show the plan of the run, its time and memory; two steps are taken and saved, and the files removed."""
    write_config: Path | None = option(None, free=True, once=True, needs="dry_run", reads="new file")
    """With --dry-run, write all options with their lines of help into this new file, for --config."""
    world_size: int | None = option(None, free=True, least=1, needs="dry_run")
    """With --dry-run, plan the memory of so many ranks from shapes alone; nothing is built, and no step is taken."""
    sanity: bool = option(False, free=True, brief=True)
    """Run the checks that come before a long run; a table of verdicts is shown, and the files are removed."""
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    stopping: StoppingConfig = field(default_factory=StoppingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def conflicts(self) -> Conflicts:
        objective = self.objective
        hidden = self.objective.hidden_loss
        many = len(self.cache)
        given = self.cache_weights
        own_text = next(self.having("own_text"), None)
        if (self.source == "cache" or self.cache) and not own_text:
            yield from _conflicts_of_sources(self.cache, self.teacher, self.data, "train")
        one_text = self.source == "cache" and (many == 1 or self.teacher is not None)
        several = "--cross-tokenizer reads one cache; give one --cache (or --teacher with --data), without --source"
        yield self.cross_tokenizer and not one_text, several
        states = f"--hidden-loss {hidden} compares states token by token, which --cross-tokenizer cannot"
        yield self.cross_tokenizer and hidden != "none", f"{states}; leave one of them out"
        yield given and many < 2, "--cache-weights is for several --cache; leave it out, or give another cache"
        numbers = f"{len(given)} number{'s' if len(given) > 1 else ''}"
        yield len(given) not in (0, many), f"--cache-weights has {numbers} for {many} caches; give one each"
        yield self.dry_run and self.sanity, "--dry-run and --sanity exclude each other; give one after the other"
        mode = self.quantization.mode(self.precision.precision)
        yield from self.precision.conflicts_with(mode)
        yield from self.quantization.conflicts_with(mode, self.optimizer.lr_schedule)
        loaded = self.checkpoint.load is not None
        yield self.sanity and loaded, "--sanity checks the student of the spec; leave --load out"
        yield from self.data.conflicts_in_training()
        taught = bool(self.cache) or self.teacher is not None or self.source != "cache"
        yield (
            objective.learns_temperature and not taught,
            f"--temperature-mode {objective.temperature_mode} needs a teacher to learn T from; "
            "give --cache or --teacher, or use --temperature-mode fixed",
        )
        online = f"--hidden-loss {hidden} needs an online teacher; give --teacher, or leave it out"
        yield hidden != "none" and not self.cache and self.teacher is None, online
        idle = "--teacher-tensor-parallel has no effect without an online teacher; give --teacher, or leave it out"
        yield self.parallel.teacher_tensor_parallel > 1 and not self.online, idle
        both = self.steps is not None and self.epochs is not None
        yield both, "--steps and --epochs exclude each other; give one"
        size, micro = self.batch_size, self.micro_batch_given
        uneven = f"--batch-size {size} is not a multiple of --micro-batch-size {micro}; choose one that is"
        yield micro is not None and size % micro != 0, uneven

    EXTENDED = "distill"
    EXAMPLES = ("kdtrain distill --cache cache/t --student students/stdlib-1m.toml --out runs/t",)

    @property
    def online(self) -> bool:
        """True if a teacher of this process answers while the student trains."""
        return self.teacher is not None and self.remote is None

    @property
    def plans(self) -> Iterator[str]:
        """The plans of the data that the options ask for, by their names in `kdtrain.plans`, each over the next one."""
        yield from (each.data_plan for each in self.having("data_plan"))
        if self.cross_tokenizer:
            yield "aligned"
        yield "cached" if self.data.data is None else "text"

    @property
    def micro_batch_given(self) -> int | None:
        """--micro-batch-size if it is a number, else None."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    def total_steps(self, sequences: int, length: Mapping[str, Any] | None = None) -> int:
        """Return the planned steps of a run over a training split of `sequences`.

        length: `steps` and `epochs` of an earlier start instead of the options.
        """
        given = vars(self) if length is None else length
        steps, epochs = given.get("steps"), given.get("epochs")
        if epochs is not None:
            return max(round(epochs * sequences / self.batch_size), 1)
        if steps is None and self.checkpoint.override_opt_param_scheduler and self.optimizer.decay_steps:
            decay = self.optimizer.decay_steps  # only a decay, from another run's weights
            return min(self.optimizer.warmup_steps, decay) + decay
        return steps or USUAL_STEPS

    def deciding(self) -> dict[str, dict[str, Any]]:
        """Return the options that decide the result of a run, by section."""
        free = marked(DistillConfig, "free")
        later = self.later()
        tables = {
            section: {name: each for name, each in table.items() if name not in free and each != later.get(name, ...)}
            for section, table in sections(self).items()
        }
        return {section: table for section, table in tables.items() if table}

    @staticmethod
    def later() -> dict[str, Any]:
        """Return deciding options that earlier versions lacked, with their defaults, which checkpoints leave out."""
        return {
            each.name: written(each, each.default) for _, each in fields_of(DistillConfig) if each.metadata.get("later")
        }


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Printed):
    """Measure a student: loss, perplexity, KL to the teacher, agreement, calibration, acceptance."""

    student: tuple[str, ...] = option(several=True, words=True, reads="student spec")
    """A run, a checkpoint, an exported model folder, a TOML or a hub id; or several, as runs/*."""
    cache: Path | None = option(None, once=True, reads="cache", brief=True)
    """A finished cache, also hf: or https://; its validation split, or --split test of one made of the test split."""
    teacher: str | None = option(None, once=True, reads="teacher spec", brief=True)
    """An online teacher instead of --cache; one that ships (stdlib-5m), a TOML, a model folder, or a hub id."""
    cross_tokenizer: bool = False
    """The student may have another tokenizer than the teacher, as in distill."""
    special_tokens: tuple[str, ...] = _special_tokens()
    """What a special token of the teacher is for the student, as '<|eot_id|>=<|im_end|>'."""
    last_word: bool = False
    """Also measure how often the last word of each document of --data is written greedily, given the rest (LAMBADA)."""
    config: Path | None = option(None, per_rank=True, once=True, reads="file")
    """TOML file with these options, in sections; a flag wins over it."""
    batch_size: int = option(16, least=1)
    """Sequences in one forward."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Number format of the forwards."""
    device: str = option("auto", check=check_device)
    """auto, cpu, cuda or cuda:N."""
    dry_run: bool = False
    """Look at students and text, and measure nothing."""
    data: DataConfig = field(default_factory=lambda: DataConfig(split="validation"))

    def conflicts(self) -> Conflicts:
        yield from _conflicts_of_sources(self.cache, self.teacher, replace(self.data, split="train"), "evaluate")
        yield self.last_word and self.data.data is None, "--last-word reads passages; give --data instead of --cache"
        other = self.data.validation_sequences != DataConfig().validation_sequences
        yield other, "--validation-sequences has no effect on evaluate; use --num-sequences, and --split"
        untaught = self.cross_tokenizer and self.cache is None and self.teacher is None
        yield untaught, "--cross-tokenizer has no effect without a teacher; add --cache or --teacher, or leave it out"


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Printed):
    """Show a run, a cache, a checkpoint, a shard, a model, its recipe, a folder of these, or this machine."""

    path: Path | None = option(None, positional=True, reads="cache path")
    """A run, a cache (hf:datasets/... and https://... too), checkpoint, shard, model, recipe, or a folder of these."""
    watch: bool = option(False, needs="path")
    """Show how a run, or a cache that is being made, is doing every ten seconds, and what is wrong, until it ends."""
    hardware: bool = False
    """Show devices, number formats and compilers of this machine instead."""

    def conflicts(self) -> Conflicts:
        yield self.path is None and not self.hardware, "nothing to inspect; give a PATH or --hardware"
        yield self.watch and self.json, "--watch prints lines for people; leave --json out"


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(Printed):
    """Check every digest of a cache, a run or a checkpoint; list what is damaged, with exit code 1."""

    path: Path = option(positional=True, reads="cache path")
    """A cache (hf:datasets/ORG/NAME and https:// too), a run or a checkpoint."""
    repair: bool = False
    """Move the damaged shards of a cache aside, so that cache-teacher builds them again."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Printed):
    """Write a trained student as a folder that transformers.AutoModelForCausalLM loads."""

    run: Path = option(positional=True, reads="saved")
    """The folder of the run."""
    out: Path
    """The folder to write."""
    checkpoint: str = option("best", reads="checkpoint")
    """best, latest, or the name of a checkpoint."""
    dtype: Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"] = "fp32"
    """Number format of the written weights."""
    format: str = option("safetensors", check=EXPORTS.check)
    """What is written."""
    quantize: Literal["int8", "q8_0"] | None = None
    """Keep the weights of linear layers in 8 bits: int8 by torchao, or q8_0 of --format gguf; the rest as --dtype."""
    shard_size: float = option(5.0, above=0)
    """Largest file of weights, in GB."""
    adapter: bool = False
    """Write the adapters alone, as a folder that peft loads; without it they are added to the weights."""
    base: str | None = option(None, once=True, reads="spec")
    """The spec of the weights that the run did not train, if it is not where the run found it."""
    license: str | None = None
    """Licence of the student for its card, as the hub names it: apache-2.0, mit, ..."""
    overwrite: bool = False
    """Replace a folder that is already there."""

    def conflicts(self) -> Conflicts:
        whole = {f"--quantize {self.quantize}": self.quantize is not None, "--shard-size": self.shard_size != 5.0}
        for name, given in whole.items():
            yield self.adapter and given, f"{name} is for whole models; leave it or --adapter out"
        for name, given in (whole | {"--adapter": self.adapter}).items():
            if given and not EXPORTS.has(self.format, name):
                yield True, f"--format {self.format} does not take {name}; leave it out, or name another --format"

    @property
    def torch_dtype(self) -> str:
        """The name of `dtype` in torch."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(self.dtype, self.dtype)


@dataclass(frozen=True, kw_only=True)
class WritingConfig(Printed):
    """How a student writes."""

    student: str = option(positional=True, reads="model spec")
    """A run (its best student), a checkpoint, an export, a TOML, a teacher that ships, or a hub id."""
    temperature: float = option(0.8, least=0)
    """Divides the logits: low is careful, 1 is what the student has learned; 0 takes the most likely token."""
    seed: int = option(0, least=0)
    """Of the sampled tokens: another one gives another text."""
    device: str = option("auto", check=check_device)
    """auto, cpu, cuda or cuda:N."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(WritingConfig):
    """Continue a text with a trained student."""

    prompt: str = option("", positional=True, text=True)
    """What to answer in the student's chat template, or the text to continue; empty: from a document's beginning."""
    raw: bool = False
    """Continue the prompt as it stands, also with a student that has a chat template."""
    max_tokens: int = option(100, least=1)
    """At most this many tokens; fewer where the student ends the text or reads no more."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(WritingConfig):
    """Talk to a trained student in its chat template; at a terminal, or with a turn a line on stdin."""

    beside: str | None = option(None, once=True, reads="model spec", shown="TEACHER")
    """Another model that answers each turn too, in a conversation of its own: the teacher, or any student."""
    system: str | None = option(None, once=True, text=True, shown="TEXT")
    """The system prompt, before the first turn."""
    max_new_tokens: int = option(512, least=1)
    """At most this many tokens an answer; fewer where the model ends its turn or reads no more."""


@dataclass(frozen=True, kw_only=True)
class CompletionConfig(Options):
    """Print a script that completes commands and options in bash, zsh or fish."""

    shell: Literal["bash", "zsh", "fish"] = option(positional=True)
    """The shell; put `source <(kdtrain completion bash)` into ~/.bashrc, for zsh likewise."""


COMMANDS = {
    "cache-teacher": CacheTeacherConfig,
    "distill": DistillConfig,
    "evaluate": EvaluateConfig,
    "generate": GenerateConfig,
    "chat": ChatConfig,
    "inspect": InspectConfig,
    "verify": VerifyConfig,
    "export": ExportConfig,
    "completion": CompletionConfig,
}
"""The built-in commands: `kdtrain NAME` runs `main` of the module of that name in `kdtrain.commands`; `chat` is a
function of that of `generate`."""
