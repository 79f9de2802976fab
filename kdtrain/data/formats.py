"""What a row of a data set is: a text, a conversation, or a prompt with its completion.

`row_format` chooses the format by the columns that a source has, or takes the requested one:

    text                a column of texts; every token counts in the loss
    messages            lists of {role, content}; only the assistant's tokens count
    sharegpt            lists of {from, value}, the names of the roles of ShareGPT; only the assistant's tokens count
    alpaca              instruction, input and output, also system and history: a conversation of user and assistant
    prompt-completion   two texts, or two lists of messages; only the completion counts

A row that cannot be learned from is left out, with its reason (`LeftOut`); `Tally` counts the reasons, so that a
command can say what it did not read. What it gives up: the names of its columns decide what a row is, not what they
hold.
"""

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kdtrain.errors import UsageError, log, printable
from kdtrain.files import open_regular, refuse_depth

_BEGINNING, _ROWS = 2**20, 100
"""Bytes and rows of a file that are looked at for its columns."""

Messages = list[dict[str, Any]]
"""Each: role, content, other texts, `tool_calls`, and `weight` 0 if it is not learned; the first may have `tools`."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn whose text chat templates render before its content."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}
"""Names of roles beside `from`, and what chat templates call them."""


@dataclass(frozen=True)
class Document:
    """One text, or one conversation (a list of `role` and `content`); `key` names it within its source.

    prompt: how much of its beginning is not learned: characters of the text, or messages. teacher_prompt: what the
    teacher reads in its place, as the column of this name has it.
    """

    key: str
    text: str | None = None
    messages: Messages | None = None
    prompt: int = 0
    teacher_prompt: Any = None

    @classmethod
    def of_prompt(cls, key: str, given: Any) -> "Document | None":
        """Make the document of a prompt alone: a text, or a list of messages; None if it is neither."""
        form = row_format("", Columns(format="prompt-completion", prompts=True), ("prompt", "completion"))
        try:
            form.convert(key, {"prompt": given})
        except LeftOut as why:
            return why.prompt
        return None

    def before_answer(self) -> "Document":
        """Return the document with all before its last answer as its prompt, where none is stated."""
        if self.prompt or self.messages is None:
            return self
        return replace(self, prompt=len(self.messages) - (self.messages[-1]["role"] == "assistant"))

    def for_teacher(self) -> "Document":
        """Return the document with the teacher's prompt before its answer. UsageError: that is of another kind."""
        own = Document.of_prompt(self.key, self.teacher_prompt) or Document(self.key)
        if self.messages is not None and own.messages is not None:
            messages = [*own.messages, *self.messages[self.prompt :]]
            return replace(own, messages=messages, prompt=len(own.messages))
        if self.messages is None and own.text:
            return replace(own, text=own.text + str(self.text)[self.prompt :], prompt=len(own.text))
        what = "a text" if self.messages is None else "a list of messages"
        raise UsageError(f"{self.key}: its teacher_prompt must be {what}, as its prompt is")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The requested format, the column of texts, and the column of conversations."""

    format: str = "auto"
    text: str = "text"
    messages: str | None = None
    prompts: bool = False
    """Rows need no answer."""
    teacher: bool = False
    """Rows have a prompt of the teacher's own."""


class LeftOut(Exception):
    """A row that is not read; `reason` is one of a few, `detail` tells more about this row.

    prompt: what it is a prompt of, if it lacks nothing but an answer.
    """

    def __init__(self, reason: str, detail: str = "", prompt: Document | None = None) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.prompt = reason, detail, prompt


Convert = Callable[[str, Mapping[str, Any]], Document]


@dataclass(frozen=True)
class RowFormat:
    """A format with the columns that it reads: `convert` makes a document of a row, or raises `LeftOut`."""

    name: str
    columns: tuple[str, ...]
    convert: Convert
    holds: str = "conversation in which the assistant speaks"
    other: str | None = None
    """The format of the columns that are not read, if they are in one."""


@dataclass
class Tally:
    """The number of rows read, and left out by reason."""

    source: str
    form: RowFormat
    kept: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def leave_out(self, key: str, why: LeftOut) -> None:
        """Count a row that is left out."""
        self.reasons[why.reason] += 1
        if why.reason not in self.first:
            row = key.removeprefix(f"{self.source} ")
            self.first[why.reason] = printable(f"{row}: {why.detail}" if why.detail else row)[:80]

    def why(self) -> str:
        """Return the reasons with their counts and each one's first row, the most frequent first; empty without any."""
        return ", ".join(f"{n:,} {reason} (first: {self.first[reason]})" for reason, n in self.reasons.most_common())

    def report(self) -> None:
        """Log the format and the rows left out; nothing for plain text of which all rows were read."""
        line = f"{self.source}: read as {self.form.name} ({', '.join(self.form.columns)}): "
        line += f"{self.kept:,} of {self.kept + self.reasons.total():,} rows"
        line += f"; left out {self.why()}" if self.reasons else ""
        line += f"; its other columns are read with --format {self.form.other}" if self.form.other else ""
        if self.reasons or self.form.other or self.form.name != "text":
            log_once(logging.INFO, line)


