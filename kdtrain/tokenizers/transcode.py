"""Documents in a teacher's tokens, encoded again in a student's.

The bytes of a document are those of its tokens; between two events (special tokens) they are one text, which the
student's tokenizer cuts. The result is a stream that `packing.rows_of` cuts into rows, whose tokens know the
teacher's labels of the same bytes. A token counts in the loss if all its bytes belong to labels that count.

A cache's rows are one stream if each begins with the last token of the row before; else each row stands alone, and a
document begins where its part in the row begins.

Given up: a character that is cut off at the end of a row that stands alone is dropped. A document that is not UTF-8, or
that the student's tokenizer rewrites (`bytes`), is left out and counted. A document is encoded whole, in memory, some
300 bytes for each of its tokens; one of more than `MOST_TOKENS` is refused.

Shapes: N tokens of the teacher, M of the student.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtrain.data.bytes import ByteTokenizer, SpecialTokens, spelled
from kdtrain.data.packed import STREAM
from kdtrain.data.packing import split_text
from kdtrain.data.spelling import Spelling
from kdtrain.errors import UsageError

_Array = np.ndarray[Any, np.dtype[Any]]

TAUGHT = np.dtype([*STREAM.descr, ("position", "<i8")])
"""The teacher's stream: besides the packer's fields the position of the cache, row * T + t, whose label the token is;
-1 for a first token, which is no label."""
TRANSCODED = np.dtype([*STREAM.descr, ("source", "<i8"), ("taught", "<i4"), ("prefix", "<i4")])
"""The student's stream. source: the position of the cache whose label holds the token's first byte, and is spelled with
it (`Spelling`) or begins with it; taught: that label; -1: none that counts. prefix: a number of the student's tokens
since that label began; 0: it begins with this one."""
MOST_TOKENS = 1 << 24
"""The teacher's tokens of the longest document."""
_BATCH = 1 << 18
_LONGEST = 256
"""Most bytes of a token in the mean over many: published ones have three to five, and at most 128 or so in one."""


def teacher_stream(rows: Iterable[Mapping[str, _Array]], joined: bool, teacher: ByteTokenizer) -> Iterator[_Array]:
    """Yield the stream behind rows of T + 1 tokens, some at a time; a loss mask is 1 where the label counts.

    rows: tokens [n,T+1], loss_mask and segments [n,T] of some, in order. joined: each row begins with the last token of
    the row before.
    """
    bos = teacher.tokenizer.bos_token_id if teacher.writes_bos else None
    number = 0
    for each in rows:
        tokens, segments = each["tokens"], each["segments"]
        count, length = segments.shape
        part = np.zeros((count, length + 1), TAUGHT)
        part["token"] = tokens
        part["label"][:, 1:] = each["loss_mask"] == 1
        part["position"] = np.arange(-1, length) + (number + np.arange(count)[:, None]) * length
        part["start"][:, 1:-1] = segments[:, 1:] != segments[:, :-1]
        if joined:  # no segment tells whether a document begins with a row's last token
            before, last = tokens[:, -2], tokens[:, -1]
            part["start"][:, -1] = before == teacher.tokenizer.eos_token_id if bos is None else last == bos
        begins = slice(0, count)
        if joined:
            begins = slice(0, 1 if number == 0 else 0)
        part["position"][begins, 0] = -1
        part["start"][begins, 0] = True
        whole = part[:, 1:].ravel() if joined else part.ravel()
        yield np.concatenate([part[begins, 0], whole]) if joined else whole
        number += count


def is_joined(tokens_nT1: Iterable[_Array]) -> bool:
    """Return whether every row begins with the last token of the row before; arrays [n,T+1], in order."""
    last = None
    for tokens in tokens_nT1:
        if (last is not None and tokens[0, 0] != last) or (tokens[1:, 0] != tokens[:-1, -1]).any():
            return False
        last = tokens[-1, -1]
    return True


def documents_of(stream: Iterable[_Array]) -> Iterator[_Array]:
    """Yield whole documents, a quarter of a million tokens at a time. UsageError: one has more than `MOST_TOKENS`."""
    parts: list[_Array] = []
    size = 0
    least = _BATCH
    for part in stream:
        parts.append(part)
        size += len(part)
        if size < least:
            continue
        whole = np.concatenate(parts)
        begins = np.flatnonzero(whole["start"])
        end = int(begins[-1]) if len(begins) else 0
        if end:
            yield whole[:end]
        parts = [whole[end:]]
        size = len(whole) - end
        if size > MOST_TOKENS:
            raise UsageError(
                f"a document of the cache has more than {MOST_TOKENS:,} tokens, which a view across tokenizers cannot "
                "hold; make the cache of shorter documents"
            )
        least = max(_BATCH, 2 * size)  # a long document is joined a few times, not once a row
    if size:
        yield np.concatenate(parts)


