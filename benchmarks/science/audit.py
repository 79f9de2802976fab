"""What `kdtrain audit CACHE --teacher T` finds, and how often it accuses a right cache.

`python -m benchmarks.science.audit` writes benchmarks/results/audit.json. The teacher is the shipped one in bf16, the
text packed rows of the standard library, the caches 50 samples a token and the top 12, coded as on disk. Each fault is
injected into the capture of a pool of rows; every row of the pool is scored once by the right teacher (`audit.score`);
an audit draws rows from the pool and judges them.

    false alarms   of 1,000 audits of 20 to 50 rows of right caches: made here, and made by other attention kernels
                   (eager instead of sdpa), which stand for another machine: their bf16 differs from ours by 1.2 times
                   what either differs from fp32. Samples are drawn anew from several seeds a row; a top-k has no
                   chance in it, so that its audits differ in their rows alone.
    power          the share of audits that fail, by fault and rows read; also of the two tests of samples alone
                   (likelihood and counts), which is all that a cache without log p of labels and without a known grid
                   allows, at the same level
    diagnosis      the share of audits of half of the pool whose best-fitting fault is the one that was injected
    tolerance      numeric noise of the label's log p: bf16 by both kernels, and int8, each from fp32

The earlier checkpoint is stood for by the shipped weights with normal noise of 5 % of each matrix's own size. Lost BOS:
each row is read without its first token, and position 0 answered from the end-of-text token. Shuffled shard: targets of
other rows. Document mask: made with one, audited without.
"""

import argparse
import copy
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import RESULTS, TEACHER, write
from benchmarks.harness.machine import commit, machine
from benchmarks.harness.models import packed, token_tensor
from kdtrain.cache.format.codec import decode, draw_points, encode_sequences
from kdtrain.cache.format.compression import Coding, unpack
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.self_check import OTHER_ROWS, other_row
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.batch import Batch
from kdtrain.objective.targets import SparseTargets
from kdtrain.plugins.audit.command import DIAGNOSED, NEIGHBOURS, logprobs, other_forwards, rounded_to_int8
from kdtrain.plugins.audit.diagnose import AHEAD, INT8, LOST, MASK, OTHER_WEIGHTS, Gains, diagnose, gains
from kdtrain.plugins.audit.evidence import Evidence, judge, score, worst_first
from kdtrain.teaching.local import LocalTeacher

RESULT = RESULTS / "audit.json"
LENGTH, BATCH = 128, 16
ROWS = (1, 2, 5, 10, 20, 50, 100, 200)
CODECS = {"50 samples": {"num_samples": 50}, "top-k 12": {"top_k": 12}}
SAMPLES_ALONE = "50 samples, likelihood and counts alone"
NULL, OTHER_KERNELS = "right cache", "right cache, other kernels"
FAULTS = {
    "off by one": AHEAD,
    "T = 0.9": "temperature",
    "int8 weights": INT8,
    "earlier checkpoint": OTHER_WEIGHTS,
    "lost BOS": LOST,
    "top-p 0.95": "top-p 0.95",
    "shuffled shard": OTHER_ROWS,
    "document mask": MASK,
}
"""What is injected, and how the diagnosis that names it begins."""

