"""From documents to rows of fixed length.

All documents are joined to one stream of tokens, `[bos] tokens eos` each (bos only if the tokenizer itself writes one),
and the stream is cut into rows of T + 1 tokens that overlap by one: row r is stream[r*T : r*T + T + 1]. So every
token but the first is the label of exactly one position, nothing is padded, and only the last, incomplete row is
dropped. The order and content of the rows depend on the documents alone: `num_workers` threads tokenize ahead of the
reader (the tokenizer runs outside Python's lock), and a few batches at most are in memory at a time.

A conversation goes through the tokenizer's chat template (`rendering`), and only the assistant's text is a label. The
tokenizer's offsets map characters to tokens. eos is added if the template does not end with it. Text is text: a special
token in it is spelled out, as inference servers do, unless `--parse-special-tokens` is given. A conversation that the
template refuses is left out and counted, and an error if there is no other. Of a prompt with its completion, the
completion is a label.

A prompt that a teacher is to continue (`prompt_rows`) has a row of its own: of text its beginnings, of conversations
all before the last answer. A conversation that ends with the user is a prompt whole, and so is a row that has a prompt
and no completion.

What it gives up: a document may be cut at the end of a row, and its second half does not see the first. A conversation
is one prompt, for its last answer; those for its earlier ones are not used.
"""

import copy
import functools
import itertools
import json
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtrain.config.sections import DataConfig
from kdtrain.data import corpus, rendering
from kdtrain.data.bytes import whole_backend
from kdtrain.data.formats import Document, Messages
from kdtrain.data.masks import SPELLED, Masks
from kdtrain.data.packed import STREAM, WHOLE, PackedRow, rows_of, whole_rows
from kdtrain.errors import UsageError, log, panics_refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_PIECE_CHARACTERS = 1 << 20
_BATCH_CHARACTERS = 1 << 18
_BATCH_PIECES = 256

_Array = np.ndarray[Any, np.dtype[Any]]
_Encoded = tuple[_Array, Counter[str]]  # what is counted, where it is used: the workers are ahead of that


def pack(
    documents: Iterable[Document],
    tokenizer: "PreTrainedTokenizerFast",
    seq_len: int,
    *,
    num_workers: int = 0,
    document_mask: bool = False,
    masks: Masks | None = None,
    parse_special_tokens: bool = False,
    whole: bool = False,
) -> Iterator[PackedRow]:
    """Yield `documents` as rows of `seq_len` + 1 tokens, the same rows for any `num_workers`.

    With `document_mask` the first token of a document is not a label, since no visible position precedes it. `whole`:
    see `whole_rows`. `masks` counts the documents of which only a part is learned. Raises UsageError for a tokenizer
    without eos or without fast backend, and for conversations if the chat template renders none, or finds the
    assistant's turns in none.
    """
    encoder = Encoder(tokenizer, masks, parse=parse_special_tokens)
    return _packed(encoder, _batches(documents), num_workers, seq_len, document_mask, whole)


def packed_rows(
    data: DataConfig, split: str, tokenizer: "PreTrainedTokenizerFast", limit: int | None, masks: Masks | None = None
) -> Iterator[PackedRow]:
    """Yield the first `limit` packed rows of a split; log which tokens count. UsageError: there are none."""
    options = {name: getattr(data, name) for name in ("num_workers", "document_mask", "parse_special_tokens")}
    options["whole"] = getattr(tokenizer, "pinned", {}).get("packing") == WHOLE  # see `build_cache.pin_text`
    masks = masks or Masks(split, data.seq_len)
    packed = pack(corpus.documents_of(data, split), tokenizer, data.seq_len, masks=masks, **options)

    def some() -> Iterator[PackedRow]:
        if (first := next(packed, None)) is None:
            raise UsageError(
                f"{data.data}: the {split} data give no whole sequence of {data.seq_len} tokens ({masks.begun:,} "
                f"documents, {masks.read:,} tokens); use more data, a smaller --seq-len, or another --split"
            )
        yield first
        yield from packed

    return itertools.islice(some(), limit)


