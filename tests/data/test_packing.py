import copy
import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kdtrain.data import packing, rendering
from kdtrain.data.formats import Document
from kdtrain.data.masks import Masks
from kdtrain.data.packing import pack
from kdtrain.errors import UsageError

_Make = Callable[..., PreTrainedTokenizerFast]
_EOS = "<|endoftext|>"
_TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo 漢"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "ok"},
]
_MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_WITH_EOS = _PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}")
_CUTS_EARLIER = _PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:1] }}")
_SIGNS_LAST = _PLAIN.replace(
    "{{ m.content }}", "{{ m.content }}{{ 'me' if loop.last and m.role == 'assistant' else '' }}"
)


def _texts(*texts):
    return [Document(str(number), text=text) for number, text in enumerate(texts)]


def _numbered(count):
    return _texts(*(f"document {n} " + "x" * (n * 7 % 50) for n in range(count)))


def _stream(rows):
    """Join rows that overlap by one to their stream of tokens."""
    return [int(t) for row in rows for t in row.tokens[:-1]] + [int(t) for t in rows[-1].tokens[-1:]]


def _shown(rows, tokenizer):
    """Decode rows of one position, and mark the parts that are learned."""
    rows = list(rows)
    counted = zip(_stream(rows), [False, *(bool(row.loss_mask[0]) for row in rows)], strict=True)
    shown = ""
    for learned, tokens in itertools.groupby(counted, lambda each: each[1]):
        parts = itertools.groupby((token for token, _ in tokens), lambda token: token == tokenizer.eos_token_id)
        text = "".join("■" * len([*each]) if end else tokenizer.decode([*each]) for end, each in parts)
        shown += f"⟦{text}⟧" if learned else text
    return shown


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12), st.integers(1, 40))
def test_every_token_but_the_first_is_the_label_of_exactly_one_position(make_tokenizer, texts, seq_len):
    tokenizer = make_tokenizer()
    expected = [token for text in texts if text for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    rows = list(pack(_texts(*texts), tokenizer, seq_len))
    assert len(rows) == max(0, len(expected) - 1) // seq_len
    if rows:
        stream = _stream(rows)
        assert stream == expected[: len(stream)]
        assert all(row.loss_mask.all() for row in rows)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_rows_do_not_depend_on_the_number_of_workers(num_workers, tokenizer, monkeypatch):
    monkeypatch.setattr(packing, "_BATCH_PIECES", 2)
    tokenizer.chat_template = _MARKED
    mixed = [*_numbered(60), *(Document(f"talk {n}", messages=_TALK) for n in range(20))]
    expected = list(pack(mixed, tokenizer, 32))
    found = list(pack(mixed, tokenizer, 32, num_workers=num_workers))
    assert len(found) == len(expected) > 20
    for row, same in zip(found, expected, strict=True):
        assert np.array_equal(row.tokens, same.tokens)
        assert np.array_equal(row.loss_mask, same.loss_mask)
        assert np.array_equal(row.segments, same.segments)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_source_without_end_is_read_only_as_far_as_needed(num_workers, tokenizer):
    read = 0

    def endless():
        nonlocal read
        for number in itertools.count():
            read += 1
            yield Document(str(number), text="some text of a document " * 10)

    rows = list(itertools.islice(pack(endless(), tokenizer, 64, num_workers=num_workers), 10))
    assert len(rows) == 10
    assert read <= 256 * 6


def test_rows_have_the_promised_types_and_shapes_and_segments_number_their_documents_from_zero(tokenizer):
    first, second = pack(_texts("abc", "de", "fghijkl"), tokenizer, 7)
    found = [(each.dtype, each.shape) for each in (first.tokens, first.loss_mask, first.segments)]
    assert found == [(np.int32, (8,)), (np.bool_, (7,)), (np.int32, (7,))]
    assert first.segments.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert second.segments.tolist() == [0, 0, 0, 0, 0, 0, 0]


def test_under_a_document_mask_the_first_token_of_a_document_is_not_learned(tokenizer):
    texts = _texts("abc", "de", "fghijkl")
    assert _shown(pack(texts, tokenizer, 1), tokenizer) == "a⟦bc■de■fghijkl■⟧"
    assert _shown(pack(texts, tokenizer, 1, document_mask=True), tokenizer) == "a⟦bc■⟧d⟦e■⟧f⟦ghijkl■⟧"


def test_bos_is_written_only_if_the_tokenizer_writes_it(make_tokenizer):
    silent = make_tokenizer(bos_token="<s>")
    writes = make_tokenizer(bos_token="<s>")
    writes.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", writes.bos_token_id)]
    )
    assert silent.decode(_stream(list(pack(_texts("ab", "cd"), silent, 5)))) == f"ab{_EOS}cd{_EOS}"
    assert writes.decode(_stream(list(pack(_texts("ab", "cd"), writes, 7)))) == f"<s>ab{_EOS}<s>cd{_EOS}"


