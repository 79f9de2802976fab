import unicodedata

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kdtrain.data.bytes import ByteTokenizer, SpecialTokens, TokenBytes, byte_letters
from kdtrain.errors import UsageError
from tests.token_kinds import KINDS, random_texts, train


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_tokens_are_those_of_ten_thousand_random_texts(kind):
    tokenizer = ByteTokenizer(train(kind))
    texts = [text.replace("▁", "_") for text in random_texts(10_000)]  # in SentencePiece it is a space
    whole = [tokenizer.bytes.join(np.array(ids)).tobytes() for ids in tokenizer.encode(texts)]
    assert whole == [text.encode() for text in texts]
    cut = sum(
        0x80 <= tokenizer.bytes[each][:1][0] < 0xC0 for each in range(len(tokenizer.bytes)) if tokenizer.bytes[each]
    )
    assert cut > 60, "some tokens begin within a character"


def test_the_letters_of_bytes_are_those_of_published_byte_level_vocabularies():
    assert byte_letters().keys() == set(pre_tokenizers.ByteLevel.alphabet())
    for text in ("\n é\x00", "漢"):
        ((letters, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert bytes(byte_letters()[each] for each in letters) == text.encode()


def test_special_tokens_and_ids_without_a_token_have_no_bytes_and_a_special_name_in_a_text_is_text():
    tokenizer = train("llama3")
    known = ByteTokenizer(tokenizer)
    eos = tokenizer.eos_token_id
    assert known.bytes[eos] == b"" and known.bytes.special[eos] and known.bytes.special.sum() == 3
    assert eos not in known.encode(["a</s>b"])[0]


def test_a_plain_added_token_has_the_bytes_of_its_text():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(train("gpt2").backend_tokenizer.to_str()), eos_token="</s>"
    )
    tokenizer.add_tokens(["<think>"])
    known = ByteTokenizer(tokenizer)
    (ids,) = known.encode(["<think>é"])
    assert known.bytes[ids[0]] == b"<think>"


@pytest.mark.parametrize(
    "normalizer, text, back",
    [
        (normalizers.Lowercase(), "A b C", "a b c"),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), None, None),
        (normalizers.NFKC(), None, None),
        (normalizers.Prepend("x"), None, None),
        (normalizers.Strip(), None, None),
    ],
)
def test_a_tokenizer_that_rewrites_plain_texts_is_refused_with_an_example(normalizer, text, back):
    content = Tokenizer.from_str(train("gpt2").backend_tokenizer.to_str())
    content.normalizer = normalizer
    with pytest.raises(UsageError, match=r"rewrites a text before it cuts it: '.+' comes back as '") as found:
        ByteTokenizer(PreTrainedTokenizerFast(tokenizer_object=content, eos_token="</s>"))
    if text:
        assert f"'{text}' comes back as '{back}'" in str(found.value)


def test_nfc_is_refused_on_a_text_that_it_changes_and_on_no_other():
    tokenizer = ByteTokenizer(train("qwen"))
    composed = unicodedata.normalize("NFC", "été")
    tokenizer.encode([composed])
    with pytest.raises(UsageError, match=r"'e\\u0301te\\u0301' comes back as '\\xe9t\\xe9'"):  # not alike on a terminal
        tokenizer.encode(["plain", unicodedata.normalize("NFD", composed)])


def test_vocabularies_that_drop_text_are_refused():
    def wrapped(model, **parts):
        backend = Tokenizer(model)
        for name, part in parts.items():
            setattr(backend, name, part)
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    pieces = wrapped(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(UsageError, match="is a WordPiece vocabulary, which drops the spaces"):
        TokenBytes.of(pieces)
    bare = wrapped(models.BPE({"a": 0}, []))
    with pytest.raises(UsageError, match="spells its tokens in an unknown way"):
        TokenBytes.of(bare)
    lacking = wrapped(models.BPE({"a": 0}, []), normalizer=normalizers.Replace(" ", "▁"))
    with pytest.raises(UsageError, match="has no byte fallback"):
        TokenBytes.of(lacking)
    spaced = Tokenizer.from_str(train("gpt2").backend_tokenizer.to_str())
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced.decoder = decoders.ByteLevel()
    with pytest.raises(UsageError, match="rewrites a text"):
        ByteTokenizer(PreTrainedTokenizerFast(tokenizer_object=spaced))


def test_the_table_of_events_is_printed_and_can_be_given():
    teacher, student = ByteTokenizer(train("llama3")), ByteTokenizer(train("gemma"))
    events = SpecialTokens.match(teacher, student)
    assert events.lines() == ["document end: </s> is </s>", "turn end: <|im_end|> is <|im_end|>"]
    given = SpecialTokens.match(teacher, student, {"<|im_end|>": "</s>", "<s>": ""})
    assert given.lines()[:2] == ["given: <|im_end|> is </s>", "given: <s> is left out"]
    lookup = given.lookup(len(teacher.bytes))
    assert lookup[teacher.tokenizer.bos_token_id] == -1 and lookup[5] == -2
    with pytest.raises(UsageError, match="'the' is not a special token"):
        SpecialTokens.match(teacher, student, {"the": "</s>"})
