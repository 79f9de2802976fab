"""Tokens of a teacher in tokens of a student, and what a text has read of one."""

import time

import numpy as np
import pytest

from kdtrain.data import spelling as spellings
from kdtrain.data.bytes import ByteTokenizer, TokenBytes
from kdtrain.data.spelling import DEEP, Spelling
from kdtrain.errors import UsageError
from kdtrain.tokenizers.transcode import holders
from tests.token_kinds import TEXTS, train


def spelled(one, other):
    teacher, student = ByteTokenizer(train(*one)), ByteTokenizer(train(*other))
    return teacher, student, Spelling.of(teacher.bytes, student.bytes, student.cut)


@pytest.mark.parametrize(("one", "other"), [("llama3", "gpt2"), ("gpt2", "gemma"), ("gemma", "llama3")])
def test_a_token_is_spelled_as_the_student_cuts_it_and_what_is_said_has_one_number(one, other):
    teacher, student, spelling = spelled((one, 600), (other, 400))
    prefix, several = {}, 0
    for token in range(len(teacher.bytes)):
        own = spelling.tokens[spelling.starts[token] : spelling.starts[token + 1]].tolist()
        whole = teacher.bytes[token]
        try:
            assert own == (student.cut([whole.decode()])[0] if whole else [])
        except UnicodeDecodeError:
            assert not own
        several += len(own) > 1
        for depth in range(len(own)):
            number = spelling.prefix[spelling.starts[token] + depth]
            assert prefix.setdefault(tuple(own[:depth]), number) == number and spelling.depth[number] == depth
            assert spelling.next(np.array([token]), np.array([number])).tolist() == [own[depth]]
    assert len({*prefix.values()}) == len(prefix) > 20 and several > 50
    firsts = spelling.firsts()
    assert all(first == spelling.tokens[spelling.starts[token]] for token, first in enumerate(firsts) if first >= 0)


@pytest.mark.parametrize(
    ("one", "other", "crosses"), [(("llama3", 900), ("gpt2", 300), False), (("gpt2", 600), ("gemma", 500), True)]
)
def test_what_a_text_has_said_of_a_token_are_the_tokens_since_it_began(one, other, crosses):
    teacher, student, spelling = spelled(one, other)
    numbers = {}
    for token in range(len(teacher.bytes)):
        own = spelling.tokens[spelling.starts[token] : spelling.starts[token + 1]].tolist()
        for depth in range(len(own)):
            numbers[tuple(own[:depth])] = int(spelling.prefix[spelling.starts[token] + depth])
    known = unknown = straddled = 0
    for text in TEXTS:
        theirs, own = (np.array(each.cut([text])[0]) for each in (teacher, student))
        sizes = teacher.bytes.lengths[theirs], student.bytes.lengths[own]
        source, offset, _ = holders(*sizes, np.ones(len(theirs), bool))
        found = spelling.read(own, source, offset)
        for place, number in enumerate(found.tolist()):
            first = place
            while offset[first] and source[first - 1] == source[place]:
                first -= 1
            if offset[first]:
                assert number == -1
                straddled += 1
                continue
            assert number == numbers.get(tuple(own[first:place].tolist()), -1)
            known, unknown = known + (number > 0), unknown + (number < 0)
    assert known > 20 and (straddled + unknown > 0) == crosses


def test_of_a_long_token_nothing_is_known_behind_128_of_the_students():
    text = b"a" * 100_000 + b"ab"
    teacher = TokenBytes("long", np.frombuffer(text, np.uint8), np.array([0, 100_000, 100_002]), np.zeros(2, bool))
    student = TokenBytes("short", np.frombuffer(b"ab", np.uint8), np.arange(3), np.zeros(2, bool))
    spelling = Spelling.of(teacher, student, lambda texts: [["ab".index(each) for each in text] for text in texts])
    assert spelling.starts.tolist() == [0, DEEP, DEEP + 2]
    read = spelling.read(np.zeros(300, np.int64), np.zeros(300, np.int64), np.arange(300))
    assert (read[:DEEP] >= 0).all() and (read[DEEP:] == -1).all()
    both = spelling.next(np.array([0, 1, 1]), read[[1, 1, 2]])
    assert both.tolist() == [0, 1, -1]


def test_a_token_that_the_student_rewrites_is_spelled_up_to_there():
    teacher = TokenBytes("it", np.frombuffer(b"abAb", np.uint8), np.array([0, 3, 4]), np.zeros(2, bool))
    student = TokenBytes("low", np.frombuffer(b"ab", np.uint8), np.arange(3), np.zeros(2, bool))
    lower = Spelling.of(teacher, student, lambda texts: [["ab".index(each) for each in text.lower()] for text in texts])
    assert lower.tokens.tolist() == [0, 1, 1] and lower.starts.tolist() == [0, 2, 3]


def test_equal_vocabularies_are_spelled_by_number():
    teacher, _, spelling = spelled(("gpt2", 400), ("gpt2", 400))
    assert spelling.tokens.tolist() == list(range(len(teacher.bytes))) and not spelling.prefix.any()


def test_a_long_token_takes_no_longer_than_many_short_ones():
    size = 2_000_000
    spelling = Spelling(np.array([0, 2]), np.array([0, 0]), 1)
    start = time.process_time()
    found = spelling.read(np.zeros(size, np.int64), np.zeros(size, np.int64), np.arange(size))
    assert time.process_time() - start < 3 and found.tolist()[:3] == [0, 1, -1]


def test_a_vocabulary_without_text_or_with_too_much_is_refused(monkeypatch):
    teacher = TokenBytes("half", np.frombuffer(b"\xd0\xbc", np.uint8), np.arange(3), np.zeros(2, bool))
    student = TokenBytes("short", np.frombuffer(b"ab", np.uint8), np.arange(3), np.zeros(2, bool))
    with pytest.raises(UsageError, match="all tokens of half are 0 tokens of short; 1 to "):
        Spelling.of(teacher, student, lambda texts: [[0] for _ in texts])
    monkeypatch.setattr(spellings, "MAX_SPELLED", 3)
    teacher = TokenBytes("long", np.frombuffer(b"abab", np.uint8), np.array([0, 4]), np.zeros(1, bool))
    with pytest.raises(UsageError, match="all tokens of long are 4 tokens of short; 1 to 3"):
        Spelling.of(teacher, student, lambda texts: [[0, 1, 0, 1] for _ in texts])
