"""Prefix cells: events that two vocabularies have in common at a boundary.

At an offset where a token of both begins, let f(t) be the bytes of the first student token of the bytes of a teacher
token t, and X = {f(t)}. A teacher token belongs to the cell f(t); a student token s to the cell of the longest x in X
that begins its bytes, else to that of its first byte. A cell means "the text continues with the bytes x": the masses of
its tokens under teacher and student can be compared, and all mass of text lies in some cell, so nothing is pushed down
because it has no partner. Equal vocabularies have one cell a token; a student of bytes has the 256 first bytes. An
event has a cell of its own. Tokens without bytes or partner have none: their mass is left out of the teacher's side,
and is in no cell of the student's.

It is exact for first bytes. A longer x may be reached across the end of a shorter token, and one step of a model does
not show that: the teacher's and the student's own token at a boundary of a text then lie in different cells. Such
cells are merged from the text itself (`merge`), which costs information; both are measured.

Shape suffixes: V entries of the teacher's tokenizer, S of the student's, C cells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtrain.data.bytes import TokenBytes

_Array = np.ndarray[Any, np.dtype[Any]]

CONFLICTS = 0.1
"""Two cells are merged if they conflict in this share of the places of the rarer one.

On text of the standard library, for BPE students of 1,024 to 8,192 entries, a tenth leaves a disagreement of 0.2 to
0.4 % and 94 to 98 % of the entropy (of a bigram model); 0, every conflict, 0.05 % and 91 to 95 %; no merging 0.4 to 3 %
and 94 to 99.8 %.
"""


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of two vocabularies."""

    of_teacher: _Array
    """int64 [V] 0 .. C-1; -1: none."""
    of_student: _Array
    """int64 [S] 0 .. C; C: none of the cells."""
    count: int
    """C."""

    @property
    def identity(self) -> bool:
        """Whether the cells are the tokens of both, by number."""
        same = np.arange(len(self.of_student))
        return bool(np.array_equal(self.of_teacher, same) and np.array_equal(self.of_student, same))


def prefix_cells(teacher: TokenBytes, student: TokenBytes, firsts: _Array, events: _Array) -> Cells:
    """Return the cells of two vocabularies.

    In equal vocabularies tokens without text, and duplicates, have cells of their own too.

    firsts: int64 [V] the student's first token of each of the teacher's (`Spelling.firsts`). events: int64 [V] the
    student's token for a special token of the teacher; below 0: none.
    """
    if teacher.equals(student):
        same = np.arange(len(teacher))
        return Cells(same, same, len(same))
    # what is not spelled goes by its first byte, which every cut of the bytes begins with
    starts = [teacher[token][:1] if first < 0 else student[first] for token, first in enumerate(firsts.tolist())]
    own = [student[token] for token in range(len(student))]
    places: dict[bytes, int] = {}
    for start in [each for each in starts if each] + [each[:1] for each in own if each]:
        places.setdefault(start, len(places))
    of_teacher = np.array([places[each] if each else -1 for each in starts], np.int64)
    of_student = _longest_prefixes(places, own)
    count = len(places)
    for special in np.flatnonzero(events >= 0).tolist():
        partner = events[special]
        if of_student[partner] < 0:
            of_student[partner], count = count, count + 1
        of_teacher[special] = of_student[partner]
    return _numbered(of_teacher, of_student)


def _longest_prefixes(places: Mapping[bytes, int], texts: Sequence[bytes]) -> _Array:
    """Return the place of the longest key that begins each text, int64 [S]; -1 for an empty text. Each has a key.

    In the order of bytes a text stands behind its prefixes, and between it and them are texts that they begin: so one
    pass with a stack takes time in proportion to the bytes, however long a stranger's tokens are.
    """
    found = np.full(len(texts), -1, np.int64)
    above = [b""]
    numbered = ((text, number) for number, text in enumerate(texts) if text)
    for text, number in sorted([*((key, -1) for key in places), *numbered]):
        while not text.startswith(above[-1]):
            above.pop()
        if number < 0:
            above.append(text)
        else:
            found[number] = places[above[-1]]
    return found


def merge(cells: Cells, teacher_M: _Array, student_M: _Array) -> Cells:
    """Merge cells that conflict where teacher and student have these tokens of the same text at common boundaries."""
    one_M = cells.of_teacher[teacher_M]
    other_M = cells.of_student[student_M]
    apart_M = (one_M != other_M) & (one_M >= 0) & (other_M < cells.count)
    pairs, number = np.unique(np.sort(np.stack([one_M, other_M], 1)[apart_M], 1), axis=0, return_counts=True)
    seen = [np.bincount(each[each >= 0], minlength=cells.count + 1) for each in (one_M, other_M)]
    often = np.maximum(*seen)
    parent = np.arange(cells.count + 1)

    def root(cell: int) -> int:
        while parent[cell] != cell:
            parent[cell] = parent[parent[cell]]
            cell = int(parent[cell])
        return cell

    for (one, other), times in zip(pairs.tolist(), number.tolist(), strict=True):
        if times > CONFLICTS * min(often[one], often[other]):
            one, other = sorted((root(one), root(other)))
            parent[other] = one
    roots = np.array([root(cell) for cell in range(cells.count)] + [-1])
    return _numbered(roots[cells.of_teacher], roots[cells.of_student])


def _numbered(of_teacher: _Array, of_student: _Array) -> Cells:
    """Return the cells numbered by the least student token of each, from 0; -1: none.

    Cells without a student's token are dropped.
    """
    used, first = np.unique(of_student[of_student >= 0], return_index=True)
    order = np.argsort(first)
    most = max(of_student.max(initial=-1), of_teacher.max(initial=-1))
    number = np.full(int(most) + 2, -1, np.int64)
    number[used[order]] = np.arange(len(used))
    of_student = number[of_student]  # number[-1] is -1
    return Cells(number[of_teacher], np.where(of_student < 0, len(used), of_student), len(used))