def test_truncation_and_padding_in_the_tokenizer_file_are_ignored(tokenizer):
    expected = _stream(list(pack(_texts("x" * 99, "y"), tokenizer, 101)))
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    assert _stream(list(pack(_texts("x" * 99, "y"), tokenizer, 101))) == expected
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 5


def test_a_long_text_is_tokenized_in_pieces_and_stays_one_document_with_one_prompt(tokenizer, monkeypatch):
    text = "one line\nanother\n" * 20 + "a line longer than a piece" * 10 + "\n\n"
    monkeypatch.setattr(packing, "_PIECE_CHARACTERS", 64)
    (row,) = pack([Document("a", text=text, prompt=100)], tokenizer, len(text))
    assert tokenizer.decode(row.tokens) == text + _EOS and {*row.segments} == {0}
    assert row.loss_mask.tolist() == [False] * 99 + [True] * (len(text) - 99)


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "has no chat template"),
        (_CUTS_EARLIER, "talk: the chat template changes or leaves out text of the assistant, so its turns cannot be"),
        ("{{ raise_exception('roles must\nalternate') }}", "talk: the chat template refuses .*: roles must$"),
    ],
)
def test_a_conversation_whose_assistant_turns_cannot_be_found_is_refused(template, message, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=message) as caught:
        list(pack([Document("talk", messages=_TALK)], tokenizer, 8))
    assert "\n" not in str(caught.value)


# The parts of Qwen3's template that matter: only behind the last question does a turn have its block of reasoning.
_THINKS = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{{- '<' + m.role + '>' }}{%- if m.role == 'assistant' %}"
    "{%- set body = m.content.split('</think>')[-1].strip() %}{%- if loop.index0 > ns.last %}"
    "{{- '[think]' + body }}{%- else %}{{- body }}{%- endif %}{%- else %}{{- m.content }}{%- endif %}{{- '<end>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
)


_ALTERNATES = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}" + _PLAIN


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_conversation_that_the_template_refuses_is_left_out_beside_others_and_counted(num_workers, tokenizer, caplog):
    tokenizer.chat_template = _ALTERNATES
    refused = [Document(f"bad {n}", messages=_TALK) for n in range(3)]
    good = [Document(f"good {n}", messages=_TALK[1:]) for n in range(3)]
    masks = Masks("train", 8)
    with caplog.at_level("INFO"):
        rows = list(pack([*refused, *good], tokenizer, 8, num_workers=num_workers, masks=masks))
        same = list(pack(good, tokenizer, 8))
    assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in same]
    assert (masks.documents, masks.refused, masks.long) == (3, 3, 3)
    assert "left out 3 conversations (first: bad " in caplog.text


def test_a_template_that_refuses_every_conversation_is_an_error_long_before_the_end(tokenizer):
    tokenizer.chat_template = _ALTERNATES
    endless = (Document(f"bad {n}", messages=_TALK) for n in itertools.count())
    with pytest.raises(UsageError, match="bad 0: the chat template refuses this conversation: roles must alternate"):
        list(pack(endless, tokenizer, 8))