Capture = Callable[[Tensor, Tensor], Tensor]
"""tokens [B, T+1], segments [B, T] -> logits [B, T, V]"""


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", type=int, default=240, help="rows that are scored")
    parser.add_argument("--audits", type=int, default=1000, help="of right caches")
    parser.add_argument("--draws", type=int, default=100, help="audits for each fault and number of rows")
    parser.add_argument("--seeds", type=int, default=12, help="seeds of the samples of each row, for false alarms")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    started = time.monotonic()
    study = Study(options.pool)
    found: dict[str, Any] = {
        "settings": {"pool": options.pool, "seq_len": LENGTH, "audits": options.audits, "draws": options.draws},
        "tolerance": study.tolerance(),
        "false_alarms": {},
        "power": {name: {} for name in (*CODECS, SAMPLES_ALONE)},
        "divergence": {},
        "affected": {},
        "diagnosis": {name: {} for name in CODECS},
    }
    for codec in CODECS:
        for name, capture, seeds in (
            (NULL, study.own, options.seeds),
            (OTHER_KERNELS, study.eager, max(1, options.seeds // 4)),
        ):
            scored = [study.scored(study.logits(capture), codec, s) for s in range(seeds if "samples" in codec else 1)]
            found["false_alarms"][f"{name}, {codec}"] = false_alarms(scored, options.audits)
            report(started, name, codec, found["false_alarms"][f"{name}, {codec}"])
            write(options.result, found)
    for fault in FAULTS:
        logits_BTV = study.logits(study.faulty(fault))
        found["divergence"][fault], found["affected"][fault] = study.divergence(logits_BTV)
        for codec in CODECS:
            order = study.shuffle if fault == "shuffled shard" else None
            scored_rows = study.scored(logits_BTV, codec, 0, order)
            found["power"][codec][fault] = power(scored_rows, options.draws)
            if "samples" in codec:
                alone = [dataclasses.replace(row, numbers={}) for row in scored_rows]
                found["power"][SAMPLES_ALONE][fault] = power(alone, options.draws)
            found["diagnosis"][codec][fault] = study.diagnosed(logits_BTV, codec, fault, order, scored_rows)
            report(started, fault, codec, found["power"][codec][fault], found["diagnosis"][codec][fault])
        write(options.result, found)
    found["seconds"] = round(time.monotonic() - started)
    write(options.result, {**found, "commit": commit(), "machine": machine(torch.device("cpu"))})
    return 0


def report(started: float, *what: Any) -> None:
    """Print a line with the time."""
    print(f"{time.monotonic() - started:6.0f} s", *what, flush=True)


class Study:
    """The pool of rows, their right log-probabilities, and faulty captures of them."""

    def __init__(self, pool: int) -> None:
        rows = packed(TEACHER, "train", pool, LENGTH)
        self.tokens = token_tensor(rows)
        self.segments = torch.from_numpy(np.stack([row.segments for row in rows]).astype(np.int64))
        self.teacher, self.exact = loaded("bf16"), loaded("fp32")
        self.eager_teacher = loaded("bf16", attention="eager")
        self.logprobs, self.reference = (
            torch.cat([logprobs(each, part, False) for part in self.batches()]) for each in (self.teacher, self.exact)
        )
        self.others = other_forwards(self.teacher, LENGTH, False)
        self.shuffle = np.roll(np.arange(pool), 7)  # every row gets another's targets

    def batches(self) -> Iterator[Batch]:
        """Yield the pool in batches."""
        for start in range(0, len(self.tokens), BATCH):
            part = slice(start, start + BATCH)
            mask_BT = torch.ones_like(self.segments[part], dtype=torch.bool)
            yield Batch(self.tokens[part], mask_BT, self.segments[part], None)

    def row(self, number: int) -> Batch:
        """Return one row of the pool as a batch."""
        part = slice(number, number + 1)
        return Batch(
            self.tokens[part], torch.ones_like(self.segments[part], dtype=torch.bool), self.segments[part], None
        )

    def logits(self, capture: Capture) -> Tensor:
        """Compute the logits of a capture of the pool."""
        return torch.cat([capture(part.tokens, part.segments) for part in self.batches()])

    def own(self, tokens_BT: Tensor, _: Tensor) -> Tensor:
        """Return the logits of the right capture."""
        return self.teacher.logits(tokens_BT[:, :-1], None)

    def eager(self, tokens_BT: Tensor, _: Tensor) -> Tensor:
        """Return the logits of the right capture by other kernels."""
        return self.eager_teacher.logits(tokens_BT[:, :-1], None)

    def faulty(self, fault: str) -> Capture:
        """Make a capture with a fault; a shuffled shard is a right capture whose rows are exchanged later."""
        if fault == "int8 weights":
            teacher = rounded_to_int8(self.teacher)
            assert teacher is not None
            return lambda tokens_BT, _: teacher.logits(tokens_BT[:, :-1], None)
        if fault == "earlier checkpoint":
            noisy = with_noise(self.teacher, 0.05)
            return lambda tokens_BT, _: noisy.logits(tokens_BT[:, :-1], None)
        if fault == "document mask":
            return lambda tokens_BT, segments_BT: self.teacher.logits(tokens_BT[:, :-1], segments_BT)
        changes: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "off by one": lambda _, z_BTV: torch.cat([z_BTV[:, 1:], z_BTV[:, -1:]], 1),
            "T = 0.9": lambda _, z_BTV: z_BTV / 0.9,
            "top-p 0.95": lambda _, z_BTV: nucleus(z_BTV, 0.95),
            "lost BOS": lambda tokens_BT, _: self._lost(tokens_BT),
            "shuffled shard": lambda _, z_BTV: z_BTV,
        }
        return lambda tokens_BT, segments_BT: changes[fault](tokens_BT, self.own(tokens_BT, segments_BT))

    def _lost(self, tokens_BT: Tensor) -> Tensor:
        rest_BTV = self.teacher.logits(tokens_BT[:, 1:-1], None)
        end = self.teacher.tokenizer.eos_token_id
        first_BTV = self.teacher.logits(torch.full_like(tokens_BT[:, :1], end), None)
        return torch.cat([first_BTV, rest_BTV], 1)

    def targets(self, logits_BTV: Tensor, codec: str, seed: int, order: np.ndarray | None) -> SparseTargets:
        """Return the targets in a cache of this capture, through the codes of the disk.

        Row i gets the targets of `order[i]`.
        """
        spec = CodecSpec(kind="sparse", vocab_size=logits_BTV.shape[-1], **CODECS[codec])
        tokens = self.tokens.numpy()
        kept = encode_sequences(logits_BTV, self.tokens[:, 1:], spec, seed=seed, split="train", first=0)
        del kept["broken"]
        coding = Coding.fit(tokens, kept, spec)
        stored = coding.pack(tokens, kept)
        arrays = unpack([(coding, *row) for row in zip(tokens, stored["ids"], stored["numbers"], strict=True)])
        if order is not None:
            arrays = {name: values[order] for name, values in arrays.items()}
        return cast(SparseTargets, decode(arrays, spec))

    def scored(self, logits_BTV: Tensor, codec: str, seed: int, order: np.ndarray | None = None) -> list[Evidence]:
        """Score each row of the pool by the right teacher."""
        targets = self.targets(logits_BTV, codec, seed, order)
        number, found = targets.num_samples, []
        for row in range(len(self.tokens)):
            points = draw_points(seed, "train", row, LENGTH, number) if number else None
            part = slice(row * LENGTH, (row + 1) * LENGTH)
            own = self.logprobs[row], self.reference[row]
            found.append(score(targets[part], self.tokens[row, 1:], *own, points_TD=points))
        return found

    def divergence(self, logits_BTV: Tensor) -> tuple[float, float]:
        """Compute KL(faulty || right), nats a token, and the share of rows in which it is above 0.0005."""
        faulty = (each.log_softmax(-1) for each in logits_BTV)
        kl = [
            (other.exp() * (other.clamp(min=-50) - own)).sum(-1).mean()
            for own, other in zip(self.logprobs, faulty, strict=True)
        ]
        return torch.stack(kl).mean().item(), (torch.stack(kl) > 5e-4).float().mean().item()

    def diagnosed(
        self, logits_BTV: Tensor, codec: str, fault: str, order: np.ndarray | None, scored: list[Evidence]
    ) -> dict[str, Any]:
        """Diagnose audits of half of the pool; return how often they name the injected fault, and an example."""
        targets = self.targets(logits_BTV, codec, 0, order)

        @functools.cache
        def compared(row: int) -> tuple[Gains, int | None]:
            batch = self.row(row)
            part = targets[row * LENGTH : (row + 1) * LENGTH]
            others = {name: forward(batch)[0] for name, forward in self.others.items()}
            start = max(0, min(row - NEIGHBOURS // 2, len(self.tokens) - NEIGHBOURS))
            labels_RT = self.tokens[start : start + NEIGHBOURS, 1:]
            other = other_row(part, row - start, labels_RT, batch.loss_mask[0])
            return gains(part, self.tokens[row, 1:], self.logprobs[row], others), other

        random, named = np.random.RandomState(2), []
        for _ in range(10):
            chosen = random.choice(len(scored), len(scored) // 2, replace=False)
            worst = [int(chosen[place]) for place in worst_first([scored[i] for i in chosen])[:DIAGNOSED]]
            rows, matched = zip(*map(compared, worst), strict=True)
            named.append(diagnose(rows, matched))
        right = sum(each.fault.startswith(FAULTS[fault]) for each in named) / len(named)
        return {"right": right, "example": dataclasses.asdict(named[0])}

    def tolerance(self) -> dict[str, float]:
        """Measure the root mean square distance of the label's log p from fp32."""
        rounded = rounded_to_int8(self.teacher)
        assert rounded is not None
        labels_BT1, found = self.tokens[:, 1:, None], {}
        exact_BT1 = self.reference.gather(-1, labels_BT1)
        for name, teacher in (("bf16", self.teacher), ("bf16, eager", self.eager_teacher), ("int8, bf16", rounded)):
            own = torch.cat([logprobs(teacher, part, False) for part in self.batches()]).gather(-1, labels_BT1)
            found[name] = (own - exact_BT1).square().mean().sqrt().item()
        return found


def loaded(mode: str, **changes: Any) -> LocalTeacher:
    """Load the shipped teacher."""
    spec = dataclasses.replace(ModelSpec.read(TEACHER, "teachers"), **changes)
    teacher = LocalTeacher(spec, torch.device("cpu"), mode)
    teacher.load()
    return teacher


def with_noise(teacher: LocalTeacher, size: float) -> LocalTeacher:
    """Copy a teacher, and add to its matrices normal noise of `size` times the root of their mean square."""
    noisy, generator = copy.copy(teacher), torch.Generator().manual_seed(0)
    noisy.model = copy.deepcopy(teacher.model)
    with torch.no_grad():
        for layer in noisy.model.modules():
            if isinstance(layer, torch.nn.Linear) and layer.weight is not noisy.model.head.weight:
                scale = size * layer.weight.float().square().mean().sqrt()
                layer.weight += (scale * torch.randn(layer.weight.shape, generator=generator)).to(layer.weight.dtype)
    return noisy


def nucleus(logits_BTV: Tensor, p: float) -> Tensor:
    """Remove the entries beyond the mass `p` from logits; the entry that crosses it stays."""
    ordered = logits_BTV.softmax(-1).sort(-1, descending=True)
    cut = torch.zeros_like(logits_BTV, dtype=torch.bool)
    cut.scatter_(-1, ordered.indices, ordered.values.cumsum(-1) - ordered.values >= p)
    return logits_BTV.masked_fill(cut, -torch.inf)


def false_alarms(scored: Sequence[list[Evidence]], audits: int) -> dict[str, Any]:
    """Run audits of 20 to 50 rows, each row with the samples of one of its seeds; count failures by test."""
    random, failed = np.random.RandomState(3), 0
    by_test: dict[str, int] = {}
    least: dict[str, float] = {}
    for _ in range(audits):
        size = min(int(random.randint(20, 51)), len(scored[0]))
        rows = random.choice(len(scored[0]), size, replace=False)
        verdict = judge([scored[random.randint(len(scored))][row] for row in rows])
        failed += bool(verdict.failed)
        for test in verdict.tests:
            least[test.name] = min(least.get(test.name, 1.0), test.p)
        for test in verdict.failed:
            by_test[test.name] = by_test.get(test.name, 0) + 1
    return {"audits": audits, "failed": failed, "share": failed / audits, "by_test": by_test, "least_p": least}


def power(scored: Sequence[Evidence], draws: int) -> dict[str, float]:
    """Measure the share of audits that fail, by rows read."""
    random, found = np.random.RandomState(4), {}
    for number in (each for each in ROWS if each <= len(scored)):
        chosen = (random.choice(len(scored), number, replace=False) for _ in range(draws))
        found[str(number)] = sum(bool(judge([scored[i] for i in rows]).failed) for rows in chosen) / draws
    return found


if __name__ == "__main__":
    sys.exit(main())
