import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtrain.data.bytes import ByteTokenizer, SpecialTokens
from kdtrain.data.corpus import Document
from kdtrain.data.packed import PackedRow, rows_of
from kdtrain.data.packing import pack
from kdtrain.data.spelling import Spelling
from kdtrain.errors import UsageError
from kdtrain.tokenizers import transcode
from kdtrain.tokenizers.alignment import Alignment
from kdtrain.tokenizers.transcode import TAUGHT, Transcoder, documents_of, holders, is_joined, teacher_stream
from tests.token_kinds import KINDS, TEXTS, random_texts, train


def rows(kind, texts, seq_len=16, **options):
    return list(pack([Document(f"{n}", text=text) for n, text in enumerate(texts)], train(kind), seq_len, **options))


def plain(text):
    """Remove the mark of a space, and the name of a special token, which the packer takes for one."""
    return text.replace("▁", "_").replace("</s>", "")


def transcoder(teacher, student, given=None):
    one, other = ByteTokenizer(train(teacher)), ByteTokenizer(train(student))
    return Transcoder(
        one, other, SpecialTokens.match(one, other, given), Spelling.of(one.bytes, other.bytes, other.cut)
    )


def carried(worker, taught, joined=True):
    names = ("tokens", "loss_mask", "segments")
    some = (taught[start : start + 3] for start in range(0, len(taught), 3))
    read = ({name: np.stack([getattr(row, name) for row in each]) for name in names} for each in some)
    stream = np.concatenate(list(teacher_stream(read, joined, worker.teacher)))
    parts = [worker(part) for part in documents_of([stream])]
    return stream, np.concatenate(parts)


def text_of(tokenizer, tokens):
    return tokenizer.bytes.join(np.array(tokens, np.int64))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40), st.randoms(use_true_random=False))
def test_where_the_tokens_of_one_stream_lie_in_another_is_as_defined(tokens, chance):
    sizes_N, counts_N = [size for size, _ in tokens], [counts for _, counts in tokens]
    left, sizes_M = sum(sizes_N), []
    while left:
        sizes_M.append(chance.randint(0, min(5, left)))
        left -= sizes_M[-1]
    by_byte = [(n, offset) for n, size in enumerate(sizes_N) for offset in range(size)]
    starts = np.cumsum([0, *sizes_M])[:-1]
    own = [by_byte[start : start + size] for start, size in zip(starts, sizes_M, strict=True)]
    expected = [(*(each[0] if each else (-1, 0)), bool(each) and all(counts_N[n] for n, _ in each)) for each in own]
    found = holders(np.array(sizes_N, int), np.array(sizes_M, int), np.array(counts_N, bool))
    assert [*zip(*(each.tolist() for each in found), strict=True)] == expected
    with pytest.raises(ValueError, match="bytes"):
        holders(np.array([*sizes_N, 1], int), np.array(sizes_M, int), np.ones(len(sizes_N) + 1, bool))


@pytest.mark.parametrize("teacher, student", [("gpt2", "gemma"), ("gemma", "qwen"), ("qwen", "llama3")])
def test_the_students_rows_have_the_bytes_and_the_ends_of_the_documents(teacher, student):
    texts = [plain(text) for text in random_texts(300)] + list(TEXTS)
    taught = rows(teacher, texts)
    worker = transcoder(teacher, student)
    stream, out = carried(worker, taught)
    for tokenizer, tokens in ((worker.teacher, stream["token"]), (worker.student, out["token"])):
        eos = tokens == tokenizer.tokenizer.eos_token_id
        found = [
            text_of(tokenizer, part[part != tokenizer.tokenizer.eos_token_id])
            for part in np.split(tokens, np.flatnonzero(eos) + 1)
        ]
        whole = [each.tobytes() for each in found]
        assert whole[:-1] == [text.encode() for text in texts[: len(whole) - 1]]
        assert len(whole) > 250
    assert (worker.documents, worker.left_out) == (len(whole), 0)


