"""`kdtrain generate`: continues a text with a student, or answers in its chat template, so that one can talk to it.

As in the samples of a run (`models.generate`) there is no KV cache: a whole forward a token, for every kind of model.

Shape suffixes: B rows, T tokens so far, V vocabulary.
"""

import sys
from contextlib import closing

import torch

from kdtrain.config import GenerateConfig
from kdtrain.data.formats import Document
from kdtrain.data.masks import Masks
from kdtrain.data.packing import Encoder
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.models.generate import generate
from kdtrain.models.loading import max_positions
from kdtrain.models.tokenizer import end_tokens, load_tokenizer
from kdtrain.monitor.progress import setup_logging
from kdtrain.precision.modes import autocast, pick_mode
from kdtrain.ranks import pick_device, refuse_many_processes
from kdtrain.run.saved_student import open_student
from kdtrain.tables import show


def main(config: GenerateConfig) -> int:
    """Print the prompt and its continuation, token by token; with `--json` one object at the end.

    UsageError: the student has no tokenizer, or the prompt no tokens or too many. RunError: the logits are non-finite.
    """
    setup_logging()
    refuse_many_processes()
    device = pick_device(config.device)
    mode = pick_mode("auto", device)
    student, place = open_student(config.student, device)
    if place is None:
        raise UsageError(f"{config.student} comes without a tokenizer; copy that of its student or teacher into it")
    tokenizer = load_tokenizer(place)
    if any("\ud800" <= each <= "\udfff" for each in config.prompt):
        raise UsageError(f"the prompt '{printable(config.prompt)[:40]}' is not UTF-8")
    chat = bool(tokenizer.chat_template and config.prompt and not config.raw)
    if chat:
        turn = Document(f"{config.student} (see --raw)", messages=[{"role": "user", "content": config.prompt}])
        with closing(Encoder(tokenizer, Masks("", 0), opening=True)) as encoder:
            prompt = encoder.prompt(turn)
            encoder.masks.refuse_none()
    else:
        prompt = tokenizer(config.prompt, add_special_tokens=False)["input_ids"] or [tokenizer.bos_token_id]
    if prompt in ([], [None]):
        why = "its chat template renders nothing; use --raw" if chat else "and the tokenizer no token to begin with"
        raise UsageError(f"the prompt has no tokens, {why}{'' if chat else '; give a PROMPT'}")
    most, width = max_positions(student.model), min(student.vocab_size, len(tokenizer))
    if max(prompt) >= student.vocab_size:
        raise UsageError(f"the prompt has tokens beyond the student's vocabulary of {student.vocab_size:,} entries")
    if most is not None and len(prompt) >= most:
        raise UsageError(f"the prompt has {len(prompt):,} tokens, and {config.student} reads {most:,}; shorten it")
    tokens = config.max_tokens if most is None else min(config.max_tokens, most - len(prompt))

    def next_logits(tokens_BT: torch.Tensor) -> torch.Tensor:
        with autocast(mode, device):
            logits_BV = student.head(student.eval()(tokens_BT)[:, -1])[:, :width].float()
        if not bool(torch.isfinite(logits_BV).all()):
            raise RunError(f"{config.student} gives non-finite logits; look at its weights")
        return logits_BV

    ends = end_tokens(getattr(student.model, "generation_config", None), tokenizer)
    written: list[int] = []
    shown = ""
    if not config.json:
        print(_plain(config.prompt), end="\n" if chat else "", flush=True)
    start = torch.tensor([prompt], device=device)
    for token in map(int, generate(next_logits, start, tokens, config.temperature, config.seed)):
        if token in ends:
            break
        written.append(token)
        text = str(tokenizer.decode(written))
        if not config.json and text.startswith(shown) and not text.endswith("\ufffd"):  # half a character
            print(_plain(text[len(shown) :]), end="", flush=True)
            shown = text
    text = str(tokenizer.decode(written))
    if config.json:
        result = {"student": config.student, "prompt": config.prompt, "text": text, "tokens": len(written)}
        show("", result, True)
    else:
        print(_plain(text[len(shown) :]) if text.startswith(shown) else "")
        sys.stdout.flush()
    return 0


def _plain(text: str) -> str:
    """`text` without control characters but for line breaks and tabs: a model may write any."""
    return "".join(each if each in "\n\t" else printable(each) for each in text)