def prompt_rows(
    data: DataConfig,
    split_name: str,
    tokenizer: "PreTrainedTokenizerFast",
    limit: int | None,
    *,
    prompt_tokens: int | None,
    max_new_tokens: int | None,
    filler: int,
) -> Iterator[PackedRow]:
    """Yield the first `limit` prompts of a split, a row each, for the teacher to continue.

    prompt_tokens: of text, the prompts are the beginnings of its packed rows; None: of conversations, and of prompts
    with completions (`corpus.has_prompts`), they are what stands before the last answer, and one that fills a row is
    left out, with a warning. `loss_mask` is true for the labels that the teacher may write, and their tokens, like all
    behind them, are `filler`.

    UsageError: as `packed_rows`.
    """
    row = functools.partial(PackedRow.prompt, seq_len=data.seq_len, max_new_tokens=max_new_tokens, filler=filler)
    if prompt_tokens is None:
        return itertools.islice(map(row, _before_answers(data, split_name, tokenizer)), limit)
    packed = packed_rows(data, split_name, tokenizer, limit)
    return (row(each.tokens[:prompt_tokens].tolist()) for each in packed)


def _before_answers(data: DataConfig, split_name: str, tokenizer: "PreTrainedTokenizerFast") -> Iterator[list[int]]:
    """Yield the tokens before the last answer of each document, where they leave room for one."""
    masks = Masks("", data.seq_len)
    wide = 0
    encoder = Encoder(tokenizer, masks, opening=True, parse=data.parse_special_tokens)
    try:
        for each in corpus.documents_of(data, split_name, prompts=True):
            prompt = encoder.prompt(each)
            wide += len(prompt) > data.seq_len
            if 0 < len(prompt) <= data.seq_len:
                yield prompt
        masks.refuse_none()
    finally:
        encoder.close()
        if wide:
            log.warning("%s: left out %s conversations whose prompt fills --seq-len %s", split_name, wide, data.seq_len)
        if masks.refused:
            log.warning("%s: left out %s conversations that the chat template refuses", split_name, masks.refused)


def _packed(
    encoder: "Encoder",
    batches: Iterator[list["_Piece"]],
    num_workers: int,
    seq_len: int,
    document_mask: bool,
    whole: bool,
) -> Iterator[PackedRow]:
    try:
        encoded = _in_order(encoder, batches, num_workers)
        stream = (encoder.masks.counted(*each) for each in encoded)
        if whole:
            yield from whole_rows(stream, seq_len, encoder.filler)
        else:
            yield from rows_of(stream, seq_len, document_mask)
        encoder.masks.refuse_none()
    finally:
        encoder.close()


@dataclass(frozen=True)
class _Piece:
    """A conversation, or a part of a text that is tokenized at once; `first` and `last`: its place in the document.

    prompt: characters at its beginning that are not learned.
    """

    document: Document
    text: str = ""
    first: bool = True
    last: bool = True
    prompt: int = 0


def _pieces(document: Document) -> Iterator[_Piece]:
    """Cut a text into pieces at line ends: tokenizing takes fifty times the memory of the text."""
    if document.messages is not None:
        yield _Piece(document)
        return
    texts = split_text(document.text or "")
    start = 0
    for place, text in enumerate(texts):
        prompt = max(0, document.prompt - start)
        yield _Piece(document, text, first=place == 0, last=place == len(texts) - 1, prompt=prompt)
        start += len(text)


def split_text(text: str) -> list[str]:
    """Split a text at line ends into pieces that are tokenized at once; none of an empty text."""
    found = []
    start = 0
    while start < len(text):
        stop = start + _PIECE_CHARACTERS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        found.append(text[start:stop])
        start = stop
    return found


def _batches(documents: Iterable[Document]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    characters = 0
    for document in documents:
        for piece in _pieces(document):
            batch.append(piece)
            characters += len(piece.text)
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
                yield batch
                batch = []
                characters = 0
    if batch:
        yield batch


def _in_order(
    encode: Callable[[list[_Piece]], _Encoded], batches: Iterator[list[_Piece]], num_workers: int
) -> Iterator[_Encoded]:
    if num_workers == 0:
        yield from map(encode, batches)
        return
    waiting: deque[Future[_Encoded]] = deque()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="tokenize") as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(encode, batch))
                if len(waiting) > 2 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _stream(tokens: list[int], label: bool = True) -> _Array:
    stream = np.zeros(len(tokens), dtype=STREAM)
    stream["token"], stream["label"] = tokens, label
    return stream


