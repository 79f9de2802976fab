"""The configuration of `cache-teacher`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kdtrain.config.choices import Weights
from kdtrain.config.sections import CacheParallelConfig, CodecConfig, DataConfig, TextConfig
from kdtrain.config.values import Conflicts, Extended, option, refuse
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
        return next((each for each in self.plugins.values() if getattr(each, "writes", False)), None)

    def splits(self) -> dict[str, int | None]:
        """Return how many sequences of each split to cache; None for all."""
        return {"train": self.data.num_sequences, "validation": self.data.validation_sequences}


def conflicts_with_own(out: Path, caches: Sequence[str]) -> Conflicts:
    """Yield the conflict of a cache that would be written into a folder that it is made from."""
    which = "one of the caches" if len(caches) > 1 else "the cache itself"
    yield any(same_path(out, each) for each in caches), f"--out {out} is {which}; choose another"
