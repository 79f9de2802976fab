"""`kdtrain audit`: a cache's teacher scores some of its rows again (docs/audit.md)."""

from dataclasses import dataclass

from kdtrain.cli import register_module
from kdtrain.config.commands import check_device
from kdtrain.config.values import Printed, option


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Printed):
    """Score rows of a cache again by its teacher, and list what differs, with exit code 1."""

    cache: str = option(positional=True, reads="cache")
    """A finished cache: a folder, hf:datasets/ORG/NAME or https://..."""
    teacher: str = option(reads="teacher spec")
    """The teacher of the cache: one that ships (stdlib-5m), a TOML, a model folder, or a hub id."""
    rows: int = option(200, least=2)
    """Sequences to score again, drawn at random; with 20 most faults are found."""
    seed: int = option(0, least=0, most=2**32 - 1)
    """Which sequences: another seed takes others."""
    device: str = option("auto", check=check_device)
    """Where the teacher runs: auto, cpu, cuda or cuda:N."""

    EXAMPLES = ("kdtrain audit cache/t --teacher stdlib-5m",)


register_module("audit", AuditConfig, "kdtrain.plugins.audit.command", models=True)