_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_CALLS = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]
_TOOLS = "{% for t in tools or () %}[{{ t.function.name }}]{% endfor %}"
_RENDERS = _TOOLS + _PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or () %}({{ c.function | tojson }}){% endfor %}{{ '|' }}",
)
# as Qwen3's: a turn without later ones has a block of reasoning, and a line end stands between content and calls only
_RENDERS_ANEW = _RENDERS.replace("{{ m.content }}", "{{ '[think]' if loop.last }}{{ m.content + nl if m.content }}", 1)


_QUOTED, _SAME = (
    [{"role": role, "content": text} for role, text in turns]
    for turns in (
        [("user", f"what is {_EOS}?"), ("assistant", f"{_EOS} ends 漢{_EOS}.")],
        [("user", "same"), ("assistant", " same\n"), ("user", "assistant"), ("assistant", "same")],
    )
)
_ADD = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
_BOTH = "<system>be kind<user>hi<assistant>⟦yo 漢⟧<user>more<assistant>⟦ok■⟧"
_LAST, _FIRST = (_BOTH.replace(f"⟦{each}⟧", each) for each in ("yo 漢", "ok■"))
_THOUGHT = "<system>be kind<end><user>hi<end><assistant>⟦yo 漢<end>⟧<user>more<end><assistant>⟦[think]ok<end>■⟧"
_SPELLED = f"<user>what is {_EOS}?<assistant>⟦{_EOS} ends 漢{_EOS}.■⟧"
_CALLED = '⟦({"name": "add", "arguments": {"a": 1}})({"name": "add", "arguments": {"a": 1}})|⟧'


def _talk(messages, prompt=0):
    return Document("talk", messages=messages, prompt=prompt)


def _less(turn):
    """Return the conversation with a turn that is not learned."""
    return _talk([{**each, "weight": 0} if place == turn else each for place, each in enumerate(_TALK)])


@pytest.mark.parametrize(
    "template, documents, wanted",
    [
        *((each, [_talk(_TALK)], _BOTH) for each in (_MARKED, _PLAIN)),
        (_WITH_EOS, [_talk(_TALK[3:])] * 2, "<user>more<assistant>⟦ok■⟧" * 2),  # its own end, and no second one
        (_WITH_EOS, [_talk([*_TALK[3:], _TALK[1]])], "<user>more<assistant>⟦ok■⟧<user>hi■"),
        *((each, [_talk(_QUOTED)], _SPELLED) for each in (_MARKED, _PLAIN, _WITH_EOS)),
        (_THINKS, [_talk(_TALK)], _THOUGHT),
        (_SIGNS_LAST, [_talk(_TALK)], _BOTH.replace("ok", "okme")),
        (  # the text of a question that is also the answer
            _THINKS,
            [_talk(_SAME)],
            "<user>same<end><assistant>⟦same<end>⟧<user>assistant<end><assistant>⟦[think]same<end>■⟧",
        ),
        # behind a prompt of messages, and a turn of weight 0, whose end is not learned either
        *((each, [_talk(_TALK, 4)], _LAST) for each in (_MARKED, _PLAIN)),
        *((each, [_less(2)], _LAST) for each in (_MARKED, _PLAIN)),
        *((each, [_less(4)], _FIRST) for each in (_MARKED, _PLAIN)),
        *((_THINKS, [each], _THOUGHT.replace("⟦yo 漢<end>⟧", "yo 漢<end>")) for each in (_talk(_TALK, 4), _less(2))),
        (_THINKS, [_less(4)], _THOUGHT.replace("⟦[think]ok<end>■⟧", "[think]ok<end>■")),
        *(
            (each, [_talk([{**_CALLS[0], "tools": _ADD}, *_CALLS[1:]])], f"[add]<user>1 + 1?{more}")
            for each, more in (
                (_RENDERS, f"|<assistant>{_CALLED}<tool>2|<assistant>⟦two|■⟧"),
                (_RENDERS_ANEW.replace("nl", "'_'"), f"_|<assistant>{_CALLED}<tool>2_|<assistant>⟦[think]two_|■⟧"),
            )
        ),
        # a prompt and its completion, which may spell its end
        (None, [Document("a", text="what is 漢?\na sign\nof 漢", prompt=11)], "what is 漢?\n⟦a sign\nof 漢■⟧"),
        (
            None,
            [Document("a", text="all of it"), Document("b", text=f"it? no{_EOS}", prompt=3)],
            "a⟦ll of it■⟧it?⟦ no■⟧",
        ),
        (None, _texts(f"the token {_EOS} ends", "no"), f"t⟦he token {_EOS} ends■no■⟧"),
    ],
)
def test_only_the_assistants_text_or_the_completion_counts_to_the_last_byte(
    template, documents, wanted, tokenizer, caplog
):
    """⟦ ⟧: what is learned; ■: the token that ends a document, which is spelled out where a text quotes it."""
    tokenizer.chat_template = template
    assert _shown(pack(documents, tokenizer, 1), tokenizer) == wanted
    assert "the chat template" not in caplog.text


