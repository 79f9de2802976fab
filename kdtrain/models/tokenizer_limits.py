"""Limits on a tokenizer that may have been downloaded, checked on its files before `tokenizers` reads them.

A tokenizer.json is a small program: each step of its normalizer rewrites the text that the step before it has left.
Forty steps that replace `a` by `aa` turn one letter into 2^40, and the process aborts in Rust, where nothing can stop
it. So the growth of a text is bounded: for each step the most characters it can make of one, multiplied. Words take
time, and their length is bounded too. `tokenizers` also reads steps without a `type`, so steps are known by their keys.
What takes long or much memory when it is loaded is found by loading it in a child first (`hub.refuse_slow_tokenizer`).

What it gives up: a regular expression that takes very long on some text is not found.
"""

import base64
import binascii
import math
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kdtrain.data.bytes import MAX_IDS
from kdtrain.errors import UsageError
from kdtrain.files import LARGE, read_bytes

MAX_ADDED = 100_000
"""Added tokens; a model of speech has 65,536. `tokenizers` takes 7 s for as many."""
MAX_STEPS = 64
"""Steps of normalizer and pre-tokenizer, and of a decoder; the longest known has about 12."""
MAX_GROWTH = 64
"""Characters that the steps may make of one; a SentencePiece normalizer makes up to 18 of one."""
MAX_TEMPLATE = 10_000
"""Entries of a post-processor."""
MAX_WORD = 1000
"""Characters of a word in WordPiece, whose time grows with their cube, and of a prefix or suffix of its pieces."""

_EVEN = {
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "BertPreTokenizer"),
    *("Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "UnicodeScripts", "CharDelimiterSplit"),
    *("FixedLength", "BPEDecoder", "ByteFallback", "CTC", "Fuse", "WordPiece"),
}
"""Steps that add nothing to a text of their own; another step, such as ByteLevel, doubles it at most."""
_TAKES_SOMETHING = re.compile(
    r"(?:(?:\\[dDsSwWnrt.]|\[\^?[^\[\]\\]+\]|[^\\()|*?^$\[\]{}+])(?:\+|\{[1-9]\d{0,3},?\d{0,4}\})?)+"
)
"""Regular expressions that match no empty text, as far as they are simple."""


class _Model(msgspec.Struct):
    vocab: Any = None
    max_input_chars_per_word: Any = None
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None


class _Tokenizer(msgspec.Struct):
    """The parts of tokenizer.json that are checked."""

    added_tokens: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    model: _Model | None = None


def refuse_endless(path: Path) -> None:
    """Refuse a tokenizer.json whose use would not end, or would take all memory. Raises `UsageError` that names it.

    OSError, ValueError: it cannot be read, or is not JSON of that shape.
    """
    found = msgspec.json.decode(read_bytes(path, LARGE), type=_Tokenizer)
    if isinstance(found.added_tokens, list) and (number := len(found.added_tokens)) > MAX_ADDED:
        raise UsageError(f"{path}: {number:,} added tokens; at most {MAX_ADDED:,} are supported")
    for part, chain in (("normalizer", [found.normalizer, found.pre_tokenizer]), ("decoder", [found.decoder])):
        others = {"normalizers", "pretokenizers", "decoders", "String", "Regex"}  # lists of steps, the pattern of one
        steps = [each for _, each in entries_of(chain) if isinstance(each, dict) and not each.keys() & others]
        if len(steps) > MAX_STEPS:
            raise UsageError(f"{path}: its {part} has {len(steps):,} steps; at most {MAX_STEPS} are supported")
        if math.prod(map(_growth, steps)) > MAX_GROWTH:
            raise UsageError(
                f"{path}: its {part} may make more than {MAX_GROWTH} characters of one; use another tokenizer"
            )
    if (entries := sum(1 for _ in entries_of([found.post_processor]))) > MAX_TEMPLATE:
        raise UsageError(f"{path}: its post_processor has {entries:,} entries; at most {MAX_TEMPLATE:,} are supported")
    model = found.model or _Model()
    # ids are places of tables, of gaps too: of a student's head, of its bytes
    ids = model.vocab.values() if isinstance(model.vocab, dict) else ()
    if any(isinstance(each, int) and each >= MAX_IDS for each in ids):
        raise UsageError(f"{path}: its vocabulary has ids above {MAX_IDS:,}; use another tokenizer")
    if isinstance(model.max_input_chars_per_word, int) and model.max_input_chars_per_word > MAX_WORD:
        raise UsageError(f"{path}: max_input_chars_per_word is above {MAX_WORD:,}; use another tokenizer")
    for affix in (model.continuing_subword_prefix, model.end_of_word_suffix):
        if isinstance(affix, str) and len(affix) > MAX_WORD:
            raise UsageError(f"{path}: a prefix or suffix has {len(affix):,} characters; use another tokenizer")


def entries_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of nested tables and lists; the entries of a list have the key ''."""
    left = [value]
    while left:
        each = left.pop()
        inside = [*each.items()] if isinstance(each, dict) else [("", one) for one in each]
        yield from inside
        left += [one for _, one in inside if isinstance(one, dict | list)]


def _growth(step: dict[str, Any]) -> int:
    """Return the most characters that a step makes of one character."""
    if "pattern" in step and "content" in step:
        pattern = step["pattern"]
        made = _longest(step["content"])
        literal, regex = (pattern.get(kind) if isinstance(pattern, dict) else None for kind in ("String", "Regex"))
        if isinstance(literal, str) and literal:
            return max(1, -(-made // len(literal)))
        sure = isinstance(regex, str) and len(regex) < MAX_WORD and _TAKES_SOMETHING.fullmatch(regex)
        return max(1, made) if sure else made + 1
    if "prepend" in step:
        return _longest(step["prepend"]) + 1
    if "precompiled_charsmap" in step:
        return max(1, _longest_replacement(step["precompiled_charsmap"]))
    return 1 if step.get("type") in _EVEN else 2


def _longest(text: Any) -> int:
    """Count the characters of a text, also after a later step has decomposed them."""
    return max(len(text), len(unicodedata.normalize("NFKD", text))) if isinstance(text, str) else 0


def _longest_replacement(charsmap: Any) -> int:
    """Count the characters of the longest text in a SentencePiece map: a trie behind its size, then NUL-ended texts."""
    try:
        content = base64.b64decode(charsmap)
    except (TypeError, ValueError, binascii.Error):  # which tokenizers refuses
        return 1
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    return max(_longest(each.decode("utf-8", "replace")) for each in texts)
