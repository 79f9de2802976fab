"""The exact bytes of every token of a tokenizer, so that two tokenizers can meet on the same text.

A byte-level vocabulary spells each byte as a character (Radford et al. 2019; GPT-2, Llama 3, Qwen). One in the manner
of SentencePiece (Kudo & Richardson 2018, arXiv 1808.06226; Llama 2, Gemma) spells a space as `▁`, and a byte of a
character that it lacks as `<0x0A>`. The bytes of a text are then those of its tokens, one after the other, and a token
may begin or end within a character. WordPiece drops the spaces between words, other vocabularies drop characters, or
write the ends of words into their tokens (CLIP's `</w>`): they are refused.

A tokenizer may rewrite a text before it cuts it: into lower case, to NFC or NFKC, with a space in front. What it does
to a text is seen by encoding it: `ByteTokenizer` refuses one that rewrites plain texts, and `encode` compares the bytes
of each text, so that NFC is refused on a text with decomposed accents and not on others.

A special token has no bytes: it is an event (a document begins or ends, a turn ends). `SpecialTokens` is the table of
what one tokenizer's events are in the other; it is printed, and can be given.

Shape suffix: V entries of a tokenizer.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtrain.errors import UsageError, panics_refused, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_Array = np.ndarray[Any, np.dtype[Any]]
_Spell = Callable[[str], bytes]

_PLAIN = (
    *("a", "A b C", " two  spaces\n\n\tand a tab \r\n", "1234567 8.5", "na\u00efve \u00e9t\u00e9 \u00df"),
    *("\u6f22\u5b57 \u043c\u0438\u0440 \u05e9\u05dc\u05d5\u05dd", "\U0001f642!", "x\u00b2 \u2026 \ufb01", "\x00\x7f"),
)
"""Texts that every tokenizer must give back; all are in NFC."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
MAX_IDS = 2**22
"""Ids of a tokenizer; the largest vocabulary known has 2^18."""
MAX_SPELLED = 2**24
"""Tokens of a student in all of a teacher's together; published pairs have two million."""
_AT_ONCE = 1 << 13
"""Texts that are encoded at once: what the backend keeps of each takes far more memory than its ids."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|eom_id|>")
"""Tokens that end a turn in published chat templates."""


@functools.cache
def byte_letters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """The bytes of all tokens, one after the other; special tokens and ids without a token have none."""

    name: str
    """What messages call the tokenizer."""
    flat: _Array
    """uint8."""
    starts: _Array
    """int64 [V+1]: the bytes of token v are flat[starts[v] : starts[v + 1]]."""
    special: _Array
    """bool [V]."""

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast") -> "TokenBytes":
        """Read the bytes off a tokenizer's vocabulary. UsageError: its tokens do not tell them, or its ids are odd."""
        name = f"the tokenizer {printable(str(getattr(tokenizer, 'name_or_path', '')))}".rstrip()
        if isinstance(tokenizer, str | Path):
            raise UsageError(f"'{printable(str(tokenizer))[:120]}' is a path; give AutoTokenizer.from_pretrained of it")
        backend = _fast_backend(tokenizer, name)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if len({*vocabulary.values()}) < len(vocabulary):
            raise UsageError(f"{name} has two tokens of one id; mend its vocabulary")
        size = max(vocabulary.values(), default=-1) + 1
        if not 0 < size <= MAX_IDS:  # before `to_str`, which takes memory for every id
            raise UsageError(f"{name} has ids up to {size - 1:,}; at most {MAX_IDS:,} tokens are supported")
        content = json.loads(backend.to_str())
        spell, spell_added = _spelling(name, content)
        added = {each["id"]: each for each in content["added_tokens"]}
        pieces = [b""] * size
        for text, number in vocabulary.items():
            pieces[number] = spell(text)
        special = np.zeros(size, bool)
        for number, each in added.items():
            special[number] = each["special"]
            pieces[number] = b"" if each["special"] else spell_added(each["content"])
        for number in tokenizer.all_special_ids:
            if number is not None and 0 <= number < size:
                special[number] = True
                pieces[number] = b""
        starts = np.concatenate([[0], np.cumsum([len(each) for each in pieces])]).astype(np.int64)
        return cls(name, np.frombuffer(b"".join(pieces), np.uint8), starts, special)

    def __len__(self) -> int:
        return len(self.special)

    def __getitem__(self, token: int) -> bytes:
        return self.flat[self.starts[token] : self.starts[token + 1]].tobytes()

    def equals(self, other: "TokenBytes") -> bool:
        """Return True if two vocabularies are the same, by number."""
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ("starts", "flat", "special"))

    @functools.cached_property
    def lengths(self) -> _Array:
        """int64 [V], the bytes of each token."""
        return np.diff(self.starts)

    def join(self, tokens: _Array) -> _Array:
        """Return the bytes of tokens (ids within V), one after the other, uint8."""
        sizes = self.lengths[tokens]
        ends = np.cumsum(sizes)
        shift = np.repeat(self.starts[tokens] - (ends - sizes), sizes)
        return self.flat[shift + np.arange(len(shift))]  # type: ignore[no-any-return]


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, also the steps inside sequences."""
    left = [part]
    while left:
        each = left.pop(0)
        if isinstance(each, dict):
            yield each
            left += [step for key in ("normalizers", "pretokenizers", "decoders") for step in each.get(key) or ()]


def _spelling(name: str, content: dict[str, Any]) -> tuple[_Spell, _Spell]:
    """Return the functions from the spelling of a token, and of an added one, to its bytes. UsageError: none exist."""
    model = content["model"]
    kind = content["model"].get("type")
    if model.get("dropout"):
        raise UsageError(f"{name} cuts a text at random (dropout = {model['dropout']}); take its dropout out")
    before = [*_steps(content["normalizer"]), *_steps(content["pre_tokenizer"])]
    if kind in ("WordPiece", "WordLevel"):
        raise UsageError(
            f"{name} is a {kind} vocabulary, which drops the spaces between words: its tokens do not give the text "
            "back; use a byte-level tokenizer, or one of SentencePiece with byte fallback"
        )
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise UsageError(
                f"{name} writes '{printable(str(model[affix]))}' into its tokens ({affix}), which no text has: they do "
                "not give the text back; use a tokenizer without it"
            )
    if any(step.get("type") == "ByteLevel" for step in before):
        letters = byte_letters()

        def of_letters(text: str) -> bytes:
            try:
                return bytes([letters[each] for each in text])
            except KeyError:  # a token that no text is cut into
                return b""

        return of_letters, str.encode
    marks = [step.get("replacement") for step in before if step.get("type") == "Metaspace"]
    marks += [step["content"] for step in before if step.get("pattern") == {"String": " "} and "content" in step]
    if not marks or not isinstance(marks[-1], str) or not marks[-1]:
        raise UsageError(
            f"{name} spells its tokens in an unknown way: neither bytes as letters nor spaces as a mark; use a "
            "byte-level tokenizer, or one of SentencePiece with byte fallback"
        )
    if not model.get("byte_fallback"):
        raise UsageError(
            f"{name} has no byte fallback: it drops characters that its vocabulary lacks; use a byte-level tokenizer, "
            "or one of SentencePiece with byte fallback"
        )
    mark = marks[-1]

    def of_pieces(text: str) -> bytes:
        found = _BYTE.fullmatch(text)
        return bytes([int(found[1], 16)]) if found else text.replace(mark, " ").encode("utf-8", "replace")

    # an added token of marks (Gemma has runs of them) is what spaces are cut into
    return of_pieces, of_pieces


def _fast_backend(tokenizer: "PreTrainedTokenizerFast", name: str) -> Any:
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise UsageError(f"{name} has no fast backend; use one whose folder holds a tokenizer.json")
    return backend


def whole_backend(tokenizer: "PreTrainedTokenizerFast", name: str) -> tuple[Any, list[int]]:
    """Return a copy of the backend that takes a text whole, and the bos token if it begins every text with it.

    UsageError: there is none, or it cannot take a text.
    """
    backend = copy.deepcopy(_fast_backend(tokenizer, name))
    # A tokenizer.json may hold a truncation from its last use, which would silently cut every text.
    backend.no_truncation()
    backend.no_padding()
    with panics_refused(f"{name} cannot take this text"):
        written = backend.encode("a").ids[:1]
    return backend, written if written == [tokenizer.bos_token_id] else []


class ByteTokenizer:
    """A tokenizer whose tokens are known by their bytes.

    keeps: it must give plain texts back; one that only reads tokens need not.

    UsageError: `TokenBytes.of`, or it does not give plain texts back (an example is in the message).
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", keeps: bool = True) -> None:
        self.bytes = TokenBytes.of(tokenizer)
        self.tokenizer = tokenizer
        self._backend, bos = whole_backend(tokenizer, self.bytes.name)
        # The name of a special token in a text is text.
        self._backend.encode_special_tokens = True
        self.writes_bos = bool(bos)
        """Whether it begins every text with its bos token."""
        if keeps:
            self.encode(_PLAIN)

    def cut(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize each text, without special tokens. UsageError: the tokenizer cannot take one."""
        with panics_refused(f"{self.bytes.name} cannot take this text"):
            parts = (list(texts[start : start + _AT_ONCE]) for start in range(0, len(texts), _AT_ONCE))
            return [
                each.ids for part in parts for each in self._backend.encode_batch_fast(part, add_special_tokens=False)
            ]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize each text. UsageError: the tokens have other bytes than the text (named by an example)."""
        found = self.cut(texts)
        for text, tokens in zip(texts, found, strict=True):
            if (joined := self.bytes.join(np.array(tokens, np.int64)).tobytes()) != text.encode():
                raise UsageError(self.altered(text.encode(), joined))
        return found

    def altered(self, text: bytes, joined: bytes) -> str:
        """Return the message for a text whose tokens have other bytes."""
        same = next((n for n, (a, b) in enumerate(zip(text, joined, strict=False)) if a != b), len(joined))
        start = max(0, same - 8)
        before, after = (each[start : same + 12].decode("utf-8", "replace") for each in (text, joined))
        return (
            f"{self.bytes.name} rewrites a text before it cuts it: {before!a} comes back as {after!a}; use one "
            "that keeps the bytes (no lower case, no normal form, no added space), or leave such texts out"
        )


@dataclass(frozen=True)
class SpecialTokens:
    """The counterparts of one tokenizer's special tokens, the teacher's, in another tokenizer, the student's."""

    table: dict[int, int]
    """The student's token for a token of the teacher; -1: it is left out."""
    names: tuple[tuple[str, str, str], ...]
    """Event, the teacher's token, the student's or nothing; in the order of the table."""

    @classmethod
    def match(
        cls, teacher: ByteTokenizer, student: ByteTokenizer, given: Mapping[str, str] | None = None
    ) -> "SpecialTokens":
        """Match the ends of documents, their beginnings where both tokenizers write one, and the ends of turns.

        given: more of them, by the names of the tokens, which go before these; an empty name leaves a token of the
        teacher out. UsageError: one of the names is not a special token, or the student has no eos token.
        """
        found: dict[int, tuple[str, int]] = {}
        for name, other in (given or {}).items():
            found[_token(teacher, name)] = ("given", _token(student, other) if other else -1)
        if student.tokenizer.eos_token_id is None:
            raise UsageError(f"{student.bytes.name} has no end-of-sequence token; set eos_token in its configuration")
        ends = ("document end", teacher.tokenizer.eos_token_id, student.tokenizer.eos_token_id)
        bos = student.tokenizer.bos_token_id if student.writes_bos else -1
        begins = ("document start", teacher.tokenizer.bos_token_id if teacher.writes_bos else None, bos)
        turns = [
            ("turn end", one, other)
            for one in _turn_ends(teacher)
            for other in [*_turn_ends(student), student.tokenizer.eos_token_id][:1]
        ]
        for event, token, other in (ends, begins, *turns):
            if token is not None:
                found.setdefault(token, (event, other))
        return cls(
            {token: other for token, (_, other) in found.items()},
            tuple((event, spelled(teacher, token), spelled(student, other)) for token, (event, other) in found.items()),
        )

    def lines(self) -> list[str]:
        """Return the lines of the table for people."""
        return [f"{event}: {one} is {other or 'left out'}" for event, one, other in self.names]

    def lookup(self, size: int) -> _Array:
        """Return int64 [size], the student's token for each of the teacher's; -1: left out, -2: not in the table."""
        found = np.full(size, -2, np.int64)
        found[list(self.table)] = list(self.table.values())
        return found


def _token(tokenizer: ByteTokenizer, name: str) -> int:
    number = tokenizer.tokenizer.backend_tokenizer.token_to_id(name)
    if number is None or not tokenizer.bytes.special[number]:
        raise UsageError(f"'{printable(name)}' is not a special token of {tokenizer.bytes.name}")
    return int(number)


def _turn_ends(tokenizer: ByteTokenizer) -> list[int]:
    numbers = (tokenizer.tokenizer.backend_tokenizer.token_to_id(name) for name in TURN_ENDS)
    return [number for number in numbers if number is not None and tokenizer.bytes.special[number]]


def spelled(tokenizer: ByteTokenizer, token: int) -> str:
    """Return a token as messages show it; nothing for one below 0."""
    if token < 0:
        return ""
    return printable(tokenizer.tokenizer.backend_tokenizer.id_to_token(token) or str(token))
