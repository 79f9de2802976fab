"""Tokenizers and caches made by strangers: what they cost, and how they are refused."""

import json
import resource
import time

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kdtrain.data.bytes import ByteTokenizer, SpecialTokens, TokenBytes, byte_letters
from kdtrain.data.spelling import Spelling
from kdtrain.errors import UsageError
from kdtrain.tokenizers.cells import prefix_cells
from kdtrain.tokenizers.transcode import TAUGHT, Transcoder
from tests.token_kinds import train

LETTERS = "".join(letter for letter, _ in sorted(byte_letters().items(), key=lambda each: each[1]))


def byte_level(more=(), merges=(), **changes):
    """Make a tokenizer of the 256 bytes, then `more` tokens in letters, then `</s>`; changes: of its model."""
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    vocabulary |= {text: 256 + number for number, text in enumerate(more)}
    backend = Tokenizer(models.BPE(vocabulary, list(merges), **changes))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)


def edited(tokenizer, change):
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    change(content)
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)


def cells_of(teacher, student):
    events = SpecialTokens.match(teacher, student).lookup(len(teacher.bytes))
    return prefix_cells(
        teacher.bytes, student.bytes, Spelling.of(teacher.bytes, student.bytes, student.cut).firsts(), events
    )


def transcoder(teacher, student):
    spelling = Spelling.of(teacher.bytes, student.bytes, student.cut)
    return Transcoder(teacher, student, SpecialTokens.match(teacher, student), spelling)


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_2_to_the_18_entries_take_seconds_and_bounded_memory():
    before, start = peak_mb(), time.process_time()
    large = ByteTokenizer(byte_level([f"{number:05x}" for number in range(2**18 - 257)]))
    small = ByteTokenizer(train("gpt2"))
    one, other = cells_of(large, small), cells_of(small, large)
    assert time.process_time() - start < 20 and peak_mb() - before < 1500
    assert len(large.bytes) == 2**18
    assert (
        (one.of_teacher >= 0).all() and one.count > 257 and other.count == 257
    )  # without merges this student cuts into bytes
    assert (other.of_student < other.count).all()


def test_long_tokens_take_time_in_proportion_to_their_bytes():
    more = [LETTERS[97] * (100_000 + number) for number in range(20)]
    teacher, student = ByteTokenizer(byte_level(more)), ByteTokenizer(byte_level(more[::2]))
    start = time.process_time()
    cells = cells_of(teacher, student)
    assert time.process_time() - start < 5
    assert (cells.of_teacher[256:276] == cells.of_teacher[97]).all()
    assert (cells.of_student[256:266] == cells.of_student[97]).all()


def test_tokens_of_the_same_bytes_share_a_cell_whichever_side_they_are_on():
    teacher, student = ByteTokenizer(train("gemma")), ByteTokenizer(train("gpt2"))
    vocabulary = teacher.tokenizer.get_vocab()
    twice = [
        (vocabulary[chr(each)], vocabulary[f"<0x{each:02X}>"]) for each in range(32, 127) if chr(each) in vocabulary
    ]
    for of in (cells_of(teacher, student).of_teacher, cells_of(student, teacher).of_student):
        assert len(twice) > 30 and all(of[piece] == of[byte] >= 0 for piece, byte in twice)


def test_tokens_without_bytes_are_in_no_cell_and_no_text():
    odd = byte_level(["中", "a\x00b"])  # no letters of bytes
    teacher, student = ByteTokenizer(odd), ByteTokenizer(train("llama3"))
    assert teacher.bytes[256] == teacher.bytes[257] == b""
    cells = cells_of(teacher, student)
    assert cells.of_teacher[256] == cells.of_teacher[257] == -1
    cells = cells_of(student, teacher)
    assert cells.of_student[256] == cells.of_student[257] == cells.count
    stream = np.zeros(4, TAUGHT)
    stream["token"], stream["label"], stream["position"] = [97, 256, 98, 258], True, np.arange(-1, 3)
    stream["start"][0] = True
    out = transcoder(teacher, student)(stream)
    assert student.bytes.join(out["token"]).tobytes() == b"ab"
    assert out["token"][-1] == student.tokenizer.eos_token_id


