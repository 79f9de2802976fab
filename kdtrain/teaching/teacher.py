"""What a teacher is: tokens in; hidden states, logits or a top-k out; who it is, what it costs, how it is sharded.

A spec names the kind of its teacher (`kind`, by default `local`), and the kind is a class that `register_teacher` adds.
A training step calls `targets`; a cache is built from `logits`, or, of a teacher that gives a top-k, from `kept`.

The stages of a teacher, so that the memory plan comes before the weights, and an error of one rank before collectives:

    open_teacher            reads configurations only; `vocab_size` and `footprint` are known
    load, check, meet       one rank at a time may fail
    pack                    the same; weights in fewer bits, where the spec asks for them, and their cost
    prepare                 shards and compiles; every rank must call it
    targets, logits, kept   in any number

Shape suffixes: B sequences, T positions, N tokens (B*T), V vocabulary, D width.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kdtrain.cache.build.shard_writer import ShardRows
from kdtrain.cache.format.codec import CodecSpec
from kdtrain.cache.format.compression import Arrays
from kdtrain.cache.format.manifest import WeightsCost
from kdtrain.config import CodecConfig
from kdtrain.config.choices import TEACHERS
from kdtrain.data.packing import PackedRow
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import DenseTargets
from kdtrain.parallel.memory_plan import ModelFootprint
from kdtrain.teaching.writing import Writing

MEASURED = 64
"""Most sequences on which the cost of packed weights is measured."""


class Teacher:
    """A teacher of one kind; a subclass has at least `vocab_size`, `digest` and `logits`.

    Args:
        spec: name, tokenizer, and the kind's own `options`.
        device: where its answers are computed.
        mode: number format of its forward: fp32, bf16 or fp16.
    """

    gives: ClassVar[Literal["hidden", "logits", "top-k"]] = "logits"
    """What it knows of a distribution. One that gives a top-k makes caches (`kept`) and does not teach a run itself."""
    text: Mapping[str, Any] | None = None
    """For a teacher that brings its own text (`rows`): what the manifest says of it. None: it reads any text."""
    sharded = False
    """True if a forward needs all ranks."""
    cost: WeightsCost | None = None
    """What `pack` measured."""
    writing: Writing | None = None
    """How it continues the prompts of a cache's rows; None: the rows have their text."""

    def __init__(self, spec: ModelSpec, device: torch.device, mode: str) -> None:
        self.spec, self.device, self.mode = spec, device, mode

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Its name in logs and tables."""
        return self.spec.name

    @property
    def vocab_size(self) -> int:
        """Columns of its logits, padding included."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """Digest of its weights, once it is loaded: another digest is another teacher."""
        raise NotImplementedError

    @property
    def identity(self) -> Mapping[str, Any]:
        """Who it is, for a cache's manifest, in values that JSON holds; a resumed build must give the same."""
        return {"spec": self.name, "kind": self.spec.kind, "options": self.spec.options, "weights_digest": self.digest}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of its spec."""
        return load_tokenizer(self.spec)

    def footprint(self, seq_len: int) -> ModelFootprint | None:
        """Its memory in a forward of sequences of `seq_len`, before it is loaded; None if there is no estimate.

        By default that of its logits alone, [B, T, V] in fp32, once while they are made and once as targets.
        """
        if self.gives == "top-k":
            return None
        size = self.vocab_size
        sizes: dict[str, Any] = {"vocabulary": size, "width": size, "parameters": 0, "layers": 0, "in_layers": 0}
        return ModelFootprint(name=self.name, tied=False, kept=4.0 * size, **sizes)

    def load(self, sharded: bool = False) -> None:
        """Load its weights; `sharded`: `prepare` will shard them. UsageError: they cannot be loaded."""

    def meet(self, student: SplitModel) -> None:
        """Take from the student what the teacher shares with it; called once, when the student is loaded and whole."""

    def pack(self, rows: Iterable[Batch], *, document_mask: bool = False) -> None:
        """Hold the weights in the format of the spec's `weights`; its `cost` is measured on `rows` if there are any."""

    def check(self, seq_len: int, document_mask: bool) -> None:
        """Refuse (UsageError) sequences that are too long, or a document mask that it cannot apply."""

    def prepare(self, *, sharded: bool = False, shard_size: int | None = None, compile: bool = False) -> None:
        """Shard and compile; every rank must call it. shard_size: ranks that share one copy, None: all."""
        if sharded:
            raise UsageError(f"a teacher of kind {self.spec.kind} is not sharded; leave --teacher-parallel out")

    def logits(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Logits [B, T, V] of the next token, in fp32 on any device, without gradients.

        tokens_BT: int64, on any device. segments_BT: number of the document of each position; None: no document mask.
        """
        raise NotImplementedError

    def targets(
        self, batch: Batch, vocab_size: int, *, document_mask: bool = False, layers: tuple[int, ...] = ()
    ) -> Batch:
        """`batch` with its targets over the first `vocab_size` entries, and the states of `layers`; no gradients.

        layers: see `layer_widths`.
        """
        assert not layers, "layer_widths refuses them"
        with torch.no_grad():
            logits_BTV = self.logits(batch.tokens[:, :-1], batch.segments if document_mask else None)
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        logits_NV = rearrange(logits_BTV.to(labels_N.device), "B T V -> (B T) V")
        return dataclasses.replace(batch, targets=DenseTargets.from_logits(logits_NV, labels_N, vocab_size))

    def layer_widths(self) -> list[int]:
        """D of the embedding and of each layer, for the hidden-state loss. UsageError: it gives no hidden states."""
        raise UsageError(f"a teacher of kind {self.spec.kind} gives no hidden states; leave --hidden-loss out")

    def connect(self, remote: Any, codec: CodecConfig) -> None:
        """Take the addresses of the servers that run it, before `load`. UsageError: it is no such teacher."""
        raise UsageError(f"a teacher of kind {self.spec.kind} is not asked at a server; leave --teacher-server out")

    def begin(self, earlier: Mapping[str, Any] | None, finished: bool) -> None:
        """Called before a cache is made, on every rank; `identity` is asked for after it, and may be the earlier one.

        earlier: the `identity` with which the cache was begun; None: it is a new one. finished: it is whole.

        UsageError: it is another teacher's.
        """

    def capturing(self, part: ShardRows, codec: CodecSpec, seed: int) -> AbstractContextManager[None]:
        """Entered around `kept` of all rows of a shard, in order; after an error at its end the shard is not kept."""
        return nullcontext()

    def kept(self, rows: ShardRows, codec: CodecSpec, seed: int) -> Arrays:
        """What a cache keeps of these rows, as `cache.codec.keep` makes it, of a teacher that gives no whole logits."""
        return rows.kept

    def write(self, how: Writing) -> None:
        """Continue the prompts of rows from here on (`written`). UsageError: it writes no text."""
        raise UsageError(f"a teacher of kind {self.spec.kind} writes no text; leave --generate out")

    def written(self, rows: ShardRows, codec: CodecSpec) -> tuple[ShardRows, Tensor | Arrays]:
        """Rows with what it wrote behind their prompts, and its logits [B, T, V], or what a cache keeps of them.

        rows: as `prompts.prompt_rows` makes them. It draws by (seed, split, row, position) alone.
        """
        raise NotImplementedError

    def rows(self, split: str, seq_len: int, codec: CodecSpec) -> Iterator[PackedRow]:
        """The rows of its own `text`. UsageError: they do not fit."""
        raise NotImplementedError


Kind = TypeVar("Kind", bound=Callable[[ModelSpec, torch.device, str], Teacher])


def register_teacher(name: str, *, help: str = "") -> Callable[[Kind], Kind]:
    """Decorator: make a subclass of `Teacher` the one of specs with `kind = NAME`.

    help: a line about it; by default the first line of the docstring.
    """

    def register(kind: Kind) -> Kind:
        TEACHERS.add(name, kind, kind, help)
        return kind

    return register


def open_teacher(spec: ModelSpec, device: torch.device, mode: str, *, online: bool = True) -> Teacher:
    """The teacher of a spec, not loaded yet. online: it will teach a run itself.

    Raises:
        UsageError: no such kind, the kind refuses the spec, or it cannot teach a run.
    """
    teacher: Teacher = TEACHERS.get(spec.kind)(spec, device, mode)
    if online and teacher.gives == "top-k":
        raise UsageError(f"the teacher {teacher} gives a top-k only; make a cache with cache-teacher, and give --cache")
    return teacher
