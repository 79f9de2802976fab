"""The configuration of the commands that make caches: cache-teacher, merge, subset, push and import."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

from kdtrain.config.choices import LAYOUTS, REQUIRES_COMPRESSOR
from kdtrain.config.sections import CacheParallelConfig, CodecConfig, DataConfig, Weights
from kdtrain.config.teachers import TextConfig
from kdtrain.config.values import Extended, Options, flag, option, refuse
from kdtrain.errors import UsageError
from kdtrain.files import same_path


def check_device(name: str) -> None:
    """UsageError: `name` is not a device."""
    known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", name)
    refuse(known is None, f"--device '{name[:80]}' is unknown; use auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class CacheTeacherConfig(Extended):
    """Run a teacher once over a data set and store its distributions in an HDF5 cache.

    The same command resumes an interrupted one.
    """

    teacher: str = option(once=True, reads="teacher spec")
    """A teacher that ships (stdlib-5m), a TOML, a model folder, or a hub id."""
    out: Path
    """The folder of the cache."""
    from_logprobs: Path | None = option(None, once=True, reads="file", brief="Instead of --data: what a server said.")
    """Instead of --data: jsonl or parquet with a server's top log-probabilities (docs/data.md); good at T = 1 only."""
    refine: str | None = option(None, once=True, reads="cache", brief="Instead of --data: a cache to draw between.")
    """Instead of --data: a cache of this teacher's samples; as many more are drawn, between them, for kdtrain merge."""
    config: Path | None = option(None, per_rank=True, once=True, brief="A TOML file with any options, in sections.")
    """TOML file with the same options, grouped in sections; a flag wins over it."""
    teacher_weights: Weights | None = option(None, brief="Hold it in bf16, int8 or nf4: its cost is measured.")
    """Hold the teacher's weights in bf16, int8 or nf4 (a GPU); what that costs is measured and kept (docs/lora.md)."""
    batch_size: int = option(16, least=1, brief="Sequences in one forward of the teacher.")
    """Sequences in one forward of the teacher."""
    sequences_per_shard: int = option(512, least=1)
    """Sequences in one file of the cache; at most one file is lost when the command is killed."""
    precision: Literal["auto", "fp32", "bf16"] = option("auto", brief="auto, fp32 or bf16.")
    """Number format of the forward; auto is bf16 where the device has it, else fp32; a resumed cache keeps its own."""
    compile: bool = True
    """Compile the teacher's layers with torch.compile, on a GPU; a CPU never does."""
    seed: int = option(0, least=0, most=2**63 - 1)
    """Seed of the samples."""
    device: str = option("auto", check=check_device)
    """auto, cpu, cuda or cuda:N."""
    json: bool = option(False, per_rank=True)
    """Print one JSON object on stdout, logs on stderr."""
    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=TextConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    parallel: CacheParallelConfig = field(default_factory=CacheParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        recorded, text = self.from_logprobs is not None, self.data.data is not None
        idle = {
            "--teacher-parallel": self.parallel.teacher_parallel != "auto",
            "--teacher-weights": self.teacher_weights is not None,
            "--no-compile": not self.compile,
            "--precision": self.precision != "auto",
            "--device": self.device.startswith("cuda"),
        }
        for name, given in idle.items() if recorded else ():
            refuse(given, f"{name} has no effect with --from-logprobs: no teacher runs here; leave it out")
        self.check_plugins()
        if self.text.generate:
            self._refuse_no_prompts()
        if self.refine is not None:
            self._refuse_idle_refinement()
            return
        self.data.refuse_training_on_validation()
        refuse(not text and not recorded, "--data is missing; give stdlib, a file, a folder or hf:NAME")
        refuse(recorded and text, "--from-logprobs holds its own text; leave --data out")
        refuse(recorded and self.remote is not None, "--from-logprobs and --teacher-server exclude each other")
        codec = self.codec
        refuse(
            recorded and (codec.dense or codec.samples > 0 or codec.top_k < 1),
            "--from-logprobs has the most likely entries only; use --top-k, without --num-samples and --dense",
        )

    EXTENDED = "cache-teacher"
    EXAMPLES = ("kdtrain cache-teacher --teacher teachers/stdlib-5m.toml --data stdlib --out cache/t",)

    def _refuse_no_prompts(self) -> None:
        """Refuse options that do not go with text by the teacher."""
        data, text = self.data, self.text
        refuse(self.refine is not None, "--generate: --refine takes its text from its cache; leave one out")
        refuse(self.from_logprobs is not None, "--generate: --from-logprobs holds its own text; leave one out")
        refuse(
            data.document_mask,
            "--document-mask has no effect with --generate: a sequence is one prompt and its answer; leave it out",
        )
        refuse(
            self.parallel.teacher_parallel == "fsdp",
            "--generate needs the whole teacher on each rank; leave --teacher-parallel fsdp out, or serve the teacher",
        )
        if data.messages_column is not None or data.format not in ("auto", "text"):
            by = "--messages-column" if data.messages_column is not None else f"--format {data.format}"
            refuse(
                text.prompt_tokens is not None,
                f"--prompt-tokens has no effect with {by}: what stands before the last answer is the prompt",
            )
            return
        refuse(
            (text.prompt_tokens or 0) >= data.seq_len,
            f"--prompt-tokens {text.prompt_tokens} leaves no room in --seq-len {data.seq_len}; use less, or a longer "
            "sequence",
        )

    def _refuse_idle_refinement(self) -> None:
        """Refuse options of what the refined cache decides: its text, and how it is kept."""
        refuse(self.from_logprobs is not None, "--refine and --from-logprobs exclude each other; give one")
        refuse_own(self.out, [str(self.refine)])
        self.data.refuse_changes("--refine")
        given = (
            ("--top-k, --num-samples and --dense", self.codec != CodecConfig()),
            ("--sequences-per-shard", self.sequences_per_shard != 512),
            ("--seed", self.seed != 0),
        )
        for name, changed in given:
            refuse(changed, f"{name}: --refine takes it from its cache; leave it out")

    def splits(self) -> dict[str, int | None]:
        """How many sequences of each split to cache; None for all."""
        return {"train": self.data.num_sequences, "validation": self.data.validation_sequences}


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Options):
    """Add up caches of samples of the same rows, or append caches of other rows; the order does not matter.

    The same command resumes an interrupted one.
    """

    caches: tuple[str, ...] = option((), positional=True, reads="cache")
    """Two or more finished caches: folders, or addresses (hf:datasets/ORG/NAME, https://...)."""
    out: Path
    """The folder of the merged cache."""
    weights: str | None = None
    """Several teachers over the same rows: the weight of each, such as 0.7,0.3; by default their numbers of samples."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""

    EXAMPLES = ("kdtrain merge cache/a cache/b --out cache/both",)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(len(self.caches) < 2, "nothing to merge; give two or more caches")
        refuse_own(self.out, self.caches)
        given = len(self.shares or self.caches)
        refuse(given != len(self.caches), f"--weights has {given} numbers for {len(self.caches)} caches; give one each")

    @property
    def shares(self) -> tuple[Fraction, ...] | None:
        """The weights as they are written."""
        return None if self.weights is None else tuple(_decimal("--weights", each) for each in self.weights.split(","))


@dataclass(frozen=True, kw_only=True)
class SubsetConfig(Options):
    """Cut a cache to some of its rows.

    The same command resumes an interrupted one.
    """

    cache: str = option(positional=True, reads="cache")
    """A finished cache: a folder, or an address (hf:datasets/ORG/NAME, https://...)."""
    out: Path
    """The folder of the cut cache."""
    rows: str | None = None
    """The rows to take, START:STOP, counted from 0; STOP is not taken."""
    fraction: str | None = None
    """The share of the rows to take, above 0 and at most 1, by the hash of their tokens."""
    split: Literal["train", "validation", "test", "all"] = "train"
    """The split to cut, or all; the others stay whole."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""

    EXAMPLES = ("kdtrain subset cache/t --fraction 0.01 --out cache/small",)

    def __post_init__(self) -> None:
        super().__post_init__()
        one = (self.rows is None) != (self.fraction is None)
        refuse(not one, "give --rows START:STOP or --fraction SHARE, one of them")
        refuse(self.share is not None and self.share > 1, f"--fraction {self.fraction} is above 1")
        _ = self.range
        refuse_own(self.out, [self.cache])

    @property
    def share(self) -> Fraction | None:
        """The fraction as it is written."""
        return None if self.fraction is None else _decimal("--fraction", self.fraction)

    @property
    def range(self) -> tuple[int, int | None] | None:
        """Start and stop, None: the end."""
        if self.rows is None:
            return None
        found = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", self.rows)
        if found is None:
            raise UsageError(f"--rows {self.rows[:80]} is not START:STOP; give whole numbers, such as 0:10000")
        return int(found[1] or 0), int(found[2]) if found[2] else None


def refuse_own(out: Path, caches: Sequence[str]) -> None:
    """UsageError: a cache would be written into a folder that it is made from."""
    own = any(same_path(out, each) for each in caches)
    which = "one of the caches" if len(caches) > 1 else "the cache itself"
    refuse(own, f"--out {out} is {which}; choose another")


def _decimal(name: str, text: str) -> Fraction:
    """A number above 0, exactly as it is written."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?|\.[0-9]{1,9}", text.strip()) or not Fraction(text.strip()):
        raise UsageError(f"{name}: '{text[:80]}' is not a number above 0, such as 0.3")
    return Fraction(text.strip())


