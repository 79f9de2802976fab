"""Last-word accuracy: the words of passages, and what greedy decoding writes of them."""

import pytest
import torch

from kdtrain.data.formats import Document
from kdtrain.errors import UsageError
from kdtrain.models.head import split
from kdtrain.models.last_word import is_right, passages
from kdtrain.testing import tiny_model, tiny_tokenizer

TEXTS = [
    f"{a} and {b} are {a + b}, said {name}{end}"
    for a, b, name, end in (
        (1, 2, "Ann", "."),
        (3, 4, "Bob", "!"),
        (5, 6, "the cat", '."'),
        (7, 8, "x_y", ""),
        (9, 1, "Zoë", " ..."),
        (2, 2, "me", "\n"),
    )
]
TEXTS += [text.replace("said", "wrote") for text in TEXTS]


def test_a_dozen_passages_are_counted_as_greedy_decoding_by_hand_counts_them():
    tokenizer, model = tiny_tokenizer(300), tiny_model("llama", 300, seed=1)
    for parameter in model.parameters():
        parameter.data.mul_(6 if parameter.ndim > 1 else 1)
    student = split(model.eval())
    found = list(passages([Document(f"p:{n}", text) for n, text in enumerate(TEXTS)], tokenizer, 64))
    for text, (tokens, own) in zip(TEXTS, found, strict=True):
        word = [each for each in text.replace(",", " ").replace(".", " ").replace("!", " ").replace('"', " ").split()][
            -1
        ]
        assert (
            tokenizer.decode(tokens[-own:]).strip().endswith(word)
            and tokenizer.decode(tokens) == text[: text.rindex(word) + len(word)]
        )
        # what the model itself writes is right, and right only that
        written = tokens[:-own]
        for _ in range(own):
            with torch.no_grad():
                written = [*written, int(model(torch.tensor([written])).logits[0, -1].argmax())]
        assert is_right(student.logits, tokens, own, torch.device("cpu")) == (written == tokens)
        assert is_right(student.logits, written, own, torch.device("cpu"))


@pytest.mark.parametrize(
    "document, message",
    [
        (Document("row 3", "alone"), "row 3 has no last word after others"),
        (Document("row 4", "... --- ..."), "row 4 has no last word after others"),
        (Document("row 5", messages=[{"role": "user", "content": "a b"}]), "row 5: a conversation is no passage"),
        (Document("row 6", "a " + "b" * 80), "row 6: its last word alone has"),
    ],
)
def test_a_passage_without_a_last_word_is_refused_by_its_row(document, message):
    with pytest.raises(UsageError, match=message):
        list(passages([document], tiny_tokenizer(300), 8))