# Qwen3's rule: reasoning, by its key or within the content, stands behind the last question only.
_REASONS = _THINKS.replace(
    "{{- '[think]' + body }}",
    "{%- set inside = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{{- '<think>' + (m.reasoning_content or m.thinking or inside).strip() + '</think>' + body }}",
).replace(
    "{{- '<end>' }}", "{%- for c in m.tool_calls or () %}{{- '(' + c.function.name + ')' }}{%- endfor %}{{- '<end>' }}"
)
_OPENS = _REASONS.replace("{{- '<assistant>' }}", "{{- '<assistant><think>' }}")  # what is to be answered
_DROPS = _OPENS.replace("loop.index0 > ns.last", "false")  # DeepSeek-R1's rule: the text has no reasoning
_MOVES = (  # Mistral's: the tools are before the last question
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[TOOLS]' if loop.index0 + 3 > loop.length }}[Q]{{ m.content }}"
    "[/Q]{% else %}{% for c in m.tool_calls or () %}[CALL]{{ c.function.name }}{% endfor %}{{ m.content }}|{% endif %}"
    "{% endfor %}"
)


def _reasoned(*turns, key="reasoning_content"):
    """Make questions and answers, each of reasoning and content.

    key: None: the reasoning is within the content.
    """
    found = []
    for number, (reasoning, content) in enumerate(turns):
        inside = {"content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
        turn = {"content": content, key: reasoning} if key else inside
        found += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", **turn}]
    return found


_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL], "reasoning_content": "r0"}
_STEPS = [{"role": "user", "content": "q0"}, _CALLING, {"role": "tool", "content": "2"}, *_reasoned(("r1", "a1"))[1:]]
_Q0, _Q1, _Q2 = (f"<user>q{number}<end><assistant>" for number in range(3))
_TURNS = [("r0", "a0"), ("r1", "a1"), ("r2", "a2")]


