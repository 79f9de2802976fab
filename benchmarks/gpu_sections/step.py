"""Whole training steps of a 1 B student: cross-entropy, cached distillation, and an online teacher of 8 B.

One student and one optimizer; each side is a source of batches for the same compiled step, and the sides take turns of
a few steps in one process. The cached sides read real caches, as a run does, one batch ahead in a thread. A whole
cached distribution would be 256 KB a token: its side holds one batch on the device, and what copying it from pinned
memory would cost stands beside it. The online teacher runs as the product runs it, uncompiled, in bf16, its output
head a chunk of rows at a time.

Tokens a second are of the whole step: reading, forward, loss, backward, clipping, optimizer, and the step's numbers on
the host. TFLOP/s count matrix products and half of the attention's square, three forwards a step and, online, one of
the teacher. Peak memory is that of the student's step with its own batch; the teacher's weights count online only.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_sections import models
from gpu_sections.common import Goal, Options, Record
from gpu_sections.measuring import in_turn, medians, over, peak_of, synchronize, without_graphs
from gpu_sections.profiling import profiled
from gpu_sections.runs import Bench, Held, Tokens, cached, held_batch, write
from kdtrain.cache.codec import CodecSpec
from kdtrain.commands.common import ask_layers, wide_head
from kdtrain.objective.targets import DenseTargets
from kdtrain.training.data import OnlineSource, Source


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    student: str = "1b"
    teacher: str = "8b"
    shapes: tuple[tuple[int, int], ...] = ((2048, 16), (8192, 4))
    """Tokens in a sequence, sequences in a step."""
    kept: tuple[int, ...] = (12, 50)
    steps_a_turn: int = 3
    rounds: int = 5
    batches: int = 3
    """Different batches in a cache."""


TINY = Sizes("tiny", "tiny-teacher", ((32, 4), (64, 2)), (4, 12), 1, 2, 2)
GOALS = tuple(
    goal
    for length in (2048, 8192)
    for goal in (
        *(
            Goal(f"cached, K = {kept}, over cross-entropy, T = {length:,}", f"{length}.ratio.sparse-{kept}", 0.97)
            for kept in (12, 50)
        ),
        Goal(f"cached dense over cross-entropy, T = {length:,}", f"{length}.ratio.dense", 0.97),
        Goal(f"TFLOP/s, cached, K = 12, T = {length:,}", f"{length}.tflops.sparse-12", 400),
        Goal(
            f"speed-up of cached over online, of what the FLOP count allows, T = {length:,}",
            f"{length}.online_of_flops",
            0.95,
        ),
    )
)


def run(options: Options) -> int:
    """Measure, and write step.json."""
    sizes = TINY if options.tiny else Sizes()
    record = Record("step", options, vars(sizes) | {"compile": options.compile}, GOALS)
    for length, batch in sizes.shapes:
        with without_graphs():
            _measure(record, options, sizes, length, batch)
    return record.finish()


def _measure(record: Record, options: Options, sizes: Sizes, length: int, batch: int) -> None:
    """All figures of one length, whose student is made once, if any is missing."""
    made = functools.cache(lambda: _Shape(options, sizes, length, batch))
    record.measure(str(length), lambda: made().measured(functools.partial(record.so_far, str(length))))
    if options.profile:
        record.measure(f"{length}-profile", lambda: made().profiles())


class _Shape:
    """A student, its sides, and the caches they read, for one length of sequence."""

    def __init__(self, options: Options, sizes: Sizes, length: int, batch: int) -> None:
        self.options, self.sizes, self.length = options, sizes, length
        self.device, self.vocab = options.device, models.vocabulary(sizes.student)
        self.rows = models.text(batch * sizes.batches, length)
        student = models.make_student(sizes.student, self.device)
        self.bench = Bench(student, options, vocab_size=self.vocab, seq_len=length, batch=batch)
        self.tokens = Tokens(models.token_tensor(self.rows), self.device)

    def measured(self, keep: Callable[[Any], None]) -> dict[str, Any]:
        """Memory of each side, then the time of all in turn; `keep` gets what there is."""
        sides = {"cross-entropy": self._turn(self.tokens)} | {
            f"sparse-{kept}": self._turn(self._sparse(kept)) for kept in self.sizes.kept
        }
        memory: dict[str, dict[str, float | None]] = {}
        for name, turn in sides.items():
            memory[name] = self._peak(turn)
            keep(memory)
        dense = self._dense()
        held = dense.targets.logprobs.nbytes / 2**30
        sides["dense"] = self._turn(Held(dense))
        memory["dense"] = self._peak(sides["dense"])
        sides["online"] = self._turn(self._online())
        memory["online"] = self._peak(sides["online"], held)
        keep(memory)
        turns = in_turn(sides, self.sizes.rounds, self.device, keep=lambda times: keep([memory, times]))
        return {
            "tokens_a_step": self.bench.tokens,
            "memory": memory,
            "dense_targets_gib": held,
            "dense_copy_seconds_at_least": self._copy(dense.targets),
            "seconds_a_turn": turns,
            **self._rates(turns),
        }

    def profiles(self) -> dict[str, Any]:
        """Kernels, gaps and copies of cross-entropy and of the first cached side."""
        kept = self.sizes.kept[0]
        sides = {"cross-entropy": self.tokens, f"sparse-{kept}": self._sparse(kept)}
        found = {}
        for name, source in sides.items():
            step = self.bench.steps(source)
            step()
            found[name] = profiled(step, 1 if self.options.tiny else 3, self.device)
        return found

    def _turn(self, source: Source) -> Callable[[], None]:
        step = self.bench.steps(source)

        def turn() -> None:
            for _ in range(self.sizes.steps_a_turn):
                step()

        return turn

    def _sparse(self, kept: int) -> Source:
        folder = self.options.scratch / "caches" / f"{self.length}-{kept}"
        spec = CodecSpec(kind="sparse", vocab_size=self.vocab, top_k=kept)
        write(folder, self.rows, models.CheapTeacher(self.vocab, self.device), spec, self.length, 2)
        return cached(folder, self.device)

    def _dense(self) -> Any:
        tokens_BT1 = self.tokens.tokens[: self.bench.batch]
        teacher = models.CheapTeacher(self.vocab, self.device)
        parts = [teacher(row[None, :-1], None)[0].log_softmax(-1).half() for row in tokens_BT1]
        logprobs_NV = torch.cat(parts)
        labels_N1 = tokens_BT1[:, 1:].flatten()[:, None]
        targets = DenseTargets(logprobs_NV, logprobs_NV.gather(1, labels_N1)[:, 0].float())
        return held_batch(tokens_BT1, targets)

    def _online(self) -> Source:
        teacher = models.make_teacher(self.sizes.teacher, self.device)
        mode = self.bench.run.step.mode
        asked, tokens = ask_layers(teacher, self.device, mode, ()), self.tokens
        return OnlineSource(_Sized(tokens, self.vocab), asked, wide_head(teacher), False)  # type: ignore[arg-type]

    def _peak(self, turn: Callable[[], None], others: float = 0.0) -> dict[str, float | None]:
        """The peak of a turn behind a first one, less the GiB that other sides hold meanwhile."""
        turn()
        found = peak_of(turn, self.device)
        return {name: each if each is None else each - others for name, each in found.items()}

    def _copy(self, targets: DenseTargets) -> float | None:
        """Seconds to copy a batch's whole distributions from pinned memory, by a sixteenth of them."""
        if self.device.type != "cuda":
            return None
        part = targets.logprobs[: max(1, len(targets) // 16)]
        pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        times = in_turn({"copy": lambda: part.copy_(pinned, non_blocking=True)}, 5, self.device)
        synchronize(self.device)
        return medians(times)["copy"] * len(targets) / len(part)

    def _rates(self, turns: dict[str, list[float]]) -> dict[str, Any]:
        tokens = self.bench.tokens * self.sizes.steps_a_turn
        own = models.step_flops(self.sizes.student, self.length)
        taught = own + models.forward_flops(self.sizes.teacher, self.length)
        seconds = medians(turns)
        first = f"sparse-{self.sizes.kept[0]}"
        speed_up = over(turns, "online", first)
        return {
            "seconds_a_step": {name: each / self.sizes.steps_a_turn for name, each in seconds.items()},
            "tokens_a_second": {name: tokens / each for name, each in seconds.items()},
            "tflops": {
                name: tokens / each * (taught if name == "online" else own) / 1e12 for name, each in seconds.items()
            },
            "ratio": {name: over(turns, "cross-entropy", name) for name in turns},
            "speed_up_over_online": speed_up,
            "speed_up_of_the_flops": taught / own,
            "online_of_flops": speed_up / (taught / own),
        }


class _Sized:
    """Tokens with the vocabulary that an online source asks for."""

    def __init__(self, tokens: Tokens, vocab_size: int) -> None:
        self.tokens, self.vocab_size = tokens, vocab_size

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: Any) -> Any:
        """The sequences `indices`."""
        return self.tokens.read(indices)
