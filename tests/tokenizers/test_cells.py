import numpy as np
import pytest

from kdtrain.data.bytes import ByteTokenizer, SpecialTokens
from kdtrain.data.spelling import Spelling
from kdtrain.tokenizers.cells import Cells, merge, prefix_cells
from tests.token_kinds import train


def both(one, other):
    teacher, student = ByteTokenizer(train(*one)), ByteTokenizer(train(*other))
    events = SpecialTokens.match(teacher, student).lookup(len(teacher.bytes))
    firsts = Spelling.of(teacher.bytes, student.bytes, student.cut).firsts()
    return teacher, student, prefix_cells(teacher.bytes, student.bytes, firsts, events)


def test_cells_of_equal_tokenizers_are_the_tokens():
    assert both(("llama3",), ("llama3",))[2].identity


@pytest.mark.parametrize("other", [("gpt2", 600), ("gemma", 700), ("qwen", 420)])
def test_every_token_of_text_is_in_the_cell_of_the_bytes_it_begins_with(other):
    teacher, student, cells = both(("llama3", 600), other)
    for token in range(len(student.bytes)):
        if student.bytes[token]:
            mates = np.flatnonzero(cells.of_student == cells.of_student[token])
            assert len({student.bytes[each][:1] for each in mates}) == 1
    for token in range(len(teacher.bytes)):
        whole = teacher.bytes[token]
        mates = np.flatnonzero(cells.of_student == cells.of_teacher[token])
        if whole:
            start = min((student.bytes[each] for each in mates), key=len)
            assert whole.startswith(start) and cells.of_teacher[token] >= 0
    eos = teacher.tokenizer.eos_token_id, student.tokenizer.eos_token_id
    assert cells.of_teacher[eos[0]] == cells.of_student[eos[1]] < cells.count
    assert (cells.of_student == cells.of_student[eos[1]]).sum() == 1
    assert sorted(set(cells.of_student.tolist()) - {cells.count}) == list(range(cells.count))


def test_cells_that_conflict_in_the_text_are_merged_and_rare_conflicts_are_not():
    cells = Cells(np.array([0, 1, 2]), np.array([0, 1, 2, 3]), 3)
    teacher, student = (
        np.array([0] * 20 + [1] * 20 + [2] * 20),
        np.array([0] * 20 + [1] * 15 + [0] * 5 + [2] * 19 + [0]),
    )
    merged = merge(cells, teacher, student)
    assert merged.of_teacher.tolist() == [0, 0, 1] and merged.of_student.tolist() == [0, 0, 1, 2] and merged.count == 2