@pytest.mark.parametrize("seed, teacher", [*enumerate(KINDS)])
def test_ten_thousand_random_documents_keep_their_bytes_with_characters_split_by_both(seed, teacher):
    texts = [plain(text) for text in random_texts(2500, seed)]  # of each of the four
    worker = transcoder(teacher, KINDS[seed - 1])
    ends = worker.teacher.tokenizer.eos_token_id, worker.student.tokenizer.eos_token_id
    stream = np.zeros(sum(map(len, ids := [[*each, ends[0]] for each in worker.teacher.encode(texts)])), TAUGHT)
    stream["token"], stream["label"], stream["position"] = np.concatenate(ids), True, np.arange(len(stream)) - 1
    stream["start"][np.cumsum([0, *map(len, ids[:-1])])] = True
    out = np.concatenate([worker(part) for part in documents_of([stream])])
    assert (worker.documents, worker.left_out) == (len(texts), 0)
    whole = "".join(texts).encode()
    stops = np.cumsum([len(text.encode()) for text in texts])
    for tokenizer, tokens, eos in zip(
        (worker.teacher, worker.student), (stream["token"], out["token"]), ends, strict=True
    ):
        assert text_of(tokenizer, tokens).tobytes() == whole
        assert (np.cumsum(tokenizer.bytes.lengths[tokens])[tokens == eos] == stops).all()
    mine = worker.student.bytes
    within = mine.flat[np.minimum(mine.starts[out["token"]], len(mine.flat) - 1)] & 0xC0 == 0x80
    assert (within & (out["source"] >= 0)).sum() > 100, "common boundaries within a character"


def test_a_source_is_the_position_whose_label_holds_the_first_byte():
    worker = transcoder("llama3", "gpt2")
    taught = rows("llama3", TEXTS)
    stream, out = carried(worker, taught)
    label = np.concatenate([row.tokens[1:] for row in taught])  # by position
    at = np.flatnonzero(out["source"] >= 0)
    assert len(at) > len(out) / 2
    ends = {
        "teacher": np.cumsum(worker.teacher.bytes.lengths[stream["token"]]),
        "student": np.cumsum(worker.student.bytes.lengths[out["token"]]),
    }
    for place in at:
        position = out["source"][place]
        assert label[position] == stream["token"][position + 1]
        depth = worker.spelling.depth[out["prefix"][place]]
        prefix = out["token"][place - depth : place]
        assert (depth > 0) == (out["prefix"][place] > 0) and not (depth and out["prefix"][place - depth])
        size = worker.teacher.bytes.lengths[label[position]]
        own = ends["teacher"][position + 1] - size + worker.student.bytes.lengths[prefix].sum()
        assert own < ends["teacher"][position + 1] or not size
        assert own == ends["student"][place] - worker.student.bytes.lengths[out["token"][place]]
    assert (out["prefix"] > 0).sum() > 3 and (out["prefix"][at] == 0).sum() > len(at) / 2


def test_the_same_tokenizer_gives_the_same_rows():
    taught = rows("llama3", TEXTS * 3)
    _, out = carried(transcoder("llama3", "llama3"), taught)
    again = list(rows_of([out], 16, False))
    assert len(again) >= len(taught) - 1  # the last text is cut off, and may be cut into other tokens
    for one, other in zip(taught[:-1], again, strict=False):
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.segments, other.segments)
        assert np.array_equal(one.loss_mask, other.loss_mask)
    source = np.concatenate([row.kept["source"] for row in again])
    assert np.array_equal(source[:-16], np.arange(len(source) - 16))


def test_masks_are_carried_over_by_bytes():
    worker = transcoder("llama3", "qwen")
    taught = rows("llama3", TEXTS)
    chance = np.random.RandomState(0)
    taught = [PackedRow(row.tokens, chance.rand(len(row.loss_mask)) < 0.7, row.segments) for row in taught]
    stream, out = carried(worker, taught)
    sizes = [each.bytes.lengths for each in (worker.teacher, worker.student)]
    by_byte = np.repeat(stream["label"], sizes[0][stream["token"]])
    ends = np.cumsum(sizes[1][out["token"]])
    for token, stop, counts in list(zip(out["token"], ends, out["label"], strict=True))[:-8]:  # the last may be cut
        if size := sizes[1][token]:
            assert counts == by_byte[stop - size : stop].all()


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(0, 10**6))
def test_rows_that_stand_alone_lose_the_cut_characters_at_their_ends_and_no_more(seq_len, seed):
    worker = transcoder("gpt2", "gemma")
    taught = rows("gpt2", [plain(text) for text in random_texts(20, seed)], seq_len)[::2]
    _, out = carried(worker, taught, joined=False)
    whole = text_of(worker.student, out["token"]).tobytes().decode()
    expected = "".join(text_of(worker.teacher, row.tokens).tobytes().decode("utf-8", "ignore") for row in taught)
    assert worker.left_out or whole == expected
    assert (out["source"] < len(taught) * seq_len).all()