@functools.cache
def log_once(level: int, line: str) -> None:
    """Log a line the first time only, because each split lists the same files and goes through the same rows."""
    log.log(level, "%s", line)


def row_format(source: str, wanted: Columns, names: Collection[str]) -> RowFormat:
    """Return the format of a source whose rows have the columns `names`.

    Raises:
        UsageError: they lack a column, or are in none of the formats.
    """
    found = _format_of(source, wanted, names)
    column = "teacher_prompt"
    if not wanted.teacher:
        return found
    _refuse_missing(source, names, column, "option --teacher-prompts")

    def convert(key: str, row: Mapping[str, Any]) -> Document:
        try:
            return replace(found.convert(key, row), teacher_prompt=row[column])
        except LeftOut as why:
            why.prompt = why.prompt and replace(why.prompt, teacher_prompt=row[column])
            raise

    return replace(found, columns=(*found.columns, column), convert=convert)


def _format_of(source: str, wanted: Columns, names: Collection[str]) -> RowFormat:
    name = wanted.format
    if name == "auto":
        plain = wanted.text in names or wanted.text != "text"
        found = "text" if plain else _by_names(names, wanted.prompts) or "text"
        name = found if wanted.messages is None else "messages"
    if name == "text":
        _refuse_missing(source, names, wanted.text, "--text-column")
        other = _by_names(names, wanted.prompts) if wanted.format == "auto" and wanted.text == "text" else None
        return RowFormat("text", (wanted.text,), lambda key, row: text_document(key, row[wanted.text]), "text", other)
    if name in ("messages", "sharegpt"):
        usual = ("messages", "conversations") if name == "messages" else ("conversations", "conversation", "messages")
        column = wanted.messages or next((each for each in usual if each in names), usual[0])
        _refuse_missing(source, names, column, "--messages-column")
        others = _present(names, *(("system", "tools") if name == "sharegpt" else ("tools",)))
        return RowFormat(name, (column, *others), _conversation_in(column))
    needed, optional, convert = _COLUMNS[name]
    for column in needed[:1] if wanted.prompts else needed:
        _refuse_missing(source, names, column, f"--format {name}")
    return RowFormat(name, _present(names, *needed, *optional), convert, f"{needed[0]} with {needed[1]}")


def _by_names(names: Collection[str], prompts: bool) -> str | None:
    if "messages" in names:
        return "messages"
    if "conversations" in names or "conversation" in names:
        return "sharegpt"
    for name, (needed, *_) in _COLUMNS.items():
        if {*needed[:1]} <= {*names} and (prompts or {*needed} <= {*names}):
            return name
    return None


def _present(names: Collection[str], *optional: str) -> tuple[str, ...]:
    return tuple(each for each in optional if each in names)


def first_columns(path: Path) -> tuple[list[str], bool]:
    """Return the columns of a jsonl file's first rows, and whether these are all; none if they cannot be read."""
    keys = dict[str, None]()
    try:
        with open_regular(path) as file:
            rows = [json.loads(line) for line in file.read(_BEGINNING).splitlines()[:_ROWS]]
    except (OSError, ValueError, RecursionError):
        return [], False
    for row in rows:
        keys |= dict.fromkeys(row) if isinstance(row, dict) else {}
    return list(keys), len(rows) < _ROWS


def column_hint(names: Collection[str], option: str) -> str:
    """Return the advice for a missing column."""
    there = ", ".join(map(printable, names))
    return f"give {option} {there}" if len(names) == 1 else f"name one of {there} with {option}"


def _refuse_missing(source: str, names: Collection[str], column: str, option: str) -> None:
    if column not in names:
        there = ", ".join(map(printable, names))
        hint = f"{option} needs it; there are {there}" if " " in option else column_hint(names, option)
        raise UsageError(f"{source}: has no column '{column}'; {hint}")


def text_document(key: str, value: Any) -> Document:
    """Return a text as a document. UsageError: it is not a text. LeftOut: it is blank."""
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{key}: holds {type(value).__name__}, not text; name another column with --text-column")
    if not value or not value.strip():
        raise LeftOut("that are blank")
    return Document(key, text=value)


def _conversation_in(column: str) -> Convert:
    def convert(key: str, row: Mapping[str, Any]) -> Document:
        messages = _messages(row[column])
        if _is_text(row.get("system")) and not any(each["role"] == "system" for each in messages):
            messages = [{"role": "system", "content": row["system"]}, *messages]
        if messages and (tools := _functions(row.get("tools"), "whose tools name no function")):
            messages[0]["tools"] = tools
        return _answered(Document(key, messages=messages))

    return convert


