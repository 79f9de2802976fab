"""A first signal asks for a stop, a second one ends the process."""

import os
import signal
import subprocess
import sys

import pytest

from kdtrain.training.signals import StopRequest, interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_remembered_by_name(number):
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.name == signal.Signals(number).name


def test_afterwards_the_earlier_signal_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = StopRequest()
    with pytest.raises(ZeroDivisionError), stop:
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_signal_ends_the_process_at_once():
    program = (
        "import os, signal\nfrom kdtrain.training.signals import StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    print('first', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('second', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "first\n")


@pytest.mark.parametrize("compiling", [True, False])
def test_a_request_that_a_compiler_delays_is_answered_at_once(compiling, capfd):
    with StopRequest() as stop:
        stop.compiling = compiling
        signal.raise_signal(signal.SIGINT)
        assert stop.name == "SIGINT"
    said = "compiling, about a minute; press again to stop now\n"
    assert capfd.readouterr().err == (said if compiling else "")


def test_sigterm_outside_of_training_is_an_interrupt_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


MAIN = """
import os, signal, threading, time, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background, where it is ignored
from kdtrain import __main__, cli

def command():
    {}

cli.main = command
__main__.main()
"""


def command(body, *then):
    """Return the exit code and stderr of a command whose `main` is `body`.

    then: signals, sent one after each line of its stdout.
    """
    program = [sys.executable, "-c", MAIN.format(body.replace("\n", "\n    "))]
    child = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for number in then:
        child.stdout.readline()
        child.send_signal(number)
    return child.wait(60), child.communicate()[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_falls_into_a_callback_is_not_lost(number):
    body = f"""
class Thing: pass
thing = Thing()
held = weakref.ref(thing, lambda _: signal.raise_signal({number:d}))
del thing
time.sleep(20)
"""
    assert command(body) == (1, "kdtrain: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_hdf5_writes_waits_until_it_has_written(tmp_path, number):
    body = f"""
from pathlib import Path
from kdtrain.cache.format import hdf5_writing
signals = [{number:d}]
class Raw(__import__("io").FileIO):
    def write(self, data):
        if signals: signal.raise_signal(signals.pop())  # a second one ends the process at once
        return super().write(data)
class Sink(hdf5_writing._Sink, Raw): pass
sink = Sink({str(tmp_path / "x")!r})
with hdf5_writing.h5py.File(sink, "w") as made:
    made["one"] = list(range(9))
    made.flush()
    print("written", file=__import__("sys").stderr)
    time.sleep(20)
"""
    assert command(body) == (1, "written\nkdtrain: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_while_a_command_ends_ends_it_at_once_without_a_traceback(number):
    body = """
threading.Thread(target=time.sleep, args=(20,)).start()
try:
    print(flush=True), time.sleep(20)
except KeyboardInterrupt:
    threading.Timer(0.5, print, (), {"flush": True}).start()
    raise
"""
    assert command(body, signal.SIGINT, number) == (1, "kdtrain: interrupted\n")
