"""A chat template is a program that comes with a model: it keeps its limits, or the error is one line."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from kdtrain.data import rendering
from kdtrain.data.formats import Document
from kdtrain.data.packing import pack
from kdtrain.errors import UsageError

TALK = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because."}]
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def rows(tokenizer, template, num_workers=0):
    tokenizer.chat_template = template
    documents = [Document(key=f"chat:{number}", messages=TALK) for number in range(3)]
    return list(pack(documents, tokenizer, 8, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "template",
    [
        LOOPS,
        f"{{% generation %}}{LOOPS}{{% endgeneration %}}",
        "{{ 9 ** (9 ** 9) }}",  # one call of C, which no signal handler of Python would interrupt
        "{{ 'a' * 10 ** 11 }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    ],
)
def test_a_template_without_end_in_time_or_memory_is_refused(monkeypatch, tokenizer, template, num_workers):
    monkeypatch.setattr(rendering, "SECONDS", 0.3)
    with pytest.raises(UsageError, match=r"chat:0: the chat template takes more than 0\.4 s or 1 GiB for this conv"):
        rows(tokenizer, template, num_workers)


@pytest.mark.parametrize(
    "template, line",
    [
        ("{{ 'ab c' * 2 ** 19 }}", "makes 2,097,152 characters in 1 marked pieces of this conversation of 2 messages"),
        ("{% for a in range(129) %}{% generation %}x{% endgeneration %}{% endfor %}", "in 129 marked pieces"),
        (
            "{{ raise_exception('\\n no tools.\\nTraceback (most recent call last)') }}",
            r"refuses this conversation: no tools\.$",
        ),
        ("{{ ((((", "refuses this conversation: unexpected 'end of template'$"),
    ],
)
def test_a_template_that_renders_far_more_text_than_it_gets_or_fails_is_refused_in_one_line(tokenizer, template, line):
    with pytest.raises(UsageError, match=f"chat:0: the chat template .*{line}"):
        rows(tokenizer, template)


def test_a_slow_machine_makes_no_template_slow(monkeypatch):
    monkeypatch.setattr(rendering, "SECONDS", 0.1)
    renderer = rendering.Renderer(lambda key, messages: (time.sleep(0.5), ("text", [(0, 4)]))[1])
    assert renderer("key", TALK) == ("text", [(0, 4)])
    renderer.close()


def test_each_conversation_has_its_own_time(monkeypatch):
    monkeypatch.setattr(rendering, "SECONDS", 0.5)

    def busy(key, messages):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return key, []

    renderer = rendering.Renderer(busy)
    assert [renderer(str(number), TALK)[0] for number in range(5)] == list("01234")
    renderer.close()


def test_no_process_is_left_behind(tokenizer):
    tokenizer.chat_template = PLAIN
    endless = (Document(key=f"chat:{number}", messages=TALK) for number in iter(int, 1))
    packed = pack(endless, tokenizer, 8)
    next(packed)
    assert children()
    packed.close()
    assert not children()


def test_the_process_ends_with_a_parent_that_is_killed():
    code = (
        "import sys, time; from kdtrain.data.rendering import Renderer; "
        "r = Renderer(lambda key, messages: (key, [])); r('a', []); "
        "print(r._sandbox._child[0].pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(1000):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if state(child) == "Z":  # ended, and nobody has asked how
            return
        time.sleep(0.01)
    raise AssertionError("the process outlived its parent")


def children():
    """List the child processes that render conversations."""
    return [each for each in multiprocessing.active_children() if each.name == "sandbox"]


def state(process):
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
