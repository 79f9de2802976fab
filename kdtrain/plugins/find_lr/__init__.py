"""`kdtrain find-lr`: the learning rate of a run, by short real ones (docs/learning-rate.md)."""

from dataclasses import dataclass

from kdtrain.cli import register_module
from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import option, refuse


@dataclass(frozen=True, kw_only=True)
class FindLrConfig(DistillConfig):
    """Find the learning rate of a run by short real ones.

    It suggests one with its uncertainty. It takes the options of `distill`; --lr is the first guess. The same
    command resumes an interrupted one.
    """

    rung_steps: int | None = option(None, least=2, brief=True)
    """Steps of the first rung; by default a twentieth of the run, 20 to 200, or a seventeenth of a short one. The best
    go on to three times."""

    EXAMPLES = ("kdtrain find-lr --cache cache/t --student stdlib-1m --out runs/lr --steps 2500",)

    def __post_init__(self) -> None:
        super().__post_init__()
        start = self.checkpoint
        refuse(self.dry_run or self.sanity, "--dry-run and --sanity are for distill; leave them out")
        refuse(
            self.remote is not None,
            "find-lr does not use a server; make a cache with cache-teacher, and give --cache",
        )
        refuse(
            start.resume != "auto" or start.overwrite,
            "find-lr resumes its own short runs; leave --resume and --overwrite out, or name another --out",
        )

    def first_steps(self, whole: int) -> int:
        """Return the steps of the first rung, for a run of `whole` steps.

        All rungs, at most 26 first ones, cost no more than 1.6 runs.
        """
        return self.rung_steps or min(max(whole // 20, min(20, whole // 17), 2), 200)


register_module("find-lr", FindLrConfig, "kdtrain.plugins.find_lr.command", models=True, resumes=True, alone=True)
