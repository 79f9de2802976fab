"""`kdtrain generate` continues a text with a student or answers it; `kdtrain chat` answers several turns.

Both write by `models.generate`: with a KV cache where the model has one, which between two turns keeps what their
tokens share. Text is shown as soon as its bytes are whole UTF-8. A turn ends at an end token of the model, of its
tokenizer, or at the special token with which the chat template ends an answer.

Shape suffixes: B rows, T tokens so far, V vocabulary.
"""

import logging
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch

from kdtrain.config.commands import ChatConfig, GenerateConfig, WritingConfig
from kdtrain.data.formats import Document, Messages, log_once
from kdtrain.data.masks import Masks
from kdtrain.data.packing import Encoder
from kdtrain.errors import RunError, UsageError, log, printable
from kdtrain.models.generate import decoding, generate
from kdtrain.models.loading import max_positions
from kdtrain.models.tokenizer import end_tokens, load_tokenizer
from kdtrain.monitor.progress import setup_logging
from kdtrain.ranks import pick_device
from kdtrain.run.saved_student import open_student
from kdtrain.tables import show


def main(config: GenerateConfig) -> int:
    """Print the prompt and its continuation, token by token; with `--json` print one object at the end.

    UsageError: the student has no tokenizer, or the prompt no tokens or too many. RunError: the logits are non-finite.
    """
    setup_logging()
    with ExitStack() as held:
        writer = _Writer(config.student, config, held)
        tokenizer = writer.tokenizer
        _refuse_bytes(config.prompt, "the prompt")
        if chat := bool(tokenizer.chat_template and config.prompt and not config.raw):
            prompt = writer.rendered([{"role": "user", "content": config.prompt}], " (see --raw)")
        else:
            prompt = tokenizer(config.prompt, add_special_tokens=False)["input_ids"] or [tokenizer.bos_token_id]
        if prompt in ([], [None]):
            why = "its chat template renders nothing; use --raw" if chat else "and the tokenizer no token to begin with"
            raise UsageError(f"the prompt has no tokens, {why}{'' if chat else '; give a PROMPT'}")
        writer.write(prompt, config.max_tokens, f"{config.prompt}\n" if chat else config.prompt)
    if config.json:
        found: dict[str, Any] = {"student": config.student, "prompt": config.prompt, "text": writer.text}
        found |= {"tokens": len(writer.tokens), "ids": [*writer.tokens]}
        show("", found, True)
    return 0


def chat(config: ChatConfig) -> int:
    """Answer each turn that a user types, or each line of stdin, until they end; with `--json` print one object then.

    UsageError: a model has no chat template, or a turn cannot be read. RunError: the logits are non-finite.
    """
    setup_logging()
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not config.json
    if terminal:
        with suppress(ImportError):  # of a Python without it, whose lines cannot be edited
            import readline  # noqa: F401
    turns = list[dict[str, Any]]()
    with ExitStack() as held:
        talkers = [_Talker(config.student, config, held)]
        if config.beside is not None:
            talkers.append(_Talker(config.beside, config, held))
        if terminal:
            print("Ctrl-C stops an answer, Ctrl-D ends.")
        while True:
            answers = None
            try:
                if (line := input("> " if terminal else "")).strip():
                    turns.append({"user": line, "answers": (answers := list[dict[str, Any]]())})
                    for each in talkers:
                        each.answer(line, len(turns) - 1, f"{each.name}: " if config.beside else "")
                        answers.append({"by": each.name, "text": each.text, "tokens": len(each.tokens)})
            except EOFError:
                break
            except UnicodeDecodeError:
                raise UsageError("a turn on stdin is not UTF-8; convert it to UTF-8") from None
            except UsageError as error:
                if not terminal:
                    raise
                log.warning("%s", error)
            except KeyboardInterrupt as stop:
                if "SIGTERM" in stop.args or not terminal:
                    raise
                print()
                if answers is None:
                    break
    if config.json:
        show("", {"student": config.student, "system": config.system, "turns": turns}, True)
    return 0


