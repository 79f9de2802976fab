"""`kd.CacheWriter`: a cache from anyone's own teacher, one sequence after the other.

Each sequence brings its logits, and what the codec keeps of them is encoded at once; a shard is published when it is
full. So a killed program loses the shard in work. The same sequences in the same order resume: those of a published
shard need no logits, which may therefore be a function that is called only where they are missing. The fidelity is
measured at the end, on the logits of the first validation sequences.

What it gives up: what is kept of one shard is held in memory, and one process writes.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.codec import broken, encode_sequences
from kdtrain.cache.format.manifest import CacheSettings, Manifest
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.read.shard import Shard, batch_of, shard_errors
from kdtrain.cache.write import fidelity
from kdtrain.cache.write.answers import ShardAnswers
from kdtrain.cache.write.shard_writer import intact_record
from kdtrain.cache.write.writer import CacheBuilder
from kdtrain.config.sections import CodecConfig
from kdtrain.data.corpus import by_hash, rank
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError, as_whole
from kdtrain.files import canonical_json
from kdtrain.models.output_head import HeadPart
from kdtrain.models.tokenizer import load_tokenizer, tokenizer_digest

Numbers = Tensor | np.ndarray
SPLITS = ("train", "validation")
APART = 0.1
"""Nats, root mean square, by which log p of the labels may differ in a resume: formats and devices round."""
_OTHERS = "give the same sequences in the same order, or another folder"


class CacheWriter:
    """Writes a cache; use it in a `with` block, whose end without an error finishes the cache.

        with kd.CacheWriter("cache/mine", tokenizer="org/name", teacher="my-teacher", num_samples=50) as writer:
            for tokens in sequences:                                  # [T + 1]
                writer.add(tokens, lambda: my_teacher(tokens[:-1]))   # [T, V]

    Args:
        out: the folder. An unfinished cache of the same settings is resumed.
        tokenizer: a fast tokenizer of transformers, a folder or a hub id; students of the cache must have the same.
        teacher: its name, or plain values that say who it is: `spec` (the name), and a digest of its weights if the
            cache is to say so. It is in the manifest; a cache is only resumed by the same teacher.
        top_k: the most likely entries, kept exactly; without them the cache serves T = 1 only.
        num_samples: samples from the rest; by default 50 without `top_k`, else none.
        dense: keep all log-probabilities in fp16 instead.
        head: the output head of a teacher that brings hidden states [T, D] instead of logits.
        data: plain values on the text, for the manifest.
        seed: of the samples.
        sequences_per_shard: sequences in one file.

    Raises:
        UsageError: settings that cannot be. Whether the folder can be used is known at the first sequence.
    """

    cache_type: type[LocalCache] = LocalCache
    """What `finish` opens the cache as; `kdtrain.library` sets its own."""

    def __init__(
        self,
        out: Path | str,
        *,
        tokenizer: Any,
        teacher: str | Mapping[str, Any],
        top_k: int = 0,
        num_samples: int | None = None,
        dense: bool = False,
        head: HeadPart | Tensor | None = None,
        data: Mapping[str, Any] | None = None,
        seed: int = 0,
        sequences_per_shard: int = 512,
    ) -> None:
        self.out = Path(out)
        self.codec = CodecConfig(top_k=top_k, num_samples=num_samples, dense=dense)
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self.teacher = {"spec": teacher} if isinstance(teacher, str) else dict(teacher)
        head = HeadPart(head) if isinstance(head, Tensor) else head
        if not isinstance(head, HeadPart | None):
            raise UsageError(f"head is a {type(head).__name__}; give an output head, or its weight [V, D]")
        if head is not None and head.weight is not None:  # logits of 16-bit products would be rounded
            bias = None if head.bias is None else head.bias.detach().float()
            head = replace(head, weight=head.weight.detach().float(), bias=bias)
        self.head = head
        self.data = {"source": "kd.CacheWriter"} if data is None else dict(data)
        if not isinstance(self.teacher.get("spec"), str):
            raise UsageError("teacher has no spec, its name; give a name, or values with spec among them")
        try:
            canonical_json([self.teacher, self.data])
        except (TypeError, ValueError):
            raise UsageError("teacher and data hold text, finite numbers, lists and tables only") from None
        self.seed = as_whole(seed, "seed")
        self.sequences_per_shard = as_whole(sequences_per_shard, "sequences_per_shard", 1)
        self._lock = threading.RLock()  # a function that gives logits may close the writer
        self._builder: CacheBuilder | None = None
        self._answers = ShardAnswers()
        self._there: dict[str, int] = {}
        """How many sequences the shard in work of a split has, where one is there already."""
        self._sample: dict[int, Tensor] = {}
        """Logits [1, positions, V] of the validation sequences that the fidelity is measured on, by their numbers."""
        self._closed = False

    def add(
        self,
        tokens: Numbers,
        logits: Numbers | Callable[[], Numbers],
        *,
        split: str | None = None,
        loss_mask: Numbers | None = None,
        segments: Numbers | None = None,
    ) -> None:
        """Add the next sequence of a split. Threads may call it; the sequences are added one after the other.

        Args:
            tokens: [T + 1]. T is the same for all sequences.
            logits: [T, V], at t about tokens[t + 1]: logits or log-probabilities, with a `head` hidden states [T, D];
                or a function that gives them, which is called only if they are needed.
            split: train or validation; by default one sequence in twenty goes to validation, by a hash of its tokens.
            loss_mask: bool [T], at t about tokens[t + 1]; by default all count.
            segments: [T], the number, from 0, of the document that tokens[t] is of, if the teacher let no document see
                another; a student then does the same. All sequences have them or none.

        Raises:
            UsageError: a shape or value that does not fit; the sequences are not those of the shard, or of the finished
                cache, that is there, or their logits are not; the writer is finished or closed.
            RunError: the folder cannot be written; more than one in a thousand sequences have non-finite logits.
        """
        with self._lock:
            if self._closed:
                raise UsageError(f"{self.out}: this writer is finished or closed; make another one")
            row = _row(tokens, loss_mask, segments)
            tokens_T = row.tokens
            length = len(row.loss_mask)
            if split is None:
                split = by_hash(rank(tokens_T.astype("<u4").tobytes().hex()), ("validation",))
            if split not in SPLITS:
                raise UsageError(f"split '{split}' is unknown; use train or validation")
            answer: Tensor | None = None
            if self._builder is None:
                answer = self._requested(logits, length)
                self._builder = self._open(length, answer.shape[1], segments is not None)
            builder, settings = self._builder, self._builder.settings
            if length != settings.seq_len:
                raise UsageError(f"this sequence has {length + 1} tokens, and the first one {settings.seq_len + 1}")
            if (segments is not None) != settings.document_mask:
                raise UsageError("segments: give them with every sequence, or with none")
            if tokens_T.max() >= settings.vocab_size:
                raise UsageError(f"token {tokens_T.max()} is beyond the logits' vocabulary of {settings.vocab_size}")
            own = builder.splits[split]
            number = own.taken + len(own.rows)
            if not own.rows:
                record = intact_record(self.out, cache_format.shard_name(split, len(own.digests)))
                same = record is not None and record["settings_sha256"] == settings.digest()
                self._there[split] = record["sequences"] if record and same else 0
            published = self._there[split]
            if (there := builder.manifest) is not None:  # its folder is not locked, and stays as it is
                if number >= there.splits[split]["sequences"]:
                    raise self._others(there, split)
                if not published:
                    raise UsageError(f"{self.out} holds a damaged shard; run kdtrain verify {self.out} --repair first")
            taken, positions = builder.sample or (0, 0)
            held = split == "validation" and number < taken and there is None
            if answer is None and (held or not published):
                answer = self._requested(logits, length)
            kept: dict[str, np.ndarray] = {}
            if answer is not None:
                if answer.shape[1] != settings.vocab_size:
                    raise UsageError(
                        f"logits of {answer.shape[1]} entries, and the first ones had {settings.vocab_size}"
                    )
                if len(own.rows) < published:
                    self._refuse_other_logits(answer, tokens_T, split, number)
                if held:
                    chosen = answer[fidelity.sample_positions(length, positions).to(answer.device)].float().cpu()
                    finite = not broken(answer[None]).any()
                    self._sample[number] = (chosen if finite else torch.full_like(chosen, torch.nan))[None]
                if not published:
                    labels = torch.from_numpy(tokens_T[None, 1:].astype(np.int64))
                    place: dict[str, Any] = {"seed": self.seed, "split": split, "first": number}
                    arrays = encode_sequences(answer[None], labels, settings.codec, **place)
                    kept = {name: values[0] for name, values in arrays.items()}
            builder.add(split, replace(row, tokens=tokens_T.astype(np.int32), kept=kept))

    def finish(self) -> LocalCache:
        """Publish the last shards, measure the fidelity, write index and manifest; return the finished cache.

        Raises:
            UsageError: a split has no sequence; the folder holds a finished cache of other sequences; an earlier call
                failed, or the writer was closed before.
            RunError: the folder cannot be written.
        """
        with self._lock:
            builder = self._builder
            known = {} if builder is None else builder.splits
            empty = [split for split in SPLITS if split not in known or not known[split].taken + len(known[split].rows)]
            if builder is None or empty:
                raise UsageError(f"{self.out}: there is no sequence for {empty[0]}; add some with split='{empty[0]}'")
            if self._closed and builder.manifest is None:
                raise UsageError(f"{self.out}: this writer is closed; another one with the same sequences resumes")
            self._closed = True  # the last shards may be short: no sequence can follow
            for split in SPLITS:
                builder.end_split(split)
            if (there := builder.manifest) is None:
                taken, positions = builder.sample or (1, 1)
                builder.sample = min(taken, known["validation"].taken), positions
                stored = iter([self._sample[number] for number in range(builder.sample[0])])
                self._answers.logits = lambda tokens_1T, segments: next(stored)  # called once for each, in order
                try:
                    builder.finish()
                finally:
                    self._answers.logits = None
            elif more := [split for split in SPLITS if there.splits[split]["sequences"] != known[split].taken]:
                raise self._others(there, more[0])
        return self.cache_type(self.out)

    def close(self) -> None:
        """Release the folder without finishing; published shards stay, and the same sequences resume."""
        with self._lock:
            self._closed = True
            if self._builder is not None:
                self._builder.close()

    def __enter__(self) -> "CacheWriter":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def _others(self, there: Manifest, split: str) -> UsageError:
        number = there.splits[split]["sequences"]
        return UsageError(f"{self.out} holds a finished cache of {number} sequences for {split}; {_OTHERS}")

    def _open(self, seq_len: int, width: int, document_mask: bool) -> CacheBuilder:
        """Open the folder, once T and V are known."""
        if width < len(self.tokenizer):
            raise UsageError(
                f"the tokenizer has {len(self.tokenizer)} entries and the logits {width}; give the teacher's own"
            )
        codec = CodecSpec.requested(self.codec, width)
        settings = CacheSettings(
            codec=codec,
            seq_len=seq_len,
            tokenizer_size=len(self.tokenizer),
            tokenizer_digest=tokenizer_digest(self.tokenizer),
            teacher=self.teacher,
            data=self.data,
            document_mask=document_mask,
            seed=self.seed,
            sampling=codec.sampling,
            sequences_per_shard=self.sequences_per_shard,
        )
        builder = CacheBuilder(self.out, settings, teacher=self._answers, tokenizer=self.tokenizer)
        builder.others = _OTHERS
        for split in SPLITS:
            builder.open_split(split)
        builder.sample = fidelity.sample_size(self.sequences_per_shard, seq_len, width)
        return builder

    def _requested(self, logits: Numbers | Callable[[], Numbers], length: int) -> Tensor:
        """Return the logits [T, V] of a sequence in fp32."""
        with torch.no_grad():
            answer = logits() if callable(logits) else logits
            given = answer.detach() if isinstance(answer, Tensor) else torch.from_numpy(_array(answer, "logits"))
            given = given[0] if given.ndim == 3 and len(given) == 1 else given
            if given.ndim != 2 or len(given) != length or not given.is_floating_point():
                shape = [*given.shape]
                last = "D" if self.head else "V"
                raise UsageError(f"logits of shape {shape}: give [{length}, {last}], a row for each token but the last")
            return given.float() if self.head is None else self.head.to(given.device)(given.float())

    def _refuse_other_logits(self, answer: Tensor, tokens_T: np.ndarray, split: str, number: int) -> None:
        """Raise a UsageError if a published shard has other log-probabilities of these labels."""
        assert self._builder is not None
        path = cache_format.shard_path(self.out, cache_format.shard_name(split, number // self.sequences_per_shard))
        spec = self._builder.settings.codec
        with shard_errors(path), closing(Shard(path, spec)) as shard:
            stored = batch_of([shard.read(np.array([number % self.sequences_per_shard]))], spec)
        assert stored.targets is not None
        labels = torch.from_numpy(tokens_T[1:].astype(np.int64)).to(answer.device)
        now = answer.log_softmax(-1).gather(-1, labels[:, None])[:, 0].cpu()
        apart = float((now - stored.targets.label_logprob)[stored.loss_mask[0]].square().mean().sqrt())
        if apart > APART and torch.equal(stored.tokens[0], labels.new_tensor(tokens_T).cpu()):
            raise UsageError(f"{self.out} holds other logits of this sequence, {apart:.2g} nats apart; {_OTHERS}")


def _row(tokens: Numbers, loss_mask: Numbers | None, segments: Numbers | None) -> PackedRow:
    """Pack a sequence into a row. UsageError: a shape or value that does not fit."""
    tokens_T = _array(tokens, "tokens")
    if tokens_T.ndim != 1 or len(tokens_T) < 2 or tokens_T.dtype.kind not in "iu" or tokens_T.min() < 0:
        raise UsageError(f"tokens of shape {[*tokens_T.shape]}: give one sequence of T + 1 token ids")
    length = len(tokens_T) - 1
    mask = np.ones(length, bool) if loss_mask is None else _array(loss_mask, "loss_mask")
    documents = np.zeros(length, np.int32) if segments is None else _array(segments, "segments")
    for name, values in (("loss_mask", mask), ("segments", documents)):
        if values.shape != (length,):
            raise UsageError(f"{name} of shape {[*values.shape]}: give [{length}], one less than tokens")
    if not np.isin(mask, (0, 1)).all():
        raise UsageError("loss_mask: give True and False, or 1 and 0")
    if documents.dtype.kind not in "iu":
        raise UsageError(f"segments of {documents.dtype}: give whole numbers")
    if documents.min() < 0 or documents.max() >= length:
        raise UsageError(f"segments: number the documents of a sequence from 0 to at most {length - 1}")
    return PackedRow(tokens_T, mask.astype(bool), documents.astype(np.int32))


def _array(values: Any, name: str) -> np.ndarray:
    with suppress(TypeError, ValueError):
        found = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        if found.dtype.kind in "biuf":
            return found
    raise UsageError(f"{name}: give a tensor or an array of numbers")
