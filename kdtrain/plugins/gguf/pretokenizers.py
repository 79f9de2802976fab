"""How text is cut into words before the merges of a byte-level BPE, by the names that llama.cpp gives these rules.

A GGUF file holds the name alone (`tokenizer.ggml.pre`); the rule stands in llama.cpp, and here as the original
tokenizer.json has it. Each was compared with llama.cpp on 200 texts (tests/plugins/gguf): digits, runs of spaces, code,
other scripts, emoji. llama.cpp does not compose characters (NFC), as Qwen's own tokenizer does first; here it is done.
"""

from dataclasses import dataclass, field
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _bytes(regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(digits: str) -> dict[str, Any]:
    regex = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_REST}"
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True)
class PreTokenizer:
    """The parts of a tokenizer.json that a name stands for."""

    pre_tokenizer: dict[str, Any] = field(hash=False)
    normalizer: dict[str, Any] | None = field(default=None, hash=False)
    ignore_merges: bool = False
    """A word that is an entry is not merged from its letters."""
    add_bos: bool = False
    """A text begins with the bos token where a file has no `tokenizer.ggml.add_bos_token` (llama-vocab.cpp)."""


_DIGITS = PreTokenizer(_sequence({"type": "Digits", "individual_digits": True}, _bytes(True)))
_LLAMA3 = PreTokenizer(_sequence(_split(r"\p{N}{1,3}"), _bytes(False)), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(_bytes(True)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "qwen2": PreTokenizer(_sequence(_split(r"\p{N}"), _bytes(False)), {"type": "NFC"}),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
}