@pytest.mark.parametrize(
    "template, talk, wanted",
    [
        *(
            (template, _reasoned(*turns, key=key), f"{before}{opened}{last}<end>⟧")
            for template, opened in ((_REASONS, "⟦<think>"), (_OPENS, "<think>⟦"))
            for key in ("reasoning_content", "thinking", None)
            for turns, before, last in (
                (_TURNS[:1], _Q0, "r0</think>a0"),
                (_TURNS[:2], f"{_Q0}⟦a0<end>⟧{_Q1}", "r1</think>a1"),
                (_TURNS, f"{_Q0}⟦a0<end>⟧{_Q1}⟦a1<end>⟧{_Q2}", "r2</think>a2"),
                ([("r0", "<b>"), ("", " a1\n")], f"{_Q0}⟦<b><end>⟧{_Q1}", "</think>a1"),
                ([("r", "same"), ("r", "same")], f"{_Q0}⟦same<end>⟧{_Q1}", "r</think>same"),
            )
        ),
        *((_DROPS, _reasoned(*_TURNS[:2], key=key), f"{_Q0}⟦a0<end>⟧{_Q1}⟦a1<end>⟧") for key in ("thinking", None)),
        # steps of one answer keep their reasoning, until there is another question; and answers in a row
        (_REASONS, _STEPS, f"{_Q0}⟦<think>r0</think>(add)<end>⟧<tool>2<end><assistant>⟦<think>r1</think>a1<end>⟧"),
        *(
            (template, [*_STEPS, *_reasoned(*_TURNS[:1])], f"{_Q0}⟦(add)<end>⟧<tool>2<end><assistant>⟦a1<end>⟧{last}")
            for template, last in (
                (_REASONS, f"{_Q0}⟦<think>r0</think>a0<end>⟧"),
                (_OPENS, f"{_Q0}<think>⟦r0</think>a0<end>⟧"),
            )
        ),
        (
            _OPENS,
            [*_reasoned(("r", "a")), _CALLING, *_reasoned(("r", "a"))],
            f"{_Q0}⟦a<end>⟧<assistant>⟦(add)<end>⟧{_Q0}<think>⟦r</think>a<end>⟧",
        ),
        (_MOVES, [*_STEPS, *_TALK[1:3]], "[Q]q0[/Q]⟦[CALL]add|⟧2|⟦a1|⟧[TOOLS][Q]hi[/Q]⟦yo 漢|⟧"),
        # a template without such a rule: as it was
        (_PLAIN, _reasoned(*_TURNS[:2]), "<user>q0<assistant>⟦a0⟧<user>q1<assistant>⟦a1⟧"),
        (_PLAIN, _reasoned(("r", "a"), key=None), "<user>q0<assistant>⟦<think>\nr\n</think>\n\na⟧"),
    ],
)
def test_reasoning_counts_where_the_template_keeps_it_turn_by_turn(template, talk, wanted, tokenizer):
    tokenizer.chat_template = template
    assert _rendered(tokenizer, talk) == wanted


def _rendered(tokenizer, talk):
    """Render a conversation as text, and mark the parts that count."""
    text, spans = rendering.render(tokenizer, False, "talk", talk)
    for start, stop in reversed(spans):
        text = f"{text[:start]}⟦{text[start:stop]}⟧{text[stop:]}"
    return text


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", None])
def test_reasoning_that_counts_is_no_warning_and_what_the_template_leaves_out_is(key, tokenizer, caplog):
    tokenizer.chat_template, long = _REASONS, ("because " * 99, "a")
    list(pack([_talk(_reasoned(long, key=key))], tokenizer, 8, masks=Masks("train", 8)))
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    list(pack([_talk(_reasoned(("other", "a"), long, key=key))], tokenizer, 8, masks=Masks("train", 8)))
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert line.startswith("train: in 1 conversations the chat template leaves out text or reasoning of the assistant")


_PARTS = st.sampled_from(["<assistant>", "<assistant><think>", "<end>", "</think>", "a", "\n"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(_PARTS, max_size=3), st.booleans()), min_size=1, max_size=3), st.booleans())
def test_no_text_of_a_user_counts_whatever_it_quotes(make_tokenizer, questions, opens):
    tokenizer, talk = make_tokenizer(), []
    tokenizer.chat_template = _OPENS if opens else _REASONS
    for parts, calls in questions:
        asked = {"role": "user", "content": "".join(f"U{part}U" for part in parts)}
        talk += [asked, copy.deepcopy(_CALLING) if calls else _reasoned(("r", "a"))[1]]
    text, spans = rendering.render(tokenizer, False, "talk", talk)
    assert len(spans) == len(questions) and "U" not in "".join(text[start:stop] for start, stop in spans)


