"""Conversations as text, by the chat template of a tokenizer, with what of it is the assistant's.

The template may mark that with `{% generation %}`; otherwise it follows from rendering the conversation up to each
assistant turn. A template that rewrites earlier turns (Qwen3's takes the reasoning out of all but the last) is
rendered with a mark in the place of each turn of the assistant: then the turn is its text and what follows it in both.

A chat template is a program that comes with a model. jinja2's sandbox keeps it from files and from Python's internals,
but lets it loop for ever, compute 9 ** 9 ** 9, or allocate all memory. So a child process with limits renders the
conversations (`Renderer`), and the text that it returns is limited too.
"""

import copy
import functools
import itertools
import json
import re
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kdtrain.data.formats import Messages
from kdtrain.errors import UsageError
from kdtrain.sandbox import LimitExceeded, Sandbox

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SECONDS = 5.0
"""Processor time for one conversation; most take a few milliseconds."""
SECONDS_A_TURN = 0.05
"""More of it for each message: a conversation is rendered up to each of its turns."""
MEMORY = 1 << 30
"""Bytes that a template may allocate beyond the memory of the process at its start."""
LENGTH, LENGTH_A_BYTE = 1 << 20, 4
"""Most characters of a rendered conversation, and more for each of its bytes: tokens take 200 bytes each."""
SPANS_A_TURN = 64
"""Most pieces, for each message, in which the assistant's text is marked."""

Spans = list[tuple[int, int]]
Render = Callable[[str, Messages], tuple[str, Spans]]


class RowRefused(UsageError):
    """The template refuses one conversation, and may render the next."""


class Renderer:
    """Calls `render(key, messages)` in a child process; not thread-safe."""

    def __init__(self, render: Render) -> None:
        self._sandbox = Sandbox(functools.partial(_answer, render), MEMORY)
        self.close = self._sandbox.close

    def __call__(self, key: str, messages: Messages) -> tuple[str, Spans]:
        """The conversation as text, and the [start, stop) characters in it of the assistant.

        Raises:
            UsageError: from `render`, or the template exceeds a limit.
        """
        seconds = SECONDS + SECONDS_A_TURN * len(messages)
        try:
            answer = self._sandbox([key, messages], seconds)
        except LimitExceeded:
            raise UsageError(
                f"{key}: the chat template takes more than {seconds:g} s or {MEMORY >> 30} GiB for this "
                "conversation; use a tokenizer with another template"
            ) from None
        if "error" in answer:
            raise (RowRefused if answer["row"] else UsageError)(answer["error"])
        return answer["text"], [(start, stop) for start, stop in answer["spans"]]


def _answer(render: Render, request: tuple[str, Messages]) -> dict[str, Any]:
    """Render one conversation, in the child."""
    key, messages = request
    try:
        text, spans = render(key, messages)
    except UsageError as error:
        return {"error": str(error), "row": isinstance(error, RowRefused)}
    if len(text) > LENGTH + LENGTH_A_BYTE * len(json.dumps(request)) or len(spans) > SPANS_A_TURN * len(messages):
        line = (
            f"{key}: the chat template makes {len(text):,} characters in {len(spans):,} marked pieces of this "
            f"conversation of {len(messages)} messages; use a tokenizer with another template"
        )
        return {"error": line, "row": False}
    return {"text": text, "spans": spans}


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def at_date(date: str, render: Render, key: str, messages: Messages) -> tuple[str, Spans]:
    """`render` where it is always the moment `date` for a chat template; of the child alone, whose clock it stops."""
    from transformers.utils import chat_template_utils

    now = datetime.fromisoformat(date)
    chat_template_utils.datetime = SimpleNamespace(now=lambda: now)  # type: ignore[misc, assignment]
    return render(key, messages)


