"""Copies to the host: on a GPU they run beside the step, and a change of a tensor and a read of its copy wait for them.

A CPU shows the order of what would be queued: its tensors claim to be on a GPU, and streams and events are records.
"""

import threading
from contextlib import contextmanager

import pytest
import torch
from checkpoint_kit import STATES, assert_equal, tensors

from kdtrain.checkpoint.saver import HostCopies, Saver, host_buffers
from kdtrain.checkpoint.store import Store, load

log: list[tuple] = []


class OnGpu(torch.Tensor):
    """A tensor of the CPU that claims to be on a GPU."""

    is_cuda, device = True, torch.device("cuda", 1)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            log.append(("copy", tuple(args[1].shape), kwargs))
        if function is torch.empty_like:
            log.append(("pinned", kwargs.pop("pin_memory")))
            return function(args[0].as_subclass(torch.Tensor), **kwargs)
        return super().__torch_function__(function, types, args, kwargs or {})

    def record_stream(self, stream):
        log.append(("keeps its memory for", stream.name))


class Stream:
    def __init__(self, device, name="side"):
        self.device, self.name = device, name

    def wait_stream(self, other):
        log.append((self.name, "waits for all of", other.name))

    def wait_event(self, event):
        log.append((self.name, "waits for", event.number))


class Event:
    count = 0

    def __init__(self, blocking):
        assert blocking

    def record(self, stream):
        Event.count += 1
        self.number = Event.count
        log.append((stream.name, "records", self.number))

    def synchronize(self):
        log.append((threading.current_thread().name, "waits for", self.number))


@pytest.fixture
def gpu(monkeypatch):
    """Put records in place of torch's streams and events."""

    @contextmanager
    def using(stream):
        log.append(("on", stream.name))
        yield
        log.append(("off", stream.name))

    log.clear()
    Event.count = 0
    for name, stand_in in (("Stream", Stream), ("Event", Event), ("stream", using)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, f"step's on {device}"))


ONE = {"a": torch.arange(4.0).as_subclass(OnGpu), "on the CPU": torch.ones(1)}
COPIED = [
    ("side", "waits for all of", "step's on cuda:1"),
    ("on", "side"),
    ("copy", (4,), {"non_blocking": True}),
    ("keeps its memory for", "side"),
]


def test_a_copy_runs_on_a_stream_of_its_own_and_only_a_change_waits_for_it(gpu):
    copies = HostCopies()
    copies.before_change()  # nothing was copied
    copies.wait()
    buffers = host_buffers(ONE)
    found = copies.copy(ONE, buffers)
    assert log == [("pinned", True), *COPIED, ("side", "records", 1), ("off", "side")]
    assert all(torch.equal(found[name], ONE[name].as_subclass(torch.Tensor)) for name in ONE)
    log.clear()
    copies.before_change()
    assert log == [("step's on cuda:1", "waits for", 1)]
    log.clear()
    copies.copy(ONE, host_buffers(ONE, buffers))  # no memory is pinned again
    assert log == [*COPIED, ("side", "records", 2), ("off", "side")]
    log.clear()
    copies.wait()
    assert log == [("MainThread", "waits for", 2)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_is_written_only_after_its_copy_is_complete(gpu, tmp_path, monkeypatch, asynchronous):
    saver = Saver(Store(tmp_path), asynchronous)
    save = saver.store.save
    monkeypatch.setattr(saver.store, "save", lambda *what: log.append("write") or save(*what))
    snapshot = saver.copies.copy(ONE, host_buffers(ONE))
    log.clear()
    saver.save(["step-00000001"], 1, {"b": ONE["a"]} if asynchronous else {}, STATES, kept=snapshot)
    saver.close()
    waits = ("checkpoint", "waits for", 2) if asynchronous else ("MainThread", "waits for", 1)
    assert log[-2:] == [waits, "write"]


def test_a_save_returns_while_the_copy_is_under_way(tmp_path):
    class Slow:
        done = threading.Event()

        def synchronize(self):
            assert self.done.wait(300)

    saver = Saver(Store(tmp_path))
    saver.copies.done = Slow()
    saver.save(["step-00000001"], 1, tensors(), STATES)
    assert saver._thread.is_alive() and not any(tmp_path.iterdir())
    Slow.done.set()
    saver.close()
    assert_equal(load(tmp_path / "step-00000001").tensors, tensors())


def test_tensors_that_never_change_are_written_without_a_copy(tmp_path, monkeypatch):
    saver, own, kept, written = Saver(Store(tmp_path)), {"own": torch.ones(3)}, {"kept": torch.ones(3)}, {}
    monkeypatch.setattr(saver.store, "save", lambda name, step, tensors, *rest: written.update(tensors))
    saver.save(["step-00000001"], 1, own, STATES, kept=kept)
    saver.wait()
    assert list(written) == ["own", "kept"]
    assert written["kept"] is kept["kept"] and written["own"].data_ptr() != own["own"].data_ptr()