@pytest.mark.parametrize("parse", [False, True])
def test_special_tokens_in_a_text_are_counted_or_parsed_where_they_are_meant(parse, tokenizer):
    tokenizer.chat_template, masks = _PLAIN, Masks("train", 8)
    talk = _talk([_TALK[1], {"role": "assistant", "content": f"a {_EOS} b"}])
    given, end = [Document("a", text=f"a {_EOS} b", prompt=1), talk], "■" if parse else _EOS
    shown = _shown(pack(given, tokenizer, 1, masks=masks, parse_special_tokens=parse), tokenizer)
    assert shown == f"a⟦ {end} b■⟧<user>hi<assistant>⟦a {end} b■⟧"
    assert masks.counts == ({} if parse else {"train": {"special tokens spelled in the text and read as text": 1}})


@pytest.mark.parametrize("template", [_PLAIN, _MARKED, _RENDERS.replace("m.tool_calls", "(m.tool_calls or [])[:1]")])
def test_a_conversation_whose_tool_calls_are_not_rendered_is_left_out_and_counted(template, tokenizer, caplog):
    tokenizer.chat_template = template
    masks, calls, good = Masks("train", 8), Document("calls", messages=_CALLS), Document("good", messages=_TALK)
    with caplog.at_level("INFO"):
        rows = list(pack([calls, good], tokenizer, 8, masks=masks))
    assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in pack([good], tokenizer, 8)]
    assert masks.counts == {"train": {"conversations left out that the chat template does not render as they are": 1}}
    assert "left out 1 conversations (first: calls: the chat template does not render the tool calls" in caplog.text
    with pytest.raises(UsageError, match=r"^calls: the chat template does not render the tool calls of this conv"):
        list(pack([calls], tokenizer, 8))