class _Writer:
    """A model that continues tokens, with its tokenizer and its end tokens; `held` frees its resources.

    A name that ships is a teacher's: nothing has trained the students that ship.
    """

    text = ""
    """What it wrote last."""
    tokens: Sequence[int] = ()

    def __init__(self, name: str, config: WritingConfig, held: ExitStack) -> None:
        self.name, self._config, self._held = name, config, held
        self._device = pick_device(config.device)
        self._student, place, _ = open_student(name, self._device, "teachers")
        if place is None:
            raise UsageError(f"{name} comes without a tokenizer; copy that of its student or teacher into it")
        self.tokenizer = load_tokenizer(place)
        self.positions = max_positions(self._student.model) or math.inf
        self.ends = {*end_tokens(getattr(self._student.model, "generation_config", None), self.tokenizer)}
        width = min(self._student.vocab_size, len(self.tokenizer))
        # in fp32, as the weights are: a step reads each of them once, and autocast would round them all at each step
        self._decoder = held.enter_context(decoding(self._student.eval(), width))

    @cached_property
    def _encoder(self) -> Encoder:
        return self._held.enter_context(closing(Encoder(self.tokenizer, opening=True)))

    def rendered(self, messages: Messages, hint: str = "") -> list[int]:
        """Return the tokens of a conversation up to an answer. UsageError, with the hint: the template refuses it."""
        self._encoder.masks = Masks("", 0)
        prompt = self._encoder.prompt(Document(f"{self.name}{hint}", messages=messages))
        self._encoder.masks.refuse_none()
        return prompt

    def write(self, prompt: list[int], most: int, title: str, row: int = 0) -> None:
        """Write the continuation of `prompt` into `text`; without `--json` to stdout, after a title, as it grows.

        row: that of its draws. UsageError: the model cannot read the prompt.
        """
        shown = self.text = ""
        self.tokens = tokens = list[int]()
        if max(prompt, default=0) >= (size := self._student.vocab_size):
            raise UsageError(f"the prompt has tokens beyond the student's vocabulary of {size:,} entries")
        if (room := self.positions - len(prompt)) < 1:
            raise UsageError(
                f"the prompt has {len(prompt):,} tokens, and {self.name} reads {self.positions:,}; shorten it"
            )
        self._say(title)
        start = torch.tensor([prompt], device=self._device)
        how = (self._config.temperature, self._config.seed, row)
        drawn = map(int, generate(self._next_logits, start, int(min(most, room)), *how))
        for token in takewhile(lambda each: each not in self.ends, drawn):
            tokens.append(token)
            self.text = str(self.tokenizer.decode(tokens))
            if self.text.startswith(shown) and not self.text.endswith("\ufffd"):  # half a character
                self._say(self.text[len(shown) :])
                shown = self.text
        self._say(self.text[len(shown) :] + "\n")

    def _next_logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        logits_BV = self._decoder(tokens_BT).float()
        if not bool(torch.isfinite(logits_BV).all()):
            raise RunError(f"{self.name} gives non-finite logits; look at its weights")
        return logits_BV

    def _say(self, text: str) -> None:
        """Print a text without control characters except line breaks and tabs: a model may write any."""
        if not self._config.json:
            print("".join(each if each in "\n\t" else printable(each) for each in text), end="", flush=True)


class _Talker(_Writer):
    """A model in a conversation."""

    _config: ChatConfig

    def __init__(self, name: str, config: ChatConfig, held: ExitStack) -> None:
        super().__init__(name, config, held)
        if not self.tokenizer.chat_template:
            raise UsageError(f"{name} has no chat template; kdtrain generate {name} 'TEXT' continues a text")
        self._messages: Messages = [] if config.system is None else [{"role": "system", "content": config.system}]
        self._first = len(self._messages)
        # the special token that the template writes behind an answer, if there is one
        roles = ("user", "assistant", "user")
        special = self.tokenizer.added_tokens_decoder
        with suppress(UsageError):
            opened, whole = (self.rendered([{"role": each, "content": "a"} for each in roles[:n]]) for n in (1, 3))
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, whole, strict=False)))
            self.ends |= {*[each for each in whole[same:] if each in special and special[each].special][:1]}

    def answer(self, line: str, row: int, title: str) -> None:
        """Answer a turn of the user; if the answer is interrupted, the conversation keeps the part written so far.

        UsageError: the model cannot read the turn, and the conversation is as before.
        """
        _refuse_bytes(line, "the turn")
        messages = [*self._messages, {"role": "user", "content": line}]
        most = self._config.max_new_tokens
        room = self.positions - min(most, self.positions // 2)
        while len(prompt := self.rendered(messages)) > room and len(messages) > self._first + 1:
            log_once(logging.INFO, f"{self.name} reads {self.positions:,} tokens: the oldest turns are left out")
            del messages[self._first : self._first + 2]
        answer = {"role": "assistant", "content": ""}
        before, self._messages = self._messages, [*messages, answer]
        try:
            self.write(prompt, most, title, row)
        except UsageError:
            self._messages = before
            raise
        finally:
            answer["content"] = self.text


def _refuse_bytes(text: str, what: str) -> None:
    if any("\ud800" <= each <= "\udfff" for each in text):
        raise UsageError(f"{what} '{printable(text)[:40]}' is not UTF-8")
