"""Distillation on the student's own text, in rounds (docs/on-policy.md): it writes, its teacher scores, it learns.

A round is a cache of format version 5. The parts that need torch are imported by the runs that use them.
"""

from dataclasses import dataclass
from typing import Any

from kdtrain.config import CacheTeacherConfig
from kdtrain.config.registered import register_section
from kdtrain.config.values import Options, option, refuse


@dataclass(frozen=True, kw_only=True)
class WriterConfig(Options):
    """Who writes the text of --generate, where the teacher does not."""

    by: str | None = option(None, once=True, reads="student spec", shown="STUDENT", brief=True)
    """With --generate, let this student write, and the teacher score it; a run, an export, a hub id (docs/on-policy.md)."""

    @property
    def writes(self) -> bool:
        """Whether a student writes."""
        return self.by is not None

    def check(self, config: CacheTeacherConfig) -> None:
        """UsageError: nothing is written."""
        refuse(self.writes and not config.text.generate, "--by has no effect without --generate; add it")

    def teacher(self, config: CacheTeacherConfig, teacher: Any, device: Any) -> Any:
        """The teacher of a capture, with the student as its writer. UsageError: they do not fit together."""
        from kdtrain.plugins.rounds.writing import written_by

        assert self.by is not None
        return written_by(self.by, teacher, device, config.data.seq_len, config.batch_size)


register_section("rounds", {"cache-teacher": WriterConfig})