def test_tools_and_calls_that_quote_a_special_token_in_a_value_or_a_name_are_spelled_out(tokenizer):
    tokenizer.chat_template = _RENDERS.replace("t.function.name", "t.function | tojson")
    tokenizer.add_special_tokens({"additional_special_tokens": ["content"]})  # which is a key that templates read
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": f"x{_EOS}y", f"k{_EOS}": 1}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {_EOS: {"type": _EOS}}}}}
    talk = [{**_CALLS[0], "tools": [tool]}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.apply_chat_template(talk, tools=[tool], tokenize=False)
    (row,) = pack([Document("talk", messages=talk)], tokenizer, len(text.encode()))
    assert row.tokens.tolist().count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(row.tokens) == text + _EOS
    assert f'"a": "x{_EOS}y", "k{_EOS}": 1' in text and f'{{"{_EOS}": {{"type": "{_EOS}"}}}}' in text


def test_an_example_shows_what_counts_in_lines_without_control_characters(tokenizer, caplog):
    tokenizer.chat_template = _PLAIN
    talk = [{"role": "user", "content": f"quote {_EOS}\n"}, {"role": "assistant", "content": "yes " + "x" * 999}]
    with caplog.at_level("INFO"):
        list(pack([Document("row 7", messages=talk)] * 2, tokenizer, 8, masks=Masks("train", 8, example=True)))
    shown = [each.getMessage() for each in caplog.records]
    assert shown[0] == "an example, row 7: 1004 of 1041 tokens count, between ⟦ ⟧"
    assert shown[1] == f"  | <user>quote {_EOS}"
    assert shown[2].startswith("  | <assistant>⟦yes xxx") and " ... " in shown[2] and shown[2].endswith("x⟧")
    assert shown[3].startswith("train: 2,008 of 2,082 tokens in 2 documents count; 2 are longer than --seq-len 8 and ")
    assert len(shown) == 4


def test_marks_of_a_template_that_leave_out_the_answer_are_a_warning(tokenizer, caplog):
    tokenizer.chat_template = _MARKED.replace("{{ m.content }}{% endgen", "{{ m.content[:1] }}{% endgen")
    list(pack([Document("row 7", messages=_TALK)], tokenizer, 8, masks=Masks("train", 8)))
    tokenizer.chat_template = f"{{% generation %}}{_PLAIN}{'!' * 200}{{% endgeneration %}}"
    list(pack([Document("row 8", messages=_TALK)], tokenizer, 8, masks=Masks("train", 8)))
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    short, wide = (each for each in said if "the chat template" in each)
    assert short.endswith(
        "in 1 conversations the chat template leaves out text or reasoning of the assistant (first: row 7)"
    )
    assert wide == "train: in 1 conversations the chat template counts more than the assistant's text (first: row 8)"


@pytest.mark.parametrize("length, level", [(46, "INFO"), (47, "WARNING")])
def test_data_of_which_less_than_a_tenth_counts_are_a_warning(length, level, tokenizer, caplog):
    tokenizer.chat_template = _PLAIN
    talk = [{"role": "user", "content": "x" * length}, {"role": "assistant", "content": "abcdef"}]
    with caplog.at_level("INFO"):
        list(pack([Document("row 7", messages=talk)], tokenizer, 8, masks=Masks("train", 8)))
    (line,) = [each for each in caplog.records if "tokens in 1 documents count" in each.getMessage()]
    assert line.levelname == level and ("less than a tenth" in line.getMessage()) == (level == "WARNING")


def test_a_tokenizer_without_eos_or_without_fast_backend_is_refused_at_the_call(make_tokenizer):
    eosless = make_tokenizer()
    eosless.eos_token = None
    eosless.name_or_path = "models/teacher"
    with pytest.raises(UsageError, match="the tokenizer models/teacher has no end-of-sequence token"):
        pack([], eosless, 8)
    with pytest.raises(UsageError, match="no fast backend"):
        pack([], object(), 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pattern_of_the_tokenizer_that_backtracks_without_end_is_refused(num_workers, tokenizer):
    slow = pre_tokenizers.Split(Regex("(a|a)*$"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [slow, tokenizer.backend_tokenizer.pre_tokenizer]
    )
    with pytest.raises(UsageError, match=r"the tokenizer cannot take this text .*retry-limit-in-match"):
        list(pack(_texts("a" * 60 + "b"), tokenizer, 4, num_workers=num_workers))


def test_a_tokenizer_that_panics_at_the_first_word_is_refused(tokenizer):
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AYWJj"}
    broken = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<|endoftext|>")
    with pytest.raises(UsageError, match=r"the tokenizer cannot take this text .*; use another tokenizer"):
        pack([], broken, 8)


def test_whole_conversations_fill_rows_as_a_table_made_by_hand_and_are_cut_at_turns_alone(tokenizer):
    tokenizer.chat_template = _PLAIN.replace("<{{ m.role }}>", "{{ m.role[0] }}").replace("<assistant>", "a")
    turns = zip("bcdefg", (3, 1, 4, 2, 1, 12), strict=True)
    turns = [[("user", "x"), ("assistant", letter * size)] for letter, size in turns]
    turns.append([("user", "x"), ("assistant", "hhh"), ("user", "y"), ("assistant", "iiii")])
    talks = [[{"role": role, "content": text} for role, text in each] for each in turns]
    documents = [Document(f"talk {n}", messages=talk) for n, talk in enumerate(talks)]
    rows = list(pack(documents, tokenizer, 11, whole=True, document_mask=True))
    end = tokenizer.eos_token_id
    shown = ["".join("■" if each == end else tokenizer.decode([each]) for each in row.tokens) for row in rows]
    masks = ["".join("01"[int(each)] for each in row.loss_mask) for row in rows]
    segments = ["".join(map(str, row.segments)) for row in rows]
    table = [  # 12 tokens; the label of position t is token t + 1; ■ ends a conversation, or fills the row
        ("uxabbb■uxac■", "00111100011", "00000001111"),
        ("uxadddd■■■■■", "00111110000", "00000000111"),
        ("uxaee■uxaf■■", "00111000110", "00000011111"),
        ("uxaggggggggg", "00111111111", "00000000000"),
        ("gggg■uxahhh■", "11110001110", "00000111111"),
        ("uyaiiii■■■■■", "00111110000", "00000000111"),
    ]
    assert [*zip(shown, masks, segments, strict=True)] == table