@dataclass
class Transcoder:
    """An encoder of documents of a teacher's tokens in a student's.

    UsageError (of a call): a special token of the teacher is not in the table of events, or a token is not in its
    tokenizer.
    """

    teacher: ByteTokenizer
    student: ByteTokenizer
    events: SpecialTokens
    spelling: Spelling
    documents: int = 0
    """Encoded so far."""
    left_out: int = 0
    """Of these."""
    example: str = ""
    """What is wrong with the first that is left out."""

    def __call__(self, stream: _Array) -> _Array:
        """Return the student's stream [M], TRANSCODED, of documents [N], TAUGHT."""
        tokens = stream["token"].astype(np.int64)
        self._refuse(tokens)
        own = self.teacher.bytes
        special, mapped = own.special[tokens], self.events.lookup(len(own))[tokens]
        document = np.cumsum(stream["start"]) - 1
        sizes = np.where(special, mapped >= 0, own.lengths[tokens])
        begins = stream["start"] | special
        begins[1:] |= special[:-1]
        begins[:1] = True
        firsts = np.flatnonzero(begins)
        counts = stream["label"].copy()

        ends = np.cumsum(own.lengths[tokens])
        if len(tokens) and ends[-1] > _LONGEST * len(tokens):
            raise UsageError(f"the tokens of {own.name} in the cache have more than {_LONGEST} bytes in the mean")
        flat = own.join(tokens)
        after = np.append(firsts[1:], len(tokens))
        stops = ends[after - 1]
        starts = np.append(0, stops[:-1])
        texts: list[str | None] = []
        for part, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            text, lead, trail = _text(flat[start:stop].tobytes())
            if lead or trail:
                where = np.arange(firsts[part], after[part])
                _trim(sizes, counts, where, lead)
                _trim(sizes, counts, where[::-1], trail)
            texts.append(text)
        encoded, good = self._encode(texts)
        bad = np.zeros(int(document[-1]) + 1 if len(document) else 0, bool)
        bad[document[firsts[~good]]] = True
        out, wide = self._join(encoded, special[firsts], mapped[firsts], document[firsts], bad)
        keep = ~bad[document]
        source, offset, whole = holders(sizes[keep], wide, counts[keep])
        prefix = self.spelling.read(out["token"], source, offset)
        at = prefix >= 0
        from_N = np.flatnonzero(keep)[source[at]]
        within = prefix[at] > 0  # where a neighbour changes how a token is cut, its spelling tells nothing
        at[at] = ~within | (self.spelling.next(tokens[from_N], prefix[at]) == out["token"][at])
        from_N = np.flatnonzero(keep)[source[at]]
        real = counts[from_N] & whole[at] & (stream["position"][from_N] >= 0)
        where, from_N = np.flatnonzero(at)[real], from_N[real]
        out["source"], out["taught"], out["label"] = -1, -1, whole
        out["source"][where], out["taught"][where] = stream["position"][from_N], tokens[from_N]
        out["prefix"][where] = prefix[where]
        self.documents, self.left_out = self.documents + len(bad), self.left_out + int(bad.sum())
        return out

    def refuse_loss(self) -> None:
        """Raise a UsageError if more than one document in a hundred (of a few: more than one) is left out."""
        if self.left_out > max(1, self.documents // 100):
            first = f"; the first: {self.example}" if self.example else ""
            raise UsageError(
                f"{self.left_out:,} of {self.documents:,} documents cannot be carried over, and at most one in a "
                f"hundred may be left out{first}"
            )

    def _refuse(self, tokens: _Array) -> None:
        own = self.teacher.bytes
        if len(tokens) and (worst := int(tokens.max())) >= len(own):
            raise UsageError(
                f"the cache holds token {worst}, and {own.name} ends at {len(own) - 1}; use the tokenizer that the "
                "cache was made with"
            )
        known = self.events.lookup(len(own))
        unknown = np.unique(tokens[own.special[tokens] & (known[tokens] == -2)])
        if len(unknown):
            raise UsageError(
                f"the text holds {spelled(self.teacher, int(unknown[0]))}, a special token of the teacher without a "
                f"partner in the student's tokenizer ({'; '.join(self.events.lines())}); name one in the table of "
                "events, or leave it out there"
            )

    def _encode(self, texts: list[str | None]) -> tuple[list[_Array], _Array]:
        """Return the student's tokens of each part, and whether they have its bytes."""
        pieces = [split_text(text or "") for text in texts]
        cut = iter(self.student.cut([piece for each in pieces for piece in each]))
        none = np.empty(0, np.int32)
        encoded = [np.concatenate([none, *(np.array(next(cut), np.int32) for _ in each)]) for each in pieces]
        good = np.array([text is not None for text in texts], bool)
        for part, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
            if text and (joined := self.student.bytes.join(ids).tobytes()) != text.encode():
                good[part], self.example = False, self.example or self.student.altered(text.encode(), joined)
            elif text is None:
                self.example = self.example or "the text is not UTF-8"
        return encoded, good

    def _join(
        self, encoded: list[_Array], special: _Array, mapped: _Array, document: _Array, bad: _Array
    ) -> tuple[_Array, _Array]:
        """Return the student's stream with the fields token and start, and bytes [M]."""
        bos, writes_bos = self.student.tokenizer.bos_token_id, self.student.writes_bos
        tokens = [np.empty(0, np.int32)]
        sizes = [np.empty(0, np.int64)]
        begins = dict[int, int]()
        length = 0
        for part, own in enumerate(encoded):
            number = int(document[part])
            if bad[number]:
                continue
            found = mapped[part : part + 1][mapped[part : part + 1] >= 0] if special[part] else own
            lengths = np.ones(len(found), np.int64) if special[part] else self.student.bytes.lengths[found]
            if number not in begins and writes_bos and found[:1].tolist() != [bos]:
                found, lengths = np.append(bos, found), np.append(0, lengths)
            begins.setdefault(number, length)
            length += len(found)
            tokens.append(found.astype(np.int32))
            sizes.append(lengths.astype(np.int64))
        out = np.zeros(length, TRANSCODED)
        out["token"] = np.concatenate(tokens)
        out["start"][[each for each in begins.values() if each < length]] = True
        return out, np.concatenate(sizes)


def holders(sizes_N: _Array, sizes_M: _Array, counts_N: _Array) -> tuple[_Array, _Array, _Array]:
    """Return where the tokens of one stream lie in another one of the same bytes.

    sizes_N, sizes_M: bytes of each token; 1 for an event of both, 0 for a token that the other lacks. counts_N: bool,
    which tokens of the first stream are labels that count.

    Returns: int64 [M] the token of the first stream that holds the first byte of each of the second's, -1 of one
    without bytes; int64 [M] that token's bytes before it, 0 where both begin at the same offset; bool [M] whether all
    of its bytes belong to tokens that count.

    ValueError: the streams have different numbers of bytes.
    """
    ends_N, ends_M = np.cumsum(sizes_N, dtype=np.int64), np.cumsum(sizes_M, dtype=np.int64)
    if ends_N[-1:].sum() != ends_M[-1:].sum():
        raise ValueError(f"one stream has {ends_N[-1:]} bytes, the other {ends_M[-1:]}")
    starts_N = ends_N - sizes_N
    starts_M = ends_M - sizes_M
    real_M = sizes_M > 0
    holder = np.append(np.repeat(np.arange(len(sizes_N)), sizes_N), -1)
    source_M = np.where(real_M, holder[starts_M], -1)
    offset_M = np.where(real_M, starts_M - np.append(starts_N, 0)[source_M], 0)
    missed = np.concatenate([[0], np.cumsum(np.repeat(~counts_N, sizes_N), dtype=np.int64)])
    return source_M, offset_M, real_M & (missed[ends_M] == missed[starts_M])


def _text(whole: bytes) -> tuple[str | None, int, int]:
    """Return bytes as text, and how many of a cut character were dropped at each end; None: it is not UTF-8."""
    try:
        return whole.decode(), 0, 0
    except UnicodeDecodeError:
        pass
    lead = next((n for n, byte in enumerate(whole[:4]) if byte & 0xC0 != 0x80), len(whole[:4]))
    lead = lead if lead < 4 else 0
    for trail in range(4):
        try:
            return whole[lead : len(whole) - trail].decode(), lead, trail
        except UnicodeDecodeError:
            continue
    return None, 0, 0


def _trim(sizes: _Array, counts: _Array, where: _Array, number: int) -> None:
    """Take `number` bytes from the tokens `where`, in this order; a token that loses one does not count."""
    for place in where:
        if not number:
            return
        taken = min(number, int(sizes[place]))
        if taken:
            sizes[place] -= taken
            counts[place], number = False, number - taken
