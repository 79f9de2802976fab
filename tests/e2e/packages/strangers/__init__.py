"""A stranger's command: what a run logged, through a logger of the same package. It imports nothing heavy."""

import json
from dataclasses import dataclass

from kdtrain import RunRecord
from kdtrain.cli import register_command
from kdtrain.config.values import Printed, option


@dataclass(frozen=True, kw_only=True)
class LossesConfig(Printed):
    """Print the losses of a run."""

    run: str = option(positional=True)
    """The folder of the run."""


@register_command("losses", LossesConfig)
def main(config):
    from pathlib import Path

    record = RunRecord.read(Path(config.run))
    losses = {step["step"]: step["loss"] for step in record.metrics if "loss" in step}
    print(json.dumps(losses) if config.json else losses)
