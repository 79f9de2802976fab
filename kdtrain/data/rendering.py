"""Conversations as text, by the chat template of a tokenizer, with what of it is the assistant's.

The template may mark that with `{% generation %}`; otherwise it follows from rendering the conversation up to each
assistant turn. A template that rewrites earlier turns (Qwen3's takes the reasoning out of all but the last) is
rendered with marks in each turn of the assistant, which show where it is. A turn is all that the text has of it, from
where the template opens it to its end; reasoning that the template leaves out is not in the text, and not learned.

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

from kdtrain.data.formats import REASONING, Messages
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

_EDGES = re.compile(r"(?:\A|</?think>)\s*+(?!</?think>|\Z)|(?<=\S)(?=\s*\Z)")
"""The places in a text where reasoning, if it is in `<think>`, and what is not, begin, and its end."""
_HEADER = re.compile(r"(?s).*[\s>\]|:]")  # as much as is whole: not half of a `<think>`

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
        """Return the conversation as text, and the assistant's [start, stop) characters in it.

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
    """Call `render` with the clock of chat templates stopped at `date`; for the child process alone."""
    from transformers.utils import chat_template_utils

    now = datetime.fromisoformat(date)
    chat_template_utils.datetime = SimpleNamespace(now=lambda: now)  # type: ignore[misc, assignment]
    return render(key, messages)


def render(tokenizer: "PreTrainedTokenizerFast", opening: bool, key: str, messages: Messages) -> tuple[str, Spans]:
    """Return the conversation as text, and the assistant's [start, stop) characters in it.

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
    text = render(messages)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, through = render(messages[:turn], prompt=True), render(messages[: turn + 1])
        if not (through.startswith(before) and text.startswith(through)):
            return text, _find_turns(render, key, messages, text)
        spans.append((len(before), len(through)))
    return text, spans


def _find_turns(render: Callable[..., str], key: str, messages: Messages, text: str) -> Spans:
    """Find the assistant's turns in `text`, of a template that renders a turn differently before later ones.

    Characters that no message has are put into each turn: where its reasoning and its content begin and end, and behind
    the name of its first call. Without them the rendering must be `text`: then each marks a place in it. From the last
    one of a turn on, `text` is compared with shorter renderings: this turn ends where the rendering up to it does, and
    the next one begins where the template opens it for an answer.
    """
    marks = dict[str, int]()
    marked = copy.deepcopy(messages)

    def mark(turn: int, edge: re.Match[str] | None = None) -> str:
        marks[character := chr(0xF0000 + len(marks))] = turn
        return character if edge is None else edge[0] + character

    turns = [turn for turn, message in enumerate(marked) if message["role"] == "assistant"]
    for turn in turns:
        message = marked[turn]
        for name in (each for each in (*REASONING, "content") if each in message):
            message[name] = _EDGES.sub(functools.partial(mark, turn), message[name])
        if calls := message.get("tool_calls"):
            calls[0]["function"]["name"] += mark(turn)
        elif not message["content"].strip():
            message["content"] += mark(turn)
    pieces = re.split(f"([{''.join(marks)}])", render(marked))
    shown = pieces[1::2]
    places = [*itertools.accumulate(map(len, pieces[:-1:2]))]
    order = [marks[each] for each in shown]
    if "".join(pieces[::2]) != text or order != sorted(order) or {*order} != {*turns} or len({*shown}) < len(shown):
        raise RowRefused(
            f"{key}: the chat template changes or leaves out text of the assistant, so its turns cannot be found; "
            "mark them in the template with {% generation %} ... {% endgeneration %}"
        )
    last = dict(zip(order, zip(shown, places, strict=True), strict=True))
    first = dict(zip(reversed(order), reversed(places), strict=True))
    spans = list[tuple[int, int]]()
    since = 0
    previous = nowhere = "\uffff"
    for turn in turns:
        opened = _behind(previous, render(marked[:turn], prompt=True))
        start = since + len(same := _shared(opened, text[since : first[turn]]))
        if same != opened:
            closed = _behind(previous, render(marked[:turn]))
            if same.startswith(closed) and (header := _HEADER.match(same, len(closed))):
                start = since + header.end()  # as where `<think>` is opened for an answer, and not in earlier turns
            else:  # the message before is rendered otherwise, too: behind its text then
                question = marked[turn - 1] | {"content": nowhere + marked[turn - 1]["content"].lstrip()}
                opened = _behind(nowhere, render([*marked[: turn - 1], question][:turn], prompt=True))
                place = text.find(opened, since, first[turn])
                start = first[turn] if place < 0 else place + len(opened)
        previous, since = last[turn]
        through = render(marked[: turn + 1])
        end = _behind(previous, through) if previous in through else ""
        spans.append((start, since + len(_shared(end, text[since:]))))
    return spans


def _behind(mark: str, rendered: str) -> str:
    """Return the part of `rendered` after `mark`, or all of it."""
    return rendered[rendered.rfind(mark) + 1 :]


def _shared(one: str, other: str) -> str:
    """Return the beginning that two texts share."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(each for each, _ in same)
