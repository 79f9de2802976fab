"""Two tokenizers held against each other: `Alignment`, for views of a cache (`view_builder`) and other loops."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtrain.data.bytes import ByteTokenizer, SpecialTokens, TokenBytes
from kdtrain.data.spelling import Spelling
from kdtrain.errors import UsageError
from kdtrain.tokenizers.cells import Cells, merge, prefix_cells
from kdtrain.tokenizers.transcode import TAUGHT, Transcoder, documents_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Aligned:
    """A text in the student's tokens, M of them, and where the teacher's N tokens of it lie."""

    tokens: _Array
    """int64 [M] the student's."""
    source: _Array
    """int64 [M] the teacher's token that begins at the same byte; -1 if there is none."""


class Alignment:
    """The relation of two tokenizers: bytes, boundaries in a text, and cells of the two vocabularies.

    A common boundary is a place of a text where a token of both begins. Cells are groups of tokens of either vocabulary
    that stand for the same bytes, so that the masses that both models give to a cell at a common boundary compare: a
    cell means that the text continues with certain bytes, which one token may not show; `merged` joins the cells that a
    text shows to conflict.

    Args:
        teacher_tokenizer, student_tokenizer: fast tokenizers of transformers, byte-level or SentencePiece with byte
            fallback.
        special_tokens: what special tokens of the teacher are for the student, by name; they go before the ends of
            documents and turns, which are found. An empty name leaves one out.

    UsageError: a tokenizer whose tokens do not give the bytes of a text back, or an unknown special token.

    >>> from kdtrain.testing import tiny_tokenizer
    >>> alignment = Alignment(tiny_tokenizer(300), tiny_tokenizer(280))
    >>> alignment.events
    ['document end: <|endoftext|> is <|endoftext|>']
    """

    def __init__(
        self,
        teacher_tokenizer: "PreTrainedTokenizerFast",
        student_tokenizer: "PreTrainedTokenizerFast",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._teacher = ByteTokenizer(teacher_tokenizer, keeps=False)
        self._student = ByteTokenizer(student_tokenizer)
        self.table = SpecialTokens.match(self._teacher, self._student, special_tokens)

    @property
    def teacher(self) -> TokenBytes:
        """The bytes of each of the teacher's tokens, by `teacher[token]`."""
        return self._teacher.bytes

    @property
    def student(self) -> TokenBytes:
        """The bytes of each of the student's tokens."""
        return self._student.bytes

    @property
    def events(self) -> list[str]:
        """The table of special tokens, a line each."""
        return self.table.lines()

    @functools.cached_property
    def spelling(self) -> Spelling:
        """The spelling of each of the teacher's tokens in the student's."""
        return Spelling.of(self.teacher, self.student, self._student.cut)

    @functools.cached_property
    def cells(self) -> Cells:
        """The cells of both vocabularies."""
        events = self.table.lookup(len(self.teacher))
        return prefix_cells(self.teacher, self.student, self.spelling.firsts(), events)

    def merged(self, teacher_M: _Array, student_M: _Array) -> Cells:
        """Return the cells, joined where they conflict at these tokens of the same text in both tokenizers."""
        return merge(self.cells, teacher_M, student_M)

    def align(self, tokens: Any) -> Aligned:
        """Return the same text in the student's tokens; `tokens` [N] are the teacher's, of one or several documents.

        UsageError: one of them is not in its tokenizer, or is a special token without partner; or the student's
        tokenizer rewrites the text.
        """
        found = np.asarray(tokens)
        if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
            raise UsageError(f"tokens are {found.dtype} {list(found.shape)}; give those of one text, whole numbers")
        if len(beyond := found[(found < 0) | (found >= len(self.teacher))]):
            raise UsageError(f"token {beyond[0]} is not one of {self.teacher.name}, 0 to {len(self.teacher) - 1}")
        stream = np.zeros(len(found), TAUGHT)
        stream["token"], stream["label"], stream["position"] = found, True, np.arange(len(found))
        stream["start"][1:] = found[:-1] == self._teacher.tokenizer.eos_token_id
        stream["start"][:1] = True
        worker = self.transcoder()
        parts = [worker(part) for part in documents_of([stream])]
        if worker.example:
            raise UsageError(worker.example)
        none = np.empty(0, np.int64)
        names = ("token", "source", "prefix")
        tokens, source, prefix = (np.concatenate([none, *(part[name] for part in parts)]) for name in names)
        return Aligned(tokens, np.where(prefix == 0, source, -1))

    def transcoder(self) -> Transcoder:
        """Return a transcoder, which encodes streams of the teacher's tokens in the student's."""
        return Transcoder(self._teacher, self._student, self.table, self.spelling)
