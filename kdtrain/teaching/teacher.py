"""What a teacher is: tokens in; hidden states, logits or a top-k out; who it is, what it costs, how it is sharded.

A spec names the kind of its teacher (`kind`, by default `local`), and the kind is a class that `register_teacher` adds.
A cache is built from its `answers`; one that may also teach a run while it trains is an `OnlineTeacher`.

The stages of a teacher, so that the memory plan comes before the weights, and an error of one rank before collectives:

    open                    reads configurations only; `vocab_size` and `footprint` are known
    cut                     the same; plans the parts of tensor ranks
    load, check, meet       one rank at a time may fail
    pack                    the same; weights in fewer bits, where the spec asks for them, and their cost
    prepare                 cuts, shards and compiles; every rank must call it
    targets, answers        in any number

Shape suffixes: B sequences, T positions, N tokens (B*T), V vocabulary, D width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kdtrain.cache.format.manifest import CacheSettings, WeightsCost
from kdtrain.cache.write.answers import LogitAnswers, ShardAnswers
from kdtrain.config.choices import TEACHERS
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, split
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import ends_of, load_tokenizer
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import DenseTargets
from kdtrain.parallel.footprint import ModelFootprint
from kdtrain.parallel.layout import RankLayout

MEASURED = 64
"""Most sequences on which the cost of packed weights is measured."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """The settings by which a teacher continues prompts."""

    temperature: float
    """Divides the logits; 0 takes the most likely token."""
    top_p: float
    end_tokens: tuple[int, ...]
    """Each ends a row."""
    seed: int
    batch_size: int | None
    """Rows that are continued together; None: that does not decide the bits."""
    policy: Mapping[str, Any] | None = None
    """The student that writes in place of the teacher: spec, weights_digest, step, round and attempt."""

    def to_json(self) -> Mapping[str, Any]:
        """Return a plain record, for a cache's settings."""
        record = {**asdict(self), "end_tokens": list(self.end_tokens)}
        return {name: value for name, value in record.items() if name != "policy" or value is not None}


class Teacher:
    """A teacher of one kind; a subclass has at least `vocab_size`, `digest` and `answers`.

    Args:
        spec: name, tokenizer, and the kind's own `options`.
        device: where its answers are computed.
        mode: number format of its forward: fp32, bf16 or fp16.
    """

    cost: WeightsCost | None = None
    """What `pack` measured."""
    writing: Writing | None = None
    """How it continues the prompts of a cache's rows; None: the rows have their text."""
    texts: tuple[dict[str, int | None], Mapping[str, Iterator[PackedRow]]] | None = None
    """What prompts are cut to, and the rows of each split, where it brings both; None: they are of the data."""

    def __init__(self, spec: ModelSpec, device: torch.device, mode: str) -> None:
        self.spec, self.device, self.mode = spec, device, mode

    @staticmethod
    def open(spec: ModelSpec, device: torch.device, mode: str) -> "Teacher":
        """Open the teacher of a spec, not loaded yet. UsageError: no such kind, or the kind refuses the spec."""
        teacher: Teacher = TEACHERS.get(spec.kind)(spec, device, mode)
        return teacher

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The teacher's name in logs and tables."""
        return self.spec.name

    @property
    def vocab_size(self) -> int:
        """The columns of the teacher's logits, padding included."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """The digest of the teacher's weights, once they are loaded: another digest is another teacher."""
        raise NotImplementedError

    @property
    def identity(self) -> Mapping[str, Any]:
        """The teacher's identity for a cache's manifest, in values of JSON; a resumed build must give it again."""
        return {"spec": self.name, "kind": self.spec.kind, "options": self.spec.options, "weights_digest": self.digest}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the teacher's spec."""
        return load_tokenizer(self.spec)

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end its texts, ascending. UsageError: the generation settings cannot be read."""
        return ends_of(self.spec, self.tokenizer)

    def footprint(self, seq_len: int) -> ModelFootprint | None:
        """Estimate the memory of a forward of sequences of `seq_len`, before loading; None if there is no estimate."""
        return None

    def cut(self, layout: RankLayout, alike: int) -> None:
        """Have `prepare` cut the model over the tensor ranks of a layout; called before `footprint` and `load`.

        alike: how many of these, one behind the other, always read the same sequences. UsageError: it cannot be cut.
        """
        raise UsageError(f"--teacher-tensor-parallel cannot cut a teacher of kind {self.spec.kind}; leave it out")

    def load(self, sharded: bool = False) -> None:
        """Load its weights; `sharded`: `prepare` will shard them. UsageError: they cannot be loaded."""

    def pack(self, rows: Iterable[Batch], *, document_mask: bool = False) -> None:
        """Hold the weights in the format of the spec's `weights`; its `cost` is measured on `rows` if there are any."""

    def check(self, seq_len: int, document_mask: bool) -> None:
        """Refuse (UsageError) sequences that are too long, or a document mask that it cannot apply."""

    def prepare(self, *, mesh: Any = None, compile: bool = False) -> None:
        """Shard and compile; every rank must call it. mesh: of the ranks that share it; None: each has the whole."""
        if mesh is not None:
            raise UsageError(f"a teacher of kind {self.spec.kind} is not sharded; leave --teacher-parallel out")

    def begin(self, earlier: Mapping[str, Any] | None, finished: bool) -> None:
        """Prepare for a cache to make, on every rank; `identity` is read after it, and may be the earlier one.

        earlier: the `identity` with which the cache was begun; None: it is a new one. finished: it is whole.

        UsageError: it is another teacher's.
        """

    def write(self, how: Writing) -> None:
        """Continue the prompts of rows from here on. UsageError: it writes no text."""
        raise UsageError(f"a teacher of kind {self.spec.kind} writes no text; leave --generate out")

    def answers(self, settings: CacheSettings) -> ShardAnswers:
        """Return the `ShardAnswers` that fill the shards of a cache with these settings."""
        raise NotImplementedError