class Encoder:
    """Turns a batch of pieces into its part of the stream; may be called from several threads.

    masks: counts what it encodes; None: nothing is logged. opening: conversations are rendered for an answer
    (`prompt`), and not whole. parse: texts may spell special tokens.
    """

    def __init__(self, tokenizer: Any, masks: Masks | None = None, opening: bool = False, parse: bool = False) -> None:
        self.masks = masks or Masks("", 0)
        self._name = f"the tokenizer {getattr(tokenizer, 'name_or_path', '')}".rstrip()
        self._backend, self._bos = whole_backend(tokenizer, self._name)
        if tokenizer.eos_token_id is None:
            raise UsageError(f"{self._name} has no end-of-sequence token; set eos_token in tokenizer_config.json")
        self._eos = [tokenizer.eos_token_id]
        self._end = str(tokenizer.eos_token)
        self.filler: int = tokenizer.eos_token_id
        special = {token: each.content for token, each in tokenizer.added_tokens_decoder.items() if each.special}
        self._special = np.array(list(special), dtype=np.int64)
        self._quotable = [] if parse else sorted(special.values(), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._quotable)) or "(?!)")
        self._literal = copy.deepcopy(self._backend)
        self._literal.encode_special_tokens = not parse
        render = functools.partial(rendering.render, tokenizer, opening)
        date: str | None = getattr(tokenizer, "pinned", {}).get("date")  # see `build_cache.pin_text`
        self._render = rendering.Renderer(
            render if date is None else functools.partial(rendering.at_date, date, render)
        )
        self._render_lock = threading.Lock()

    def close(self) -> None:
        """End the process that renders conversations, and log how many of their tokens count."""
        self._render.close()
        self.masks.report()

    def __call__(self, batch: list[_Piece]) -> _Encoded:
        given = [piece for piece in batch if piece.document.messages is None]
        texts = []
        for piece in given:
            ends = piece.last and piece.document.prompt > 0
            # a completion that spells its end has no second one
            texts.append(piece.text.removesuffix(self._end) if ends else piece.text)
        counts = Counter({SPELLED: len(self._spelled.findall("\0".join(texts)))})
        backend = self._literal
        placed = any(piece.prompt for piece in given)
        encode = backend.encode_batch if placed else backend.encode_batch_fast  # which gives no offsets
        with panics_refused(f"{self._name} cannot take this text"):
            encoded = zip(texts, encode(texts, add_special_tokens=False), strict=True)
        streams = []
        for piece in batch:
            if piece.document.messages is not None:
                streams.append(self._conversation(piece.document, counts))
                continue
            text, encoding = next(encoded)
            begin = self._bos if piece.first else []
            end = self._eos if piece.last else []
            stream = _stream(begin + encoding.ids + end)
            stream["start"][:1] = piece.first
            if piece.prompt:  # is not learned; a token that reaches into the completion is
                starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
                places = slice(len(begin), len(begin) + len(stops))
                stream["label"][: len(begin)], stream["label"][places] = False, stops > piece.prompt
                if piece.first and piece.last:
                    label = stream["label"][places]
                    self.masks.add(piece.document, text, starts[label], stops[label], stream["label"], {})
            streams.append(stream)
        return np.concatenate(streams) if streams else np.empty(0, dtype=STREAM), counts

    def _conversation(self, document: Document, counts: Counter[str]) -> _Array:
        key, prompt = document.key, document.prompt
        assert document.messages is not None
        messages, quoted = self._without_special(document.messages)
        try:
            with self._render_lock:
                text, turns = self._render(key, messages)
            spans = _after(turns, messages, prompt, key)
        except rendering.RowRefused as error:
            self.masks.leave_out(error)
            counts["conversations left out that the chat template does not render as they are"] += 1
            return np.empty(0, dtype=STREAM)
        with panics_refused(f"{self._name} cannot take this text"):
            ids, starts, stops = self._encode(text, quoted)
        stream = _stream(ids, label=False)
        for span_start, span_stop in spans:
            stream["label"] |= (starts < span_stop) & (stops > span_start)
        for _, turn_stop in turns:
            place = int(np.searchsorted(starts, turn_stop))
            while place < len(ids) and (ids[place] in self._eos or text[starts[place] : stops[place]].isspace()):
                place += 1
            stream["turn"][place : place + 1] = True
        label = stream["label"]
        learned = starts[label], stops[label]
        ends = stops[stream["token"] == self._eos[0]]
        if not len(ends) or text[ends[-1] :].strip():
            learned_end = messages[-1]["role"] == "assistant" and messages[-1].get("weight") != 0
            stream = np.concatenate([stream, _stream(self._eos, label=learned_end)])
        stream["start"][0] = True
        self.masks.add(replace(document, messages=messages), text, *learned, stream["label"], quoted)
        return stream

    def prompt(self, document: Document) -> list[int]:
        """Return the tokens before an assistant's turn at the end, as a server renders them, or before a completion.

        Empty: there are none, or the template refuses the conversation.
        """
        if document.messages is None:
            text = (document.text or "")[: document.prompt]
            with panics_refused(f"{self._name} cannot take this text"):
                return self._bos + self._literal.encode(text, add_special_tokens=False).ids if text.strip() else []
        answered = any(each["role"] == "assistant" for each in document.messages[-1:])
        messages, quoted = self._without_special(document.messages[:-1] if answered else document.messages)
        try:
            if not messages:
                raise rendering.RowRefused(f"{document.key}: nothing stands before an answer of the assistant")
            with self._render_lock:
                text, _ = self._render(document.key, messages)
        except rendering.RowRefused as error:
            self.masks.leave_out(error)
            return []
        self.masks.documents += 1
        with panics_refused(f"{self._name} cannot take this text"):
            return self._encode(text, quoted)[0]

    def prompt_of(self, key: str, given: Any) -> list[int]:
        """Return the tokens before an answer to a text or a list of messages, as `prompt`; empty: it is neither."""
        document = Document.of_prompt(key, given)
        return [] if document is None else self.prompt(document)

    def answer(self, document: Document) -> tuple[list[int], list[int]]:
        """Return the tokens before what is learned of a document, and these; empty where they are not in one piece."""
        stream, _ = self([_Piece(document, document.text or "", prompt=document.prompt)])
        tokens = stream["token"].tolist()
        learned = np.flatnonzero(stream["label"])
        if not len(learned) or learned[-1] - learned[0] >= len(learned):
            return [], []
        return tokens[: learned[0]], tokens[learned[0] : learned[-1] + 1]

    def _without_special(self, messages: Messages) -> tuple[Messages, dict[str, str]]:
        """Return the messages with an unused character for each special token, and the token of each such character."""
        content = json.dumps(messages, ensure_ascii=False)
        unused = (each for number in range(0x100000, 0x10FFFE) if (each := chr(number)) not in content)
        quoted: dict[str, str] = {}
        for token in self._quotable:
            if json.dumps(token, ensure_ascii=False)[1:-1] in content:
                quoted[mark := next(unused)] = token
                messages = _replaced(messages, token, mark)
        return messages, quoted

    def _encode(self, text: str, quoted: dict[str, str]) -> tuple[list[int], _Array, _Array]:
        """Tokenize a rendered conversation; return its tokens, and where in `text` each starts and stops.

        Text between two special tokens of the template is encoded again, spelled out, if it quotes a special token.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = encoding.ids
        starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        if not quoted:
            return ids, starts, stops
        borders = [-1, *np.flatnonzero(np.isin(ids, self._special)), len(ids)]
        parts: list[tuple[list[int], _Array, _Array]] = []
        for before, after in itertools.pairwise(borders):
            between = slice(before + 1, after)
            part = ids[between], starts[between], stops[between]
            first = stops[before] if before >= 0 else 0
            last = starts[after] if after < len(ids) else len(text)
            if not quoted.keys().isdisjoint(text[first:last]):
                spelled = [quoted.get(each, each) for each in text[first:last]]
                origin = np.repeat(np.arange(first, last), [len(each) for each in spelled])
                literal = self._literal.encode("".join(spelled), add_special_tokens=False)
                begins, ends = np.array(literal.offsets, dtype=np.int64).reshape(-1, 2).T
                part = literal.ids, origin[np.minimum(begins, len(origin) - 1)], origin[np.maximum(ends, 1) - 1] + 1
            border = slice(after, after + 1)
            parts += [part, (ids[border], starts[border], stops[border])]
        tokens, begin, end = zip(*parts, strict=True)
        return [*itertools.chain(*tokens)], np.concatenate(begin), np.concatenate(end)


def _replaced(value: Any, old: str, new: str) -> Any:
    """Replace `old` by `new` in the texts and keys of JSON, except keys as templates read them: identifiers."""
    if isinstance(value, dict):
        named = {name if name.isidentifier() else name.replace(old, new): each for name, each in value.items()}
        return {name: _replaced(each, old, new) for name, each in named.items()}
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    return value.replace(old, new) if isinstance(value, str) else value


def _after(spans: rendering.Spans, messages: Messages, prompt: int, key: str) -> rendering.Spans:
    """Return the spans of the assistant's turns that count: after the first `prompt` messages, and not of weight 0."""
    turns = [
        (at >= prompt and each.get("weight") != 0) for at, each in enumerate(messages) if each["role"] == "assistant"
    ]
    if not prompt and all(turns):
        return spans
    if len(spans) != len(turns):
        raise rendering.RowRefused(
            f"{key}: the chat template marks {len(spans)} pieces of {len(turns)} turns of the assistant"
        )
    return [*itertools.compress(spans, turns)]
