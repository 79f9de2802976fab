"""After any sequence of failures a whole checkpoint stays, the best is not lost, and no more stay than requested."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_kit import SHARD, flip
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kdtrain import faults
from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store, load
from kdtrain.checkpoint.tiers import Keep, name_of, tier
from kdtrain.errors import RunError

POINTS = ("write", "before-manifest", "before-rename", "between-renames", "after-rename", "before-link", "before-prune")
counts = st.integers(1, 3)


class Life(RuleBasedStateMachine):
    """A run that trains, fails, rolls back and restarts; its weights are a number that encodes its history."""

    @initialize(keep=st.tuples(counts, counts, counts), asynchronous=st.booleans())
    def begin(self, keep, asynchronous):
        self.folder = tempfile.TemporaryDirectory()
        self.keep = dict(zip(("rolling", "epoch", "special"), keep, strict=True))
        self.asynchronous = asynchronous
        self.step, self.rollbacks, self.weights = 0, 0, 0
        self.best = None
        self.saved = self.pruned = False
        self.open()

    def open(self):
        self.store = Store(Path(self.folder.name) / "c", Keep(**self.keep))
        self.saver = Saver(self.store, self.asynchronous)

    def advance(self, steps):
        if steps:
            self.step += steps
            self.weights = 1000 * self.rollbacks + self.step

    def go_on(self, name):
        state = load(self.store.path(name)).state
        self.step, self.rollbacks, self.weights = state["step"], state["rollbacks"], state["weights"]

    def save(self, names, best=False):
        state = {"step": self.step, "rollbacks": self.rollbacks, "weights": self.weights}
        weights = {"w": torch.full((2,), float(self.weights))}
        linked = names[0] if best else None
        self.saver.save(names, self.step, weights, state, rollbacks=self.rollbacks, best=linked)
        weights["w"].zero_()
        self.saver.wait()
        self.saved = self.pruned = True
        self.best = self.weights if best else self.best

    @rule(steps=st.integers(0, 3), epoch=st.booleans(), special=st.booleans(), best=st.booleans())
    def train(self, steps, epoch, special, best):
        self.advance(max(steps, self.step == 0))
        names = [name_of("rolling", self.step)]
        names += [name_of("epoch", self.step)] if epoch else []
        names += [f"interrupted-{self.step:08d}"] if special else []
        self.save(names, best)

    @precondition(lambda self: self.saved)
    @rule(point=st.sampled_from(POINTS), again=st.booleans())
    def fail(self, point, again):
        """Save on a full disk; the process ends, and another resumes."""
        self.advance(not again)
        replaces = name_of("rolling", self.step) in self.store.names()  # retention may have removed it since

        def full(reached, amount=1):
            if reached == f"checkpoint.{point}":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        before, faults.point = faults.point, full
        try:
            if point != "between-renames" or replaces:
                with pytest.raises(RunError):
                    self.save([name_of("rolling", self.step)])
        finally:
            faults.point = before
        self.resume()

    @precondition(lambda self: self.saved)
    @rule()
    def resume(self):
        """Resume in a new process from the newest whole checkpoint."""
        self.open()
        self.go_on(self.store.newest_valid()[0])
        self.pruned = False

    @precondition(lambda self: self.saved)
    @rule(back=st.integers(1, 4))
    def roll_back(self, back):
        name, _ = self.store.newest_valid(before=self.step - back + 1)
        if name is None:
            return
        rollbacks = self.rollbacks + 1
        self.go_on(name)
        self.rollbacks = rollbacks
        self.store.set_aside_after(self.step)
        self.save([f"rollback_{self.rollbacks}_iter{self.step}"])

    @precondition(lambda self: self.saved)
    @rule(number=st.integers(0, 20))
    def damage(self, number):
        """Flip a bit in a checkpoint that is neither the best nor the last."""
        entries = [name for name in self.store.names() if self.store.problem(name) is None]
        needed = {self.inode(entries[-1]), self.inode(self.store.linked("best"))}
        others = [name for name in entries if self.inode(name) not in needed]
        if others:
            flip(self.store.path(others[number % len(others)]) / SHARD)

    def inode(self, name):
        return (self.store.folder / name / SHARD).stat().st_ino if name else None

    @invariant()
    def a_whole_one_is_there(self):
        if getattr(self, "saved", False):
            assert self.store.newest_valid()[0] is not None
            assert self.store.choose("latest")

    @invariant()
    def the_best_is_not_lost(self):
        if getattr(self, "best", None) is not None:
            assert load(self.store.choose("best")).state["weights"] == self.best

    @invariant()
    def no_more_are_kept_than_asked(self):
        if not getattr(self, "pruned", False):
            return
        valid = [name for name in self.store.names() if self.store.problem(name) is None]
        besides = {self.store.linked("best"), self.store.linked("latest"), valid[-1]}
        for kind, count in self.keep.items():
            of_kind = [name for name in valid if tier(name) == kind]
            assert len([name for name in of_kind[:-count] if name not in besides]) == 0
        assert not list(self.store.folder.glob(".*"))

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


Life.TestCase.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)


class TestLife(Life.TestCase):
    """Random histories of a run."""
