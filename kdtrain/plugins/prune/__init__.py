"""`kdtrain prune`: a smaller model of what matters most in a teacher (docs/prune.md)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kdtrain.cli import register_module
from kdtrain.config.commands import check_device
from kdtrain.config.values import Printed, option


@dataclass(frozen=True, kw_only=True)
class PruneConfig(Printed):
    """Cut a teacher to a student's shape: what matters least on a cache's text goes, and distillation mends the rest.

    The same command resumes an interrupted one.
    """

    teacher: str = option(positional=True, reads="teacher spec")
    """The model to cut: one that ships (stdlib-5m), a TOML, a model folder, or a hub id."""
    like: str = option(once=True, reads="spec")
    """The shape: a student's TOML with a [config], or a model folder; it may have less of what the teacher has."""
    cache: str = option(once=True, reads="cache")
    """A finished cache, also hf: or https://, of any teacher with this tokenizer: its text alone is read."""
    out: Path
    """The model folder to write; distill --student takes it."""
    scores: Path | None = None
    """The file of importance scores, which another shape reuses; by default scores-... beside --out."""
    num_sequences: int = option(1024, least=1)
    """Sequences of the cache's train split on which importance is scored; all if it has fewer."""
    allow_high_pruning_ratio: bool = False
    """Remove more than half of the parameters, from which distillation recovers poorly; better prune in two steps."""
    overwrite: bool = False
    """Replace a folder that is already there."""
    batch_size: int = option(16, least=1)
    """Sequences in one forward."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the forwards; auto is bf16 where the device has it."""
    device: str = option("auto", check=check_device)
    """auto, cpu, cuda or cuda:N."""

    EXAMPLES = ("kdtrain prune stdlib-5m --like students/stdlib-3m-h64.toml --cache cache/t --out models/pruned-3m",)


register_module("prune", PruneConfig, "kdtrain.plugins.prune.command", models=True, resumes=True, alone=True)