def _alpaca(key: str, row: Mapping[str, Any]) -> Document:
    if not _is_text(row["instruction"]) and not _is_text(row.get("input")):
        raise LeftOut("without an instruction")
    question = "\n\n".join(str(each) for each in (row["instruction"], row.get("input")) if _is_text(each))
    turns = [("system", row["system"])] if _is_text(row.get("system")) else []
    for pair in row.get("history") or ():
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_text, pair))):
            raise LeftOut("whose history is not a list of question and answer")
        turns += [("user", pair[0]), ("assistant", pair[1])]
    turns += [("user", question), ("assistant", row.get("output"))]
    messages = [{"role": role, "content": content} for role, content in turns]
    if not _is_text(row.get("output")):
        raise LeftOut("without an answer", prompt=Document(key, messages=messages[:-1]))
    return Document(key, messages=messages)


def _completion(key: str, row: Mapping[str, Any]) -> Document:
    prompt = row["prompt"]
    completion = row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list | None):
        before, after = _messages(prompt), _messages(completion)
        try:
            _answered(Document(key, messages=after))
        except LeftOut as why:
            raise LeftOut(why.reason, prompt=Document(key, messages=before)) from None
        return Document(key, messages=before + after, prompt=len(before))
    if not (isinstance(prompt, str | None) and isinstance(completion, str | None)):
        raise LeftOut("that are not two texts or two lists of messages", f"{type(prompt).__name__} as prompt")
    if not _is_text(completion):
        raise LeftOut("without an answer", prompt=Document(key, text=prompt, prompt=len(prompt or "")))
    return Document(key, text=(prompt or "") + str(completion), prompt=len(prompt or ""))


_COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Convert]] = {
    "alpaca": (("instruction", "output"), ("input", "system", "history"), _alpaca),
    "prompt-completion": (("prompt", "completion"), (), _completion),
}
"""The columns that a format needs, those that it also reads, and what makes a document of a row."""


def _messages(value: Any) -> Messages:
    """Return a conversation's messages, in either spelling; parts are joined by line ends, as inference servers do."""
    found: Messages = []
    if value is None:
        return found
    for message in value if isinstance(value, list) else [None]:
        message = message if isinstance(message, dict) else {}
        role, name = message.get("role"), message.get("from")
        if isinstance(role, str):
            turn: dict[str, Any] = {name: text for name, text in message.items() if isinstance(text, str)}
            content = message.get("content")
            if calls := message.get("tool_calls") or [*filter(None, [message.get("function_call")])]:
                turn["tool_calls"], content = _functions(calls, "with tool calls that name no function"), content or ""
        elif isinstance(name, str) and "value" in message:
            if name.lower() not in _ROLES:
                raise LeftOut("with an unknown role", f"'{name}'")
            turn = {"role": _ROLES[name.lower()]}
            content = message.get("value")
        else:
            raise LeftOut("that are not conversations", "is not a conversation; it needs lists of role and content")
        texts: list[Any] = [content]
        if isinstance(content, list):
            texts = [each.get("text") if isinstance(each, dict) else each for each in content]
        if not all(isinstance(each, str) for each in texts):
            reason = "with a turn without content" if content is None else "with content that is not text"
            raise LeftOut(reason, f"'{role or name}'")
        # whether a turn counts, by the keys of other trainers
        stated = {name: message.get(name) for name in ("weight", "train", "training", "loss", "masked")}
        if turn["role"] == "assistant":
            if not all(value in (None, 0, 1) for value in stated.values()):
                raise LeftOut("with a turn that counts in part")
            if stated.pop("masked") or any(value == 0 for value in stated.values()):
                turn["weight"] = 0
        found.append({**turn, "content": "\n".join(texts)})
    return found


def _functions(value: Any, reason: str) -> list[dict[str, Any]]:
    """Return tools, or calls of them, as chat templates take them: JSON is read, and nulls (of parquet) are dropped."""
    found: list[dict[str, Any]] = []
    try:
        with suppress(ValueError):
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            value = json.loads(text, object_hook=lambda each: {name: it for name, it in each.items() if it is not None})
        if not isinstance(value, list):
            value = [{}] if value else []
        for each in value:
            function = each.get("function", each) if isinstance(each, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise LeftOut(reason)
            with suppress(KeyError, TypeError, ValueError):
                function["arguments"] = json.loads(function["arguments"] or "{}")
            found.append({"type": "function", "function": each} if function is each else each)
        refuse_depth(found)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise LeftOut("whose tools or calls are nested too deep or hold half of a surrogate pair") from None
    return found


def _answered(document: Document) -> Document:
    turns = [each for each in document.messages or () if each["role"] == "assistant" and "weight" not in each]
    if not any(each["content"].strip() or "tool_calls" in each for each in turns):
        raise LeftOut("without an answer", prompt=document if document.messages else None)
    return document


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
