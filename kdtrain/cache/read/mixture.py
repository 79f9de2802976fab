"""Several data sets as one, drawn in proportion to weights: `Mixture`, for any training loop of PyTorch's.

The order is that of a run of `kdtrain distill` over the same caches with the same seed (`data.order.MixedOrder`).
"""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from kdtrain.cache.read.reader import Sequences
from kdtrain.data import order
from kdtrain.errors import UsageError, as_whole

_SAME = {
    "seq_len": "sequences of {} tokens",
    "tokenizer_size": "a tokenizer of {} entries",
    "tokenizer_digest": "the tokenizer {:.12}",
    "document_mask": "a document mask: {}",
}
"""What members must have in common, and the words for it in messages."""
_TAUGHT = {"vocab_size": "a teacher with {} logits"}


class _Members(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Tensor]: ...


class Mixture(Sequences):
    """Several splits of caches as one map-style data set, whose length is an epoch.

    An epoch has as many sequences as all members hold, and each member gives its share of them, to within one sequence.
    Item i is the i-th sequence of the epoch, so that a loader draws in the right proportion whether it shuffles or not.
    Call `set_epoch` before each further epoch (`transformers.Trainer` and `accelerate` do): nothing of a member is
    repeated before all of it was read.

    Members may be caches of bare tokens. Their items have the tensor `replay`, by which a `Student` trains on them by
    cross-entropy alone. Members with different codecs, whose items differ, need batches of one member each: `batches`.

    Args:
        members: such as `cache["train"]` of several caches.
        weights: above 0; by default in proportion to the sizes of the members.
        seed: of the order.

    UsageError: the members do not fit together, or a weight gives one no sequence an epoch.
    """

    def __init__(self, members: Sequence[_Members], weights: Sequence[float] | None = None, *, seed: int = 0) -> None:
        try:
            self.order = order.MixedOrder.weighted([len(each) for each in members], weights)
        except (ValueError, TypeError) as error:
            raise UsageError(f"a mixture needs data sets with a length, and weights above 0: {error}") from None
        self.members = list(members)
        self.seed = as_whole(seed, "seed")
        self.epoch = 0
        names, settings, taught, spans = [*zip(*filter(None, map(_stated, members)), strict=True)] or [()] * 4
        refuse_unlike(names, settings, taught)
        self.temperature_range = common_range(names, spans)
        """The lowest and the highest T at which all members are right; None where no member states one."""

    def __len__(self) -> int:
        """Return the number of sequences of an epoch."""
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, counted from 0. Workers of a loader see it when they start."""
        self.epoch = as_whole(epoch, "epoch")

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return several sequences, in one read of each member; PyTorch's loaders call this."""
        if wrong := [each for each in indices if not 0 <= each < len(self)]:
            raise IndexError(f"{wrong[0]} is not a place among the {len(self)} of an epoch")
        start = self.epoch * len(self)
        drawn = np.array([self.order.batch(self.seed, start + int(each), 1)[0] for each in indices])
        members = self.order.members(drawn)
        found = dict[int, dict[str, Tensor]]()
        for member in np.unique(members).tolist():
            places = np.flatnonzero(members == member)
            numbers = (drawn[places] - self.order.firsts[member]).tolist()
            source = self.members[member]
            several = getattr(source, "__getitems__", None)
            items = several(numbers) if several is not None else [source[each] for each in numbers]
            found |= zip(places.tolist(), map(self._completed, items), strict=True)
        return [found[place] for place in range(len(drawn))]

    def _completed(self, item: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if "ids" not in item and "logprobs" not in item:
            return {**item, "replay": torch.tensor(True)}
        if "temperature_range" in item and self.temperature_range is not None:
            return {**item, "temperature_range": torch.tensor(self.temperature_range, dtype=torch.float64)}
        return dict(item)

    def batches(self, batch_size: int, *, drop_last: bool = False) -> "Batches":
        """Return batches of one member each, in the proportion of the mixture, for `DataLoader(batch_sampler=...)`."""
        return Batches(self, as_whole(batch_size, "batch_size", 1), drop_last)

    def __repr__(self) -> str:
        given = ", ".join(f"{quota} of {each!r}" for quota, each in zip(self.order.quotas, self.members, strict=True))
        return f"Mixture: {len(self)} sequences per epoch, {given}"


class Batches(Sampler[list[int]]):
    """Places of an epoch of a mixture, gathered into batches of one member each; a batch is yielded when it is full."""

    def __init__(self, mixture: Mixture, batch_size: int, drop_last: bool) -> None:
        self.mixture, self.batch_size, self.drop_last = mixture, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        waiting: dict[int, list[int]] = {}
        for place, member in enumerate(self.mixture.order.turns().tolist()):
            own = waiting.setdefault(member, [])
            own.append(place)
            if len(own) == self.batch_size:
                yield waiting.pop(member)
        if not self.drop_last:
            yield from waiting.values()

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        spare = 0 if self.drop_last else self.batch_size - 1
        return sum((quota + spare) // self.batch_size for quota in self.mixture.order.quotas)


def _stated(member: Any) -> tuple[str, Any, bool, tuple[float, float] | None] | None:
    """Return the folder, the settings, whether there is a teacher, and the range of T of a split, a view, or a part.

    None: nothing is known of it.
    """
    if hasattr(member, "manifest"):
        settings, known = member.manifest.settings, member.manifest.temperature_range
        span = None if known is None else (known["min"], known["max"])
        return str(member.folder), settings, settings.codec.taught, span
    if hasattr(member, "view"):
        record = member.view.record
        own = {"tokenizer_size": record.sizes[1], "tokenizer_digest": record.settings["tokenizer"]}
        settings = SimpleNamespace(seq_len=member.view.seq_len, document_mask=None, vocab_size=None, **own)
        return str(member.view.folder), settings, True, (1.0, 1.0)
    return _stated(member.dataset) if hasattr(member, "dataset") else None


def refuse_unlike(names: Sequence[str], members: Sequence[Any], taught: Sequence[bool]) -> None:
    """Refuse to mix data sets of different shapes or tokenizers, or with teachers of different vocabularies.

    members: with the attributes seq_len, tokenizer_size, tokenizer_digest (None: unknown), document_mask, vocab_size.

    UsageError: names two of them, and what each has.
    """
    numbers = range(len(members))
    with_teacher = [number for number in numbers if taught[number]]
    for properties, own in ((_SAME, numbers), (_TAUGHT, with_teacher)):
        for number in own[1:]:
            for name, text in properties.items():
                values = getattr(members[own[0]], name), getattr(members[number], name)
                if values[0] != values[1] and None not in values:
                    one, other = (text.format({True: "yes", False: "no"}.get(each, each)) for each in values)
                    raise UsageError(
                        f"{names[own[0]]} and {names[number]} cannot be mixed: one has {one}, the other {other}; leave "
                        "one out, or build it again like the other"
                    )


def common_range(names: Sequence[str], spans: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Return the temperatures at which all members are right; None if no span is known. UsageError: there are none."""
    known = {name: span for name, span in zip(names, spans, strict=True) if span is not None}
    if not known:
        return None
    low = max(span[0] for span in known.values())
    high = min(span[1] for span in known.values())
    if low > high:
        each = ", ".join(f"{name} is for {span[0]:.3g} to {span[1]:.3g}" for name, span in known.items())
        raise UsageError(f"no temperature is right for all members: {each}; leave one out")
    return low, high
