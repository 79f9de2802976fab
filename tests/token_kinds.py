"""Tokenizers built as those of published families are, trained on a few texts, and random texts in many scripts."""

import functools
import random
import unicodedata

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "def read(path: str) -> bytes:\n    with open(path, 'rb') as file:\n        return file.read()\n\n",
    "The quick brown fox jumps over the lazy dog, and then 1,234 others did the same in 2024.\n",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Быстрая лиса прыгает.\n",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה. שלום עולם\n",
    "我能吞下玻璃而不伤身体。今天天气很好，我们去公园。\n",
    "naïve café 🙂🙃 x² ﬁ…\n",
)
KINDS = ("gpt2", "llama3", "qwen", "gemma")
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


@functools.cache
def train(kind: str, size: int = 600, more: str = "") -> PreTrainedTokenizerFast:
    """Train a tokenizer of a kind, with about `size` entries; `more` is added to its training texts."""
    texts = [*TEXTS, more] * 3
    special = {"eos_token": "</s>", "bos_token": "<s>", "additional_special_tokens": ["<|im_end|>"]}
    names = ["<s>", "</s>", "<|im_end|>"]
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>") if kind == "gemma" else models.BPE())
    if kind == "gemma":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", *names, *BYTE_PIECES])
    else:
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        digits = {"llama3": "{1,3}", "qwen": ""}.get(kind)
        cut = [] if digits is None else [pre_tokenizers.Split(Regex(SPLIT % digits), "isolated")]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, whole])
        backend.normalizer = normalizers.NFC() if kind == "qwen" else None
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, initial_alphabet=alphabet)
    trainer.show_progress = False
    backend.train_from_iterator(texts, trainer)
    if kind == "gemma":  # the trainer takes the bytes for special tokens; in published files they are plain ones
        backend = _plain_bytes(backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _plain_bytes(backend: Tokenizer) -> Tokenizer:
    import json

    content = json.loads(backend.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] not in BYTE_PIECES]
    return Tokenizer.from_str(json.dumps(content))


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Make texts of many scripts, emoji with joiners, digits, spaces, controls and rare characters, in NFC."""
    chance = random.Random(seed)
    scripts = [(32, 127), (0xC0, 0x250), (0x400, 0x460), (0x5D0, 0x5EA), (0x600, 0x6FF), (0x900, 0x970)]
    scripts += [(0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F6FF), (0x20, 0xD7FF), (0x10000, 0x10FFFF)]
    fixed = ["\u200f", "\u202e", "\U0001f469\u200d\U0001f4bb", "\U0001f44d\U0001f3fd", "  ", "\n\n", "\r\n", "\t", "0"]
    fixed += ["3.14159", "1234567890", "the ", "</s>", "<0x41>", "\x00", " return"]
    found = []
    for _ in range(count):
        parts = []
        for _ in range(chance.randint(1, 5)):
            low, high = chance.choice(scripts)
            parts.append("".join(chr(chance.randrange(low, high)) for _ in range(chance.randint(1, 5))))
            parts.append(chance.choice(fixed))
        found.append(unicodedata.normalize("NFC", "".join(parts)))
    return found
