"""Several sources as one: a step draws their sequences in proportion to weights (`data.order.MixedOrder`).

A micro-batch may hold sequences of several members. Those with the same codec become one set of targets; others stay
apart, and the loss goes through them one by one (`objective.mixed`). The sequences of a rank's share of a step are in
the order of their members, so that most micro-batches hold one member. A member without a teacher is trained on by
cross-entropy, beside members with one.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from kdtrain.cache.read.mixture import common_range, refuse_unlike
from kdtrain.data.order import MixedOrder
from kdtrain.errors import UsageError, printable
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import ANY_T
from kdtrain.training.sources.source import Facts, Member, Source, meet


class MixtureSource:
    """One split of several sources."""

    def __init__(self, members: Sequence[Source], facts: Facts, mixture: MixedOrder) -> None:
        self.members, self.facts, self.mixture = members, facts, mixture
        self.order = mixture.order
        self.overlaps = all(each.overlaps for each in members)
        self.repeatable = all(each.repeatable for each in members)
        self.by_member = False
        """Whether the loss goes through each member by itself, because alpha is that of its own teacher."""
        self.write_collective = self._write if any(hasattr(each, "write_collective") for each in members) else None

    def __len__(self) -> int:
        return sum(self.mixture.sizes)

    def meet(self, student: Any, teacher: Any) -> None:
        """Hand the student and the teacher to the members."""
        for each in self.members:
            meet(each, student, teacher)

    def _write(self, indices: np.ndarray) -> None:
        members = self.mixture.members(indices)
        for number, each in enumerate(self.members):
            if (write := getattr(each, "write_collective", None)) is not None:
                write(indices[members == number] - self.mixture.firsts[number])

    def read(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices`, numbered as if the members lay one behind the other. RunError: as theirs."""
        members = self.mixture.members(indices)
        runs = np.split(np.arange(len(indices)), np.flatnonzero(np.diff(members)) + 1)
        numbers = tuple(int(members[run[0]]) for run in runs)
        own = zip(runs, numbers, strict=True)
        batches = [self.members[each].read(indices[run] - self.mixture.firsts[each]) for run, each in own]
        taught = self.facts.targets != "none"
        if len(batches) == 1 and not self.by_member and not (taught and batches[0].targets is None):
            return batches[0]
        return Batch.joined(batches, numbers if self.by_member else (), taught)


def mix(splits: dict[str, list[Source]], weights: Sequence[float] | None) -> dict[str, Source]:
    """Mix the members of each split of a run, the same ones in `train` and `validation`.

    weights: what a step draws of each; by default in proportion to their training sequences.

    UsageError: the members do not fit together, two are the same, or a weight gives one no sequence an epoch.
    """
    sizes = {split: tuple(len(each) for each in members) for split, members in splits.items()}
    names = [each.facts.name for each in splits["train"]]
    facts = _common([each.facts for each in splits["train"]])
    try:
        quotas = MixedOrder.weighted(sizes["train"], weights).quotas
    except ValueError as error:
        raise UsageError(f"{' and '.join(names)} cannot be mixed: {error}; change --cache-weights") from None
    identity = json.dumps([[each.facts.identity, quota] for each, quota in zip(splits["train"], quotas, strict=True)])
    found: dict[str, Source] = {}
    for split, members in splits.items():
        mixture = MixedOrder(sizes[split], quotas)
        own = {
            short: Member(each.facts, range(first, first + len(each)), quota, quota / sum(quotas))
            for short, each, first, quota in zip(_short(names), members, mixture.firsts, quotas, strict=True)
        }
        digest = hashlib.sha256(identity.encode()).hexdigest()
        found[split] = MixtureSource(
            members, Facts(**facts, name=" + ".join(names), identity=digest, members=own), mixture
        )
    return found


def _common(members: list[Facts]) -> dict[str, Any]:
    """Return the facts that the members have together. UsageError: they cannot be mixed."""
    taught = [each for each in members if each.targets != "none"]
    for number, each in enumerate(members):
        for other in members[:number]:
            if other.identity == each.identity:
                raise UsageError(
                    f"{other.name} and {each.name} are the same; name it once, with a larger one of --cache-weights"
                )
    names = [each.name for each in members]
    refuse_unlike(names, members, [each.targets != "none" for each in members])
    low, high = (
        common_range(names, [None if each.targets == "none" else each.temperature_range for each in members]) or ANY_T
    )
    targets = "none"
    if taught:
        kinds = {each.targets for each in taught}
        targets = kinds.pop() if len(kinds) == 1 else "mixed"
    specs = dict.fromkeys(str(each.teacher["spec"]) for each in taught if each.teacher.get("spec"))
    digests = [each.tokenizer_digest for each in members if each.tokenizer_digest is not None]
    return {
        "seq_len": members[0].seq_len,
        "tokenizer_size": members[0].tokenizer_size,
        "tokenizer_digest": next(iter(digests), None),
        "document_mask": members[0].document_mask,
        "vocab_size": taught[0].vocab_size if taught else max(each.vocab_size for each in members),
        "tokenizer": next((each.tokenizer for each in members if each.tokenizer is not None), None),
        "targets": targets,
        "top_k": min((each.top_k for each in taught), default=0),
        "num_samples": min((each.num_samples for each in taught), default=0),
        "temperature_range": (low, high),
        "teacher": {"spec": " and ".join(specs)} if specs else {},
        "end_tokens": tuple(sorted({token for each in members for token in each.end_tokens})),
    }


def _short(names: Sequence[str]) -> list[str]:
    """Return the shortest ends of these paths that are all different, as names of metrics."""
    parts = [[part for part in name.split("/") if part] or [name] for name in names]
    for length in range(1, max(map(len, parts)) + 1):
        short = [printable("-".join(each[-length:]))[-60:] for each in parts]
        if len({*short}) == len(short):
            return short
    return [f"{number}-{name}" for number, name in enumerate(short, 1)]
