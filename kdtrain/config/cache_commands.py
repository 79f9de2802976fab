"""The configuration of the commands that make caches: cache-teacher, merge, subset, push and import."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

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
        self.check_plugins()
        if self.text.generate:
            self._refuse_no_prompts()
        if self.refine is not None:
            self._refuse_idle_refinement()
            return
        self.data.refuse_training_on_validation()
        refuse(self.data.data is None, "--data is missing; give stdlib, a file, a folder or hf:NAME")

    EXTENDED = "cache-teacher"
    EXAMPLES = ("kdtrain cache-teacher --teacher teachers/stdlib-5m.toml --data stdlib --out cache/t",)

    def _refuse_no_prompts(self) -> None:
        """Refuse options that do not go with text by the teacher."""
        data, text = self.data, self.text
        refuse(self.refine is not None, "--generate: --refine takes its text from its cache; leave one out")
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
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""

    EXAMPLES = ("kdtrain merge cache/a cache/b --out cache/both",)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(len(self.caches) < 2, "nothing to merge; give two or more caches")
        refuse_own(self.out, self.caches)


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
        """The fraction exactly as it is written. UsageError: it is not a number above 0."""
        if self.fraction is None:
            return None
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?|\.[0-9]{1,9}", self.fraction.strip()) or not Fraction(
            self.fraction.strip()
        ):
            raise UsageError(f"--fraction: '{self.fraction[:80]}' is not a number above 0, such as 0.3")
        return Fraction(self.fraction.strip())

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