def test_an_added_token_of_marks_is_spaces():
    tokenizer = edited(train("gemma"), lambda content: None)
    tokenizer.add_tokens([AddedToken("▁▁▁▁", normalized=False)])
    known = ByteTokenizer(tokenizer)
    assert known.bytes[tokenizer.convert_tokens_to_ids("▁▁▁▁")] == b"    "
    assert known.bytes.join(np.array(known.encode(["a    b"])[0])).tobytes() == b"a    b"
    with pytest.raises(UsageError, match="rewrites a text"):
        known.encode(["a▁▁▁▁b"])


def without_a_letter(content):
    content["model"]["vocab"]["xx"] = content["model"]["vocab"].pop(LETTERS[0xC3])


def with_a_gap(content):
    del content["model"]["vocab"][LETTERS[0xC3]]  # the next added token takes the number of the last letter


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content["model"].update(dropout=0.3), r"cuts a text at random \(dropout = 0.3\)"),
        (lambda content: content["model"]["vocab"].update(xx=2**22), r"has ids up to 4,194,30\d; at most"),
        (without_a_letter, r"rewrites a text before it cuts it: '.*' comes back as '"),
        (with_a_gap, "has two tokens of one id"),
        (
            lambda content: content["model"].update(end_of_word_suffix="</w>"),
            r"writes '</w>' into its tokens .end_of_word_suffix., which no text has",
        ),
        (lambda content: content["model"].update(continuing_subword_prefix="##"), "writes '##' into its tokens"),
    ],
    ids=["random cuts", "a huge id", "a byte without a token", "two tokens of one id", "an end of words", "a prefix"],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_vocabulary_that_cannot_be_is_refused(change, message, keeps):
    if keeps or "rewrites" not in message:  # a teacher's tokenizer only reads tokens
        with pytest.raises(UsageError, match=message):
            ByteTokenizer(edited(byte_level(), change), keeps)


def test_a_student_without_an_end_is_refused():
    student = byte_level()
    student.eos_token = None
    with pytest.raises(UsageError, match="has no end-of-sequence token; set eos_token"):
        SpecialTokens.match(ByteTokenizer(byte_level()), ByteTokenizer(student))


def test_a_special_token_that_no_vocabulary_has_is_no_token():
    odd = byte_level()
    odd.init_kwargs["unk_token"] = None
    odd._special_tokens_map["pad_token"] = "<nothing>"  # as a file of special tokens can name
    assert TokenBytes.of(odd).special.sum() == 1


def of_tokens(tokens):
    stream = np.zeros(len(tokens), TAUGHT)
    stream["token"], stream["label"], stream["position"] = tokens, True, np.arange(-1, len(tokens) - 1)
    stream["start"][0] = True
    return stream


def test_a_cache_of_huge_tokens_is_refused_before_it_takes_the_memory():
    teacher, student = ByteTokenizer(byte_level([LETTERS[97] * 2**20])), ByteTokenizer(train("gpt2"))
    worker, before = transcoder(teacher, student), peak_mb()
    with pytest.raises(UsageError, match="in the cache have more than 256 bytes in the mean"):
        worker(of_tokens(np.full(2**18, 256)))
    assert peak_mb() - before < 500


def test_characters_cut_off_in_many_places_cost_no_more_than_the_text():
    teacher, student = ByteTokenizer(byte_level()), ByteTokenizer(train("gpt2"))
    worker = transcoder(teacher, student)
    stream = of_tokens(np.tile([97, 0xC3], 2**15))
    stream["start"][::2] = True
    start = time.process_time()
    out = worker(stream)
    assert time.process_time() - start < 2.5
    assert student.bytes.join(out["token"]).tobytes() == b"a" * 2**15 and (worker.documents, worker.left_out) == (
        2**15,
        0,
    )