class OnlineTeacher(Teacher):
    """A teacher of one kind; a subclass has at least `vocab_size`, `digest` and `logits`."""

    sharded = False
    """True if a forward needs all ranks."""

    @staticmethod
    def open(spec: ModelSpec, device: torch.device, mode: str) -> "OnlineTeacher":
        """Open the teacher of a spec. UsageError: as `Teacher.open`, or it cannot teach a run."""
        found = Teacher.open(spec, device, mode)
        if not isinstance(found, OnlineTeacher):
            raise UsageError(
                f"the teacher {found} gives a top-k only; make a cache with cache-teacher, and give --cache"
            )
        return found

    @staticmethod
    def of(model: SplitModel | PreTrainedModel, mode: str = "fp32") -> "OnlineTeacher":
        """Make the teacher of a model that is loaded already, in evaluation mode."""
        model = model if isinstance(model, SplitModel) else split(model)
        name = type(model.model).__name__
        teacher = OnlineTeacher.open(ModelSpec(name=name, source=name), model.model.device, mode)
        teacher.use(model)
        return teacher

    def use(self, model: SplitModel) -> None:
        """Take a model that is loaded, in place of `load`."""
        raise NotImplementedError

    def footprint(self, seq_len: int) -> ModelFootprint | None:
        """Return by default the memory of the logits alone, [B, T, V] in fp32, once while made and once as targets."""
        size = self.vocab_size
        sizes: dict[str, Any] = {"vocabulary": size, "width": size, "parameters": 0, "layers": 0, "in_layers": 0}
        return ModelFootprint(name=self.name, tied=False, kept=4.0 * size, **sizes)

    def meet(self, student: SplitModel) -> None:
        """Take from the student what the teacher shares with it; called once, when the student is loaded and whole."""

    def logits(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Return logits [B, T, V] of the next token, in fp32 on any device, without gradients.

        tokens_BT: int64, on any device. segments_BT: number of the document of each position; None: no document mask.
        """
        raise NotImplementedError

    def targets(
        self, batch: Batch, vocab_size: int, *, document_mask: bool = False, layers: tuple[int, ...] = ()
    ) -> Batch:
        """Return `batch` with targets over the first `vocab_size` entries, and the states of `layers`; no gradients.

        layers: see `layer_widths`.
        """
        assert not layers, "layer_widths refuses them"
        with torch.no_grad():
            logits_BTV = self.logits(batch.tokens[:, :-1], batch.segments if document_mask else None)
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        logits_NV = rearrange(logits_BTV.to(labels_N.device), "B T V -> (B T) V")
        return replace(batch, targets=DenseTargets.from_logits(logits_NV, labels_N, vocab_size))

    def layer_widths(self) -> list[int]:
        """Return D of the embedding and of each layer, for the hidden-state loss.

        UsageError: the teacher gives no hidden states.
        """
        raise UsageError(f"a teacher of kind {self.spec.kind} gives no hidden states; leave --hidden-loss out")

    def answers(self, settings: CacheSettings) -> ShardAnswers:
        """Return answers from a forward for each batch."""
        return LogitAnswers(self.logits, settings, self.sharded)


Kind = TypeVar("Kind", bound=Callable[[ModelSpec, torch.device, str], Teacher])


def register_teacher(name: str, *, help: str = "") -> Callable[[Kind], Kind]:
    """Return a decorator that makes a subclass of `OnlineTeacher` the teacher of specs with `kind = NAME`.

    help: a line about it; by default the first line of the docstring.
    """
    return TEACHERS.registers(name, help)