def render(tokenizer: "PreTrainedTokenizerFast", opening: bool, key: str, messages: Messages) -> tuple[str, Spans]:
    """The conversation as text, and the [start, stop) characters in it of the assistant.

    opening: the text ends where the template opens the assistant's next turn.
    """
    if not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template; use one that has one, or --text-column for plain text")
    tools: Any = messages[0].get("tools")

    def text_of(turns: Messages, prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt))

    try:
        _refuse_lost_calls(text_of, key, messages)  # or the student would learn an empty answer
        if opening:
            return text_of(messages, prompt=True), []
        if _GENERATION.search(tokenizer.get_chat_template()):
            return _render_marked(tokenizer, messages)
        return _render_prefixes(text_of, key, messages)
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
        raise RowRefused(f"{key}: the chat template refuses this conversation: {reason}") from error


def _refuse_lost_calls(render: Callable[[Messages], str], key: str, messages: Messages) -> None:
    marked = copy.deepcopy(messages)
    functions = [call["function"] for each in marked for call in each.get("tool_calls", ())]
    for place, function in enumerate(functions):
        function["name"] = chr(0xF0000 + place)
    if functions and not {each["name"] for each in functions} <= set(render(marked)):
        raise RowRefused(f"{key}: the chat template does not render the tool calls of this conversation; use another")


def _render_marked(tokenizer: "PreTrainedTokenizerFast", messages: Messages) -> tuple[str, Spans]:
    # Not `return_assistant_tokens_mask` of apply_chat_template: it misses the last tokens of a turn that ends in a
    # character of several tokens, and marks everything after a turn that ends in a character without a token.
    from transformers.utils import chat_template_utils

    special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
    rendered: Any = chat_template_utils.render_jinja_template(
        conversations=[messages],
        tools=messages[0].get("tools"),
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **special_tokens,
    )
    return rendered[0][0], rendered[1][0]


def _render_prefixes(render: Callable[..., str], key: str, messages: Messages) -> tuple[str, Spans]:
    text, spans = render(messages), []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, through = render(messages[:turn], prompt=True), render(messages[: turn + 1])
        if not (through.startswith(before) and text.startswith(through)):
            return text, _find_turns(render, key, messages, text)
        spans.append((len(before), len(through)))
    return text, spans


def _find_turns(render: Callable[..., str], key: str, messages: Messages, text: str) -> Spans:
    """Where the assistant's turns are in `text`, of a template that renders a turn otherwise before later ones.

    One character, which no message has, takes the place of each turn's content, or else of the first call's name. With
    these put back, the rendering must be `text`: then each is where its character was. What the template writes behind
    it, the end of the turn, is as much as the rendering of the conversation up to this turn has in common.
    """
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    marks = dict(zip(turns, map(chr, range(0xF0000, 0xF0000 + len(turns))), strict=True))
    marked, contents = copy.deepcopy(messages), dict[int, str]()
    for turn, mark in marks.items():
        calls = [] if marked[turn]["content"].strip() else marked[turn].get("tool_calls")
        holder, name = (calls[0]["function"], "name") if calls else (marked[turn], "content")
        contents[turn], holder[name] = holder[name], mark
    pieces = re.split(f"([{''.join(marks.values())}])", render(marked))
    if pieces[1::2] == list(marks.values()) and not any(mark in text for mark in marks.values()):
        for clean in (str, str.strip):
            restored, spans = pieces[0], []
            for turn, behind in zip(turns, pieces[2::2], strict=True):
                _, found, end = render(marked[: turn + 1]).rpartition(marks[turn])
                start = len(restored)
                if marked[turn]["content"] != marks[turn]:  # a call, behind what the template writes before it
                    opened = render(marked[:turn], prompt=True).removeprefix(render(marked[:turn]))
                    start = restored.rindex(opened) + len(opened)
                restored += clean(contents[turn])
                same = itertools.takewhile(lambda pair: len({*pair}) == 1, zip(end * bool(found), behind, strict=False))
                spans.append((start, len(restored) + len(list(same))))
                restored += behind
            if restored == text:
                return spans
    raise RowRefused(
        f"{key}: the chat template rewrites earlier turns, so the assistant's cannot be found; "
        "mark them in the template with {% generation %} ... {% endgeneration %}"
    )
