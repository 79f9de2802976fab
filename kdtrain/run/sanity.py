"""`kdtrain distill --sanity`: the checks that a careful researcher does by hand before a long run, each with a verdict.

`ok`: as expected. `look`: unexpected; docs/monitoring.md says what it may mean. `-`: there is no expectation. The
limits are rules of thumb; docs/monitoring.md gives the source of each. `training.probes` measures.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from einops import rearrange
from rich.console import Console
from rich.table import Table

from kdtrain.checkpoint import tiers
from kdtrain.config import DistillConfig
from kdtrain.data import order
from kdtrain.models.loading import model_digest
from kdtrain.models.spec import DTYPES
from kdtrain.monitor.progress import log, setup_logging
from kdtrain.objective.batch import Batch
from kdtrain.ranks import refuse_many_processes
from kdtrain.run.trial import Trial, trial_run
from kdtrain.tables import literal, show
from kdtrain.training.probes import correlation, dead_units, entropy_floor, graph_breaks, kd_at, overfit
from kdtrain.training.reporter import gradients_of, initial_loss
from kdtrain.training.state import load_saved, make_optimizer
from kdtrain.training.validate import validate

SEQUENCES, STEPS = 16, 100
"""How many sequences `overfitting` trains on, and for how many steps at most."""
ALIGNED, RELATED = 0.9, 0.3
"""Least correlation with the teacher of a student with the teacher's weights, and of another trained student."""
DEAD = 0.05
"""Largest share of units that may be constant."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    check: str
    verdict: str
    """ok, look, or - without an expectation."""
    found: str
    wanted: str
    values: dict[str, Any]
    """The numbers, for `--json`."""


def main(config: DistillConfig) -> int:
    """Print the table, and leave nothing on disk.

    UsageError: the run is impossible. RunError: a step fails, as it would in the run.
    """
    setup_logging()
    if not config.cache:
        # these checks need little text, and packing all of it may take long
        most = max(4 * config.batch_size, 4 * SEQUENCES)
        few = min(config.data.num_sequences or most, most)
        config = replace(config, data=replace(config.data, num_sequences=few))
    found: list[Check] = []
    refuse_many_processes()
    with trial_run(config) as trial:
        checks = Checks(trial)
        for number, check in enumerate(CHECKS, 1):
            log.info("check %d of %d: %s", number, len(CHECKS), (check.__doc__ or "").splitlines()[0].rstrip("."))
            found.append(check(checks))
    if config.json:
        show("", {"run": str(config.out), "checks": [asdict(each) for each in found]}, as_json=True)
        return 0
    table = Table(title=literal(f"distill {config.out}, sanity", "table.title"), title_justify="left")
    for name in ("check", "verdict", "found", "wanted"):
        table.add_column(name, overflow="fold")
    for each in found:
        table.add_row(*map(literal, (each.check, each.verdict, each.found, each.wanted)))
    Console(soft_wrap=True).print(table)
    return 0


class Checks:
    """The checks of an untrained run; `loader`, `resume` and `overfitting` change the student."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.recipe, self.config = trial, trial.recipe, trial.recipe.config
        self.trainer, self.student, self.source = trial.trainer, trial.trainer.student, trial.trainer.stepper.source

    def initial_loss(self) -> Check:
        """The loss before the first step."""
        student, batches, init = self.student.eval(), min(4, self.config.monitor.eval_batches), self.recipe.student.init
        metrics = validate(student, self.trainer.validation_source, micro=self.trainer.stepper.micro, batches=batches)
        loss = math.nan if metrics is None else metrics.mean("cross_entropy")
        assert loss is not None
        sound, text = initial_loss(loss, student.vocab_size, init)
        wanted = {"scratch": "ln V, within a tenth", "pretrained": "below ln V"}.get(init, "finite")
        values = {"loss": loss, "ln_vocabulary": math.log(student.vocab_size)}
        return Check("initial loss", _verdict(sound), text.removeprefix("initial loss "), wanted, values)

    def gradients(self) -> Check:
        """The gradient of every parameter."""
        self.student.train()
        with self.student.eager():
            self.student(self._batch(), self.trainer.stepper.full_tokens).loss.backward()
        found = gradients_of(self.student.model)
        self.student.zero_grad(set_to_none=True)
        unsound = {"without": found.missing, "zero": found.zero, "non-finite": found.broken}
        total = found.good + sum(map(len, unsound.values()))
        named = [f"{kind}: {_first(names)}" for kind, names in unsound.items() if names]
        return Check(
            "gradients",
            _verdict(found.good == total),
            "; ".join([f"{found.good} of {total} parameters sound", *named]),
            "all finite and not zero",
            {"sound": found.good, **{kind.replace("-", "_"): names for kind, names in unsound.items()}},
        )

    def correlation(self) -> Check:
        """The logits of teacher and student on a batch."""
        name, found = "teacher-student correlation", correlation(self.student, self._batch(taught=True))
        if found is None:
            return Check(name, "-", "there are no logits of the same tokens to compare", "", {})
        values = {"correlation": found, "aligned": found > ALIGNED}
        if self.recipe.student.init != "pretrained":
            return Check(name, "-", f"{found:.3f}", "nothing: the student is untrained", values)
        wanted = ALIGNED if self._is_the_teacher() else RELATED
        return Check(name, _verdict(found > wanted), f"{found:.3f}", f"above {wanted:g}", values)

    def _is_the_teacher(self) -> bool:
        """Whether the student has the teacher's weights."""
        teacher = self.recipe.facts.teacher
        online = self.recipe.teacher
        digests = (teacher.get("weights_digest"), None if online is None else online.digest)
        stated = teacher.get("dtype") if online is None else online.spec.dtype
        dtype = getattr(torch, stated) if stated in DTYPES else torch.float32
        # an fp32 teacher has weights that were rounded to its dtype first
        casts = ((dtype,), (dtype, torch.float32))
        return any(model_digest(self.student.model, *each) in digests for each in casts)

    def dead_units(self) -> Check:
        """Units that are constant over the batch."""
        dead, units, layers = dead_units(self.student, self._batch())
        share = dead / max(units, 1)
        where = f" ({_first(layers)})" if layers else ""
        return Check(
            "dead units",
            _verdict(share < DEAD),
            f"{dead:,} of {units:,}, {share:.2%}{where}",
            f"below {DEAD:.0%}",
            {"dead": dead, "units": units, "share": share, "layers": layers},
        )

    def distillation(self) -> Check:
        """The distillation term at two temperatures, and its slope."""
        name, objective = "distillation term and T²", self.config.objective
        if not self.recipe.distils:
            return Check(name, "-", "plain cross-entropy", "", {})
        own, low, high = objective.temperature, objective.temperature_min, objective.temperature_max
        # a second temperature, a factor of two away, where the cache is valid there
        others = [each for each in (2 * own, own / 2) if (low or math.inf) <= each <= (high or 0.0)]
        at = [kd_at(self.student, self._batch(most=2, taught=True), each) for each in (own, *others[:1])]
        factors = [each.loss / (each.temperature**2 * each.kd) if each.kd else 1.0 for each in at]
        agree = all(abs(each.slope - 1) < 0.05 for each in at) and all(abs(factor - 1) < 1e-3 for factor in factors)
        terms = [f"{each.kd:.4f} at T = {each.temperature:g}, {each.loss:.4f} in the loss" for each in at]
        return Check(
            name,
            _verdict(agree),
            f"{'; '.join(terms)}; slope / gradient {', '.join(f'{each.slope:.3f}' for each in at)}",
            "T² times as much in the loss, slope / gradient 1 within 5%",
            {"at": [asdict(each) for each in at], "factors_over_T2": factors},
        )

    def graph_breaks(self) -> Check:
        """Where the compiled graph breaks."""
        found, compiled = graph_breaks(self.student, self._batch()), self.student.compile_objective
        text = f"{len(found)}: {'; '.join(found[:3])}" if found else "none"
        if not compiled:
            return Check("graph breaks", "-", f"{text} (not compiled)", "none", {"breaks": found})
        return Check("graph breaks", _verdict(not found), text, "none", {"breaks": found})

    def loader(self) -> Check:
        """Reading against training."""
        taken = self.trial.timed_steps(3)
        step = min(each.seconds for each in taken[1:])
        reading = statistics.median(self._reading_seconds(number) for number in range(4, 8))
        hidden = self.source.overlaps
        how = "read during a step" if hidden else "computed by the teacher before each step"
        return Check(
            "loader",
            _verdict(reading < step) if hidden else "-",
            f"{1000 * reading:.1f} ms to read the data of a step of {1000 * step:.1f} ms ({how})",
            "less than a step" if hidden else "",
            {"loader_seconds": reading, "step_seconds": step, "first_step_seconds": taken[0].seconds},
        )

    def _reading_seconds(self, step: int) -> float:
        indices = self.trainer.stepper.sequences(step * self.config.batch_size)
        started = time.perf_counter()
        for each in rearrange(indices, "(a m) -> a m", m=self.trainer.stepper.micro):
            self.source.read(each)
        return time.perf_counter() - started

    def resume(self) -> Check:
        """A step, and the same step after a save and a resume."""
        trainer, name = self.trainer, tiers.rolling_name(self.trainer.state.progress.step)
        trainer.checkpoints.save(name)
        trainer.saver.wait()
        first = self._state_after_a_step()
        saved = load_saved(trainer.store.path(name), trainer.state.like)
        trainer.state.load(saved.tensors, saved.state)
        second = self._state_after_a_step()
        differ = [each for each in first if not torch.equal(first[each], second[each])]
        exact = self.student.device.type == "cpu" or self.config.precision.deterministic
        where = f"{len(differ)} of {len(first)} tensors differ ({_first(differ)})"
        return Check(
            "resume",
            _verdict(not differ) if exact else "-",
            where if differ else f"{len(first)} tensors equal to the last bit",
            "equal bits" if exact else "nothing: the device repeats its bits only with --deterministic",
            {"tensors": len(first), "differ": differ},
        )

    def _state_after_a_step(self) -> dict[str, torch.Tensor]:
        self.trial.timed_steps(1)
        tensors = self.trainer.state.own_tensors()
        return {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}

    def disk(self) -> Check:
        """Disk space for the checkpoints."""
        size, kept, free = self.trial.state_bytes, self.trial.checkpoints_kept, self.trial.disk_free
        needed = f"{kept} checkpoints of {size / 2**20:,.1f} MiB are {size * kept / 2**20:,.0f} MiB"
        return Check(
            "disk",
            _verdict(size * kept < free),
            f"{needed}; {free / 2**20:,.0f} are free",
            "enough for all kept checkpoints",
            {"checkpoint_bytes": size, "kept": kept, "free_bytes": free},
        )

    def overfitting(self) -> Check:
        """Sixteen sequences memorized."""
        config, micro, student, source = self.config, self.trainer.stepper.micro, self.student, self.source
        count = min(SEQUENCES, len(source))
        mixture, seed = source.facts.mixture, config.seed
        numbers = order.batch(seed, 0, count, len(source)) if mixture is None else mixture.batch(seed, 0, count)
        batches = [source.read(numbers[at : at + micro]) for at in range(0, count, micro)]
        floor = entropy_floor(batches, student.document_mask)
        least = 1e-3 if self.recipe.student.init == "scratch" else 0.0
        own = replace(config.optimizer, lr=max(config.optimizer.peak_lr, least))
        self.trainer.state.optimizer.state.clear()
        optimizer = make_optimizer(student, own, config.objective.temperature_lr)
        losses: list[float] = []
        for loss in overfit(student, optimizer, batches, own):
            losses.append(loss)
            if len(losses) > STEPS or loss - floor < 0.05 * (losses[0] - floor):
                break
        share = (losses[0] - min(losses)) / max(losses[0] - floor, 1e-9)
        return Check(
            "overfitting",
            _verdict(share > 0.5),
            f"{count} sequences from {losses[0]:.3f} to {min(losses):.3f} nats in {len(losses) - 1} steps at "
            f"lr {own.peak_lr:g}; their floor is {floor:.3f}",
            "over half of the way to the floor",
            {"first": losses[0], "lowest": min(losses), "floor": floor, "steps": len(losses) - 1, "share": share},
        )

    def _batch(self, most: int | None = None, taught: bool = False) -> Batch:
        """The first micro-batch of the run, or the first `most` sequences of it.

        taught: of a mixture, sequences of the first member with a teacher that the run draws.
        """
        micro, facts, indices = self.trainer.stepper.micro, self.source.facts, self.trainer.stepper.sequences(0)
        if taught and facts.mixture is not None:
            kinds = [each.targets for each in facts.members.values()]
            member = next((number for number, kind in enumerate(kinds) if kind != "none"), 0)
            indices = facts.mixture.firsts[member] + np.arange(min(micro, facts.mixture.sizes[member]))
        return self.source.read(indices[: min(micro, most or micro)])


CHECKS: tuple[Callable[[Checks], Check], ...] = (
    Checks.initial_loss,
    Checks.gradients,
    Checks.correlation,
    Checks.dead_units,
    Checks.distillation,
    Checks.graph_breaks,
    Checks.loader,
    Checks.resume,
    Checks.disk,
    Checks.overfitting,
)


def _verdict(sound: bool) -> str:
    return "ok" if sound else "look"


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
