"""Train the tokenizer of the shipped teacher: `python teachers/make_tokenizer.py OUT_FOLDER`.

A byte-level BPE of 2,048 entries (256 bytes, 1,791 merges, `<|endoftext|>`) over the train split of
`stdlib`. Every byte is in the alphabet, so any text comes back as it went in. The result depends only on the
text, that is on the version of the Python interpreter; a small vocabulary is bought with longer sequences.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kdtrain.data.corpus import documents

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"


def train() -> Tokenizer:
    """Train a byte-level BPE of exactly `VOCAB_SIZE` entries; no normalizer, so that no character is changed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents("stdlib", "train")), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        sys.exit(f"the text gave {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}")
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the class name that every transformers knows."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(out)
    config_file = out / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python teachers/make_tokenizer.py OUT_FOLDER")
    save(train(), Path(sys.argv[1]))