@dataclass(frozen=True, kw_only=True)
class PushConfig(Options):
    """Publish a cache as a data set on the hub, with a card and a preview.

    The same command resumes an interrupted one: files that are there already are not sent again.
    """

    cache: Path = option(positional=True, reads="cache")
    """The folder of a finished cache."""
    to: str = option(positional=True, reads="data set")
    """Where to: hf:ORG/NAME, which is made if it is not there."""
    private: bool = False
    """Make the data set private, if it is made; a public one is refused."""
    license_text: str | None = None
    """Licence of the text: a name such as apache-2.0, unknown, or declined."""
    license_teacher: str | None = None
    """Licence of the teacher's weights: a name, unknown, or declined."""
    license_outputs: str | None = None
    """Licence of what the teacher said, which is that of the data set: a name, unknown, or declined."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [
            flag(name) for name in ("license_text", "license_teacher", "license_outputs") if not getattr(self, name)
        ]
        refuse(
            bool(missing),
            f"{', '.join(missing)} missing: whoever reads the cache must know what it may be used for; give each a "
            "name such as apache-2.0, or unknown, or declined",
        )

    EXAMPLES = (
        "kdtrain push cache/t hf:ORG/NAME --license-text mit --license-teacher apache-2.0 --license-outputs unknown",
    )


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Options):
    """Make a cache of teacher outputs that others published: their layout, checked and aligned.

    The same command resumes an interrupted one.
    """

    source: str = option(positional=True)
    """A parquet or jsonl file, or a folder of them."""
    layout: str = option(check=LAYOUTS.check)
    """How the source is laid out."""
    teacher: str = option(text=True)
    """The name of the teacher that made it, for the manifest; it is not loaded."""
    tokenizer: str = option(once=True, reads="teacher spec")
    """The teacher's tokenizer: a spec, a folder or a hub id."""
    out: Path
    """The folder of the cache."""
    compressor: Path | None = option(None, once=True, reads="file", brief="The YAML that DistillKit compressed with.")
    """The YAML with which DistillKit compressed the source."""
    shift: Literal[-1, 0, 1] = option(0, brief="Entry i of a row is about its token i + 1 + SHIFT.")
    """Entry i of a row is about its token i + 1 + SHIFT; what does not fit the text is refused, with the right one."""
    seq_len: int | None = option(None, least=2, most=2**31 - 2)
    """Positions a sequence; rows are cut, the last part filled up. By default what the first row has."""
    top_k: int | None = option(None, least=1)
    """Entries kept a token, the most likely ones; by default as many as each token has."""
    vocab_size: int | None = option(None, least=2)
    """Rows of the teacher's output head; by default the compressor's number, or that of the tokenizer."""
    tokens_column: str = option("input_ids", brief="Column of the token ids.")
    """Column of the token ids."""
    ids_column: str = option("target_token_ids", brief="topk-parquet: column of the entries' ids.")
    """topk-parquet: column of the entries' ids, a list for each token."""
    logprobs_column: str = option("target_logprobs", brief="topk-parquet: column of their log-probabilities.")
    """topk-parquet: column of their natural log-probabilities, a list for each token."""
    mask_column: str | None = None
    """Column with 0 for each token that is no label of the loss."""
    segments_column: str | None = None
    """Column with the number of each token's document, from 1, 0 for padding; no document then sees another."""
    dtype: str | None = None
    """In which the teacher ran, if you know it: the source does not say it."""
    revision: str | None = None
    """Of the teacher's weights, if you know it."""
    attention: str | None = None
    """The teacher's attention code, or its server, if you know it."""
    temperature: float | None = option(None, above=0)
    """At which the log-probabilities were taken, if you know it; only those at 1 can be a cache."""
    sequences_per_shard: int | None = option(None, least=1)
    """Sequences in one file of the cache; by default 262,144 tokens, at most 512 sequences."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            re.match(r"hf:|https?:", self.source) is not None,
            f"{self.source}: import reads local files; download the data set first, and give its folder",
        )
        coded = LAYOUTS.has(self.layout, REQUIRES_COMPRESSOR)
        refuse(
            coded and self.compressor is None,
            f"--layout {self.layout} needs --compressor FILE.yaml: the data do not say how they are coded",
        )
        refuse(
            self.temperature not in (None, 1.0),
            f"--temperature {self.temperature}: log-probabilities at another temperature than 1 cannot be a cache, "
            "because the rest of the vocabulary is not known",
        )

    EXAMPLES = (
        "kdtrain import downloads/logits --layout distillkit --compressor compression_config.yaml "
        "--teacher Qwen3-235B --tokenizer Qwen/Qwen3-235B-A22B --out cache/qwen",
    )
