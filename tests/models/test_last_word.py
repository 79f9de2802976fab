"""Last-word accuracy: the words of passages, and what greedy decoding writes of them."""

import pytest
import torch

from kdtrain.data.formats import Document
from kdtrain.errors import UsageError
from kdtrain.models.head import split
from kdtrain.models.last_word import is_right, passages
from kdtrain.testing import tiny_model, tiny_tokenizer

ENDS = {"Ann": ".", "Bob": "!", "cat": '."', "x_y": "", "Zoë": " ...", "me": "\n"}
TEXTS = [(f"1 and 2 are {verb} by {word}", word, end) for word, end in ENDS.items() for verb in ("added", "read")]


def test_a_dozen_passages_are_counted_as_greedy_decoding_by_hand_counts_them():
    tokenizer, model = tiny_tokenizer(300), tiny_model("llama", 300, seed=1).eval()
    for parameter in model.parameters():
        parameter.data.mul_(6 if parameter.ndim > 1 else 1)
    student, device = split(model), torch.device("cpu")
    documents = [Document(f"row {n}", text + end) for n, (text, _, end) in enumerate(TEXTS)]
    for (text, word, _), (tokens, own) in zip(TEXTS, passages(documents, tokenizer, 64), strict=True):
        assert tokenizer.decode(tokens) == text and tokenizer.decode(tokens[-own:]).strip() == word
        written = tokens[:-own]  # by the model itself, token by token
        for _ in range(own):
            with torch.no_grad():
                written = [*written, int(model(torch.tensor([written])).logits[0, -1].argmax())]
        assert is_right(student.logits, tokens, own, device) == (written == tokens)
        assert is_right(student.logits, written, own, device)


@pytest.mark.parametrize(
    "document, message",
    [
        (Document("row 3", "alone"), "row 3 has no last word after others"),
        (Document("row 4", "... --- ..."), "row 4 has no last word after others"),
        (Document("row 5", messages=[{"role": "user", "content": "a b"}]), "row 5: a conversation is not a passage"),
        (Document("row 6", "a " + "b" * 80), "row 6: its last word alone has"),
    ],
)
def test_a_passage_without_a_last_word_is_refused_by_its_row(document, message):
    with pytest.raises(UsageError, match=message):
        list(passages([document], tiny_tokenizer(300), 8))
