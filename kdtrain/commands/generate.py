"""`kdtrain generate` continues a text with a student or answers it; `kdtrain chat` answers several turns.

Both write by `models.generate`: with a KV cache where the model has one, which between two turns keeps what their
tokens share. Text is shown as soon as its bytes are whole UTF-8. A turn ends at an end token of the model, of its
tokenizer, or at the special token with which the chat template ends an answer.

Shape suffixes: B rows, T tokens so far, V vocabulary.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, Literal

import torch

from kdtrain.config import ChatConfig, GenerateConfig
from kdtrain.data.formats import Document, Messages
from kdtrain.data.masks import Masks
from kdtrain.data.packing import Encoder
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.models.generate import decoding, generate
from kdtrain.models.loading import max_positions
from kdtrain.models.tokenizer import end_tokens, load_tokenizer
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.ranks import pick_device, refuse_many_processes
from kdtrain.run.saved_student import open_student
from kdtrain.tables import show

Kind = Literal["students", "teachers"]
"""Whose names ship, for `read_spec`."""


def main(config: GenerateConfig) -> int:
    """Print the prompt and its continuation, token by token; with `--json` one object at the end.

    UsageError: the student has no tokenizer, or the prompt no tokens or too many. RunError: the logits are non-finite.
    """
    setup_logging()
    refuse_many_processes()
    with ExitStack() as held:
        writer, written = _Writer(config.student, config, held, "students"), list[int]()
        tokenizer = writer.tokenizer
        _refuse_bytes(config.prompt, "the prompt")
        if chat := bool(tokenizer.chat_template and config.prompt and not config.raw):
            prompt = writer.rendered([{"role": "user", "content": config.prompt}], " (see --raw)")
        else:
            prompt = tokenizer(config.prompt, add_special_tokens=False)["input_ids"] or [tokenizer.bos_token_id]
        if prompt in ([], [None]):
            why = "its chat template renders nothing; use --raw" if chat else "and the tokenizer no token to begin with"
            raise UsageError(f"the prompt has no tokens, {why}{'' if chat else '; give a PROMPT'}")
        pieces = writer.pieces(prompt, config.max_tokens, written)
        if not config.json:
            print(_plain(config.prompt), end="\n" if chat else "", flush=True)
        for piece in pieces:
            if not config.json:
                print(_plain(piece), end="", flush=True)
    if config.json:
        text = str(tokenizer.decode(written))
        show("", {"student": config.student, "prompt": config.prompt, "text": text, "tokens": len(written)}, True)
    else:
        print(flush=True)
    return 0


def chat(config: ChatConfig) -> int:
    """Answer each turn that a user types, or each line of stdin, until these end; with `--json` one object then.

    UsageError: a model has no chat template, or a turn cannot be read. RunError: the logits are non-finite.
    """
    setup_logging()
    refuse_many_processes()
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not config.json
    if terminal:
        with suppress(ImportError):  # of a Python without it, whose lines cannot be edited
            import readline  # noqa: F401
    with ExitStack() as held:
        talkers, turns = [_Talker(config.student, config, held)], list[dict[str, Any]]()
        if config.beside is not None:
            talkers.append(_Talker(config.beside, config, held, "teachers"))
        if terminal:
            print("Ctrl-C stops an answer, Ctrl-D ends.")
        while (line := _next_line(terminal)) is not None:
            answers = list[dict[str, Any]]()
            try:
                for each in talkers if line.strip() else ():
                    if len(talkers) > 1 and not config.json:
                        print(f"{each.name}: ", end="", flush=True)
                    answers.append(each.answer(line, row=len(turns)))
            except UsageError as error:
                if not terminal:
                    raise
                log.warning("%s", error)
            except KeyboardInterrupt as stop:
                if stop.args or not terminal:  # SIGTERM has its name
                    raise
                print()
            if answers:
                turns.append({"user": line, "answers": answers})
    if config.json:
        show("", {"student": config.student, "system": config.system, "turns": turns}, True)
    return 0


class _Writer:
    """A model that continues tokens, with its tokenizer and its end tokens; what it holds ends with `held`."""

    def __init__(self, name: str, config: GenerateConfig | ChatConfig, held: ExitStack, kind: Kind) -> None:
        self.name, self._device, self._held = name, pick_device(config.device), held
        self._how = config.temperature, config.seed
        self._student, place, _ = open_student(name, self._device, kind)
        if place is None:
            raise UsageError(f"{name} comes without a tokenizer; copy that of its student or teacher into it")
        self.tokenizer = load_tokenizer(place)
        self.positions = max_positions(self._student.model)
        self.ends = {*end_tokens(getattr(self._student.model, "generation_config", None), self.tokenizer)}
        width = min(self._student.vocab_size, len(self.tokenizer))
        # in fp32, as the weights are: a step reads each of them once, and autocast would round them all at each step
        self._decoder = held.enter_context(decoding(self._student.eval(), width))

    @cached_property
    def _encoder(self) -> Encoder:
        return self._held.enter_context(closing(Encoder(self.tokenizer, Masks("", 0), opening=True)))

    def rendered(self, messages: Messages, hint: str = "") -> list[int]:
        """The tokens of a conversation up to an answer. UsageError, with the hint: the template refuses it."""
        self._encoder.masks = Masks("", 0)
        prompt = self._encoder.prompt(Document(f"{self.name}{hint}", messages=messages))
        self._encoder.masks.refuse_none()
        return prompt

    def pieces(self, prompt: list[int], most: int, written: list[int], row: int = 0) -> Iterator[str]:
        """Return the text behind `prompt` in pieces, each as soon as it is whole; `written` gets its tokens.

        row: that of its draws. UsageError: the model cannot read the prompt.
        """
        if max(prompt, default=0) >= (size := self._student.vocab_size):
            raise UsageError(f"the prompt has tokens beyond the student's vocabulary of {size:,} entries")
        room = most if self.positions is None else self.positions - len(prompt)
        if room < 1:
            raise UsageError(
                f"the prompt has {len(prompt):,} tokens, and {self.name} reads {self.positions:,}; shorten it"
            )
        start = torch.tensor([prompt], device=self._device)
        return self._whole(generate(self._next_logits, start, min(most, room), *self._how, row), written)

    def _next_logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        logits_BV = self._decoder(tokens_BT).float()
        if not bool(torch.isfinite(logits_BV).all()):
            raise RunError(f"{self.name} gives non-finite logits; look at its weights")
        return logits_BV

    def _whole(self, tokens: Iterator[torch.Tensor], written: list[int]) -> Iterator[str]:
        shown = text = ""
        for token in takewhile(lambda each: each not in self.ends, map(int, tokens)):
            written.append(token)
            text = str(self.tokenizer.decode(written))
            if text.startswith(shown) and not text.endswith("\ufffd"):  # half a character
                yield text[len(shown) :]
                shown = text
        if text.startswith(shown):
            yield text[len(shown) :]


class _Talker(_Writer):
    """A model in a conversation."""

    def __init__(self, name: str, config: ChatConfig, held: ExitStack, kind: Kind = "students") -> None:
        super().__init__(name, config, held, kind)
        if not self.tokenizer.chat_template:
            raise UsageError(f"{name} has no chat template; kdtrain generate {name} 'TEXT' continues a text")
        self._config, self._all_read = config, True
        self._messages: Messages = [] if config.system is None else [{"role": "system", "content": config.system}]
        self._first = len(self._messages)
        self.ends |= self._turn_end()

    def _turn_end(self) -> set[int]:
        """The special token that the template writes behind an answer, if there is one."""
        roles = ("user", "assistant", "user")
        with suppress(UsageError):
            opened, whole = (self.rendered([{"role": each, "content": "a"} for each in roles[:n]]) for n in (1, 3))
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, whole, strict=False)))
            special = {token for token, each in self.tokenizer.added_tokens_decoder.items() if each.special}
            return {*islice(filter(special.__contains__, whole[same:]), 1)}
        return set()

    def answer(self, line: str, row: int) -> dict[str, Any]:
        """Answer a turn of the user, on stdout without `--json`; of an interrupted answer what was written remains."""
        _refuse_bytes(line, "the turn")
        messages, most = [*self._messages, {"role": "user", "content": line}], self._config.max_new_tokens
        prompt = self.rendered(messages)
        while self._is_long(prompt) and len(messages) > self._first + 1:
            if self._all_read:
                log.info("%s reads %s tokens: the oldest turns are left out", self.name, f"{self.positions:,}")
            self._all_read = False
            del messages[self._first : self._first + 2]
            prompt = self.rendered(messages)
        written, text = list[int](), ""
        pieces = self.pieces(prompt, most, written, row)
        try:
            for piece in pieces:
                text += piece
                if not self._config.json:
                    print(_plain(piece), end="", flush=True)
        finally:
            self._messages = [*messages, {"role": "assistant", "content": text}]
        if not self._config.json:
            print(flush=True)
        return {"by": self.name, "text": text, "tokens": len(written)}

    def _is_long(self, prompt: list[int]) -> bool:
        """Whether an answer, or one of half the model's positions, has no room behind it."""
        most = self.positions
        return most is not None and len(prompt) > most - min(self._config.max_new_tokens, most // 2)


def _next_line(terminal: bool) -> str | None:
    """The user's next turn; None at the end."""
    try:
        return input("> " if terminal else "")
    except UnicodeDecodeError:
        raise UsageError("a turn on stdin is not UTF-8; convert it to UTF-8") from None
    except EOFError:
        pass
    except KeyboardInterrupt as stop:
        if stop.args or not terminal:
            raise
    if terminal:
        print()
    return None


def _refuse_bytes(text: str, what: str) -> None:
    if any("\ud800" <= each <= "\udfff" for each in text):
        raise UsageError(f"{what} '{printable(text)[:40]}' is not UTF-8")


def _plain(text: str) -> str:
    """`text` without control characters but for line breaks and tabs: a model may write any."""
    return "".join(each if each in "\n\t" else printable(each) for each in text)
