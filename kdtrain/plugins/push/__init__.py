"""`kdtrain push`: publish a cache, or a student, on the hub (docs/models.md)."""

from dataclasses import dataclass
from pathlib import Path

from kdtrain.cli import register_module
from kdtrain.config.values import Printed, flag, option, refuse

LICENSES = {"text": "of the text", "teacher": "of the teacher", "outputs": "of the teacher's outputs, this data set"}
"""What a licence is of."""


def _check_repository(to: str) -> None:
    from kdtrain.net.hub import Repository  # with an HTTP client, for which no help waits

    Repository(to)


@dataclass(frozen=True, kw_only=True)
class PushConfig(Printed):
    """Publish a cache as a data set on the hub, or a student as a model.

    The same command resumes an interrupted one: files that are there already are not sent again.
    """

    path: Path = option(positional=True)
    """The folder of a finished cache, of a run (its student is published), or of an export."""
    to: str = option(positional=True, check=_check_repository)
    """Where to: hf:ORG/NAME, which is made if it is not there."""
    private: bool = False
    """Make the repository private, if it is made; a public one is refused."""
    license_text: str | None = None
    """Of a cache, the licence of the text: a name such as apache-2.0, unknown, or declined."""
    license_teacher: str | None = None
    """Of a cache, the licence of the teacher's weights: a name, unknown, or declined."""
    license_outputs: str | None = None
    """Of a cache, the licence of what the teacher predicts, the data set's: a name, unknown, or declined."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(self.licenses.values()):
            self.refuse_missing()

    @property
    def licenses(self) -> dict[str, str | None]:
        """The licences by `LICENSES`."""
        return {name: getattr(self, f"license_{name}") for name in LICENSES}

    def refuse_missing(self) -> None:
        """Raise UsageError if a licence is missing."""
        missing = [flag(f"license_{name}") for name, given in self.licenses.items() if not given]
        refuse(
            bool(missing),
            f"{', '.join(missing)} missing: readers of the cache must know what they may use it for; give each a "
            "name such as apache-2.0, or unknown, or declined",
        )

    EXAMPLES = (
        "kdtrain push cache/t hf:ORG/NAME --license-text mit --license-teacher apache-2.0 --license-outputs unknown",
        "kdtrain push runs/t hf:ORG/NAME --private",
    )


register_module("push", PushConfig, "kdtrain.plugins.push.command", resumes=True)