def test_rows_are_joined_if_each_begins_with_the_end_of_the_one_before():
    taught = np.stack([row.tokens for row in rows("gpt2", TEXTS)])
    assert (
        is_joined([taught[:3], taught[3:]]) and not is_joined([taught[::2]]) and not is_joined([taught[:2], taught[3:]])
    )


def test_an_event_without_a_partner_is_refused_with_the_table_and_can_be_left_out():
    tokenizer = train("llama3")
    stream = np.zeros(4, TAUGHT)
    stream["token"] = [tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(["a", "b"]), tokenizer.eos_token_id]
    stream["position"], stream["start"][0], stream["label"][1:] = np.arange(-1, 3), True, True
    with pytest.raises(
        UsageError, match=r"holds <s>, a special token of the teacher without a partner in .* .document end"
    ):
        transcoder("llama3", "gpt2")(stream)
    out = transcoder("llama3", "gpt2", {"<s>": ""})(stream)
    assert out["token"][-1] == train("gpt2").eos_token_id and out["source"][-1] == 2


def test_a_tokenizer_that_rewrites_more_than_one_document_in_a_hundred_is_refused_with_an_example():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    worker = transcoder("gpt2", "qwen")
    carried(worker, rows("gpt2", [decomposed, *[composed] * 20], 8))
    assert (worker.documents, worker.left_out) == (21, 1)
    worker.refuse_loss()
    worker = transcoder("gpt2", "qwen")
    carried(worker, rows("gpt2", [decomposed] * 5 + [composed], 8))
    with pytest.raises(UsageError, match=r"documents cannot be carried over.*the first: .*rewrites a text"):
        worker.refuse_loss()


def test_an_alignment_holds_a_text_in_the_tokens_of_two_tokenizers():
    one, other = train("llama3"), train("gemma")
    text = TEXTS[0] + TEXTS[4]
    tokens = [*one.encode(text), one.eos_token_id, *one.encode(TEXTS[2])]
    alignment = Alignment(one, other)
    found = alignment.align(tokens)
    assert other.decode(found.tokens) == text + "</s>" + TEXTS[2]
    assert alignment.events[0] == "document end: </s> is </s>"
    for place in np.flatnonzero(found.source >= 0):
        token = tokens[found.source[place]]
        assert one.decode(tokens[: found.source[place]]) == other.decode(found.tokens[:place])
        assert token == one.eos_token_id or alignment.teacher[token][0] == alignment.student[found.tokens[place]][0]
    assert (found.source >= 0).sum() > 10
    with pytest.raises(UsageError, match="is not a special token of"):
        Alignment(one, other, {"</s>": "nothing"})
    with pytest.raises(UsageError, match=r"rewrites a text before it cuts it"):
        Alignment(train("gpt2"), train("qwen")).align(train("gpt2").encode("cafe\u0301"))
    with pytest.raises(UsageError, match="of one text"):
        alignment.align([[1], [2]])


def test_a_document_that_would_take_all_memory_is_refused(monkeypatch):
    monkeypatch.setattr(transcode, "_BATCH", 8)
    monkeypatch.setattr(transcode, "MOST_TOKENS", 40)
    parts = [np.zeros(5, TAUGHT) for _ in range(20)]
    parts[0]["start"][0] = True
    with pytest.raises(UsageError, match="a document of the cache has more than 40 tokens"):
        list(documents_of(parts))
    for part in parts[::4]:
        part["start"][0] = True
    assert sum(map(len, documents_of(parts))) == 100
