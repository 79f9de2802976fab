"""`kdtrain distill --teacher-server`: what the server says is cached in the run's folder, and the run reads that cache.

So there is one way to train from a server's answers, and they can be resumed, reused and audited as any cache. It is
captured while the student trains (`cache.live`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import torch

from kdtrain.cache.build.live_capture import LiveCache
from kdtrain.config import CacheTeacherConfig, CodecConfig, DataConfig, DistillConfig, RunServerConfig, ServerConfig
from kdtrain.errors import UsageError
from kdtrain.models.spec import SELF
from kdtrain.objective.divergence import refuse
from kdtrain.ranks import on_main, world_size
from kdtrain.run.build_cache import SERVED
from kdtrain.run.capture import capture
from kdtrain.run.folder import check_out, restarted
from kdtrain.training.schedule import total_steps
from kdtrain.training.signals import asked_to_stop

_STEPS, _MOST = 16, 256
"""Steps of a shard, and sequences at most: the student's first step waits for one, and the server rests between two."""


@contextmanager
def captured(
    config: DistillConfig, device: torch.device, trial: bool = False
) -> Iterator[tuple[DistillConfig, LiveCache | None]]:
    """The run that reads what a server says of the text, from a cache in its own folder; a run without one as it is.

    trial: ask for what is read only. Every rank enters it, inside `same_ranks`. A finished cache asks nothing.

    UsageError, RunError: as `cache_teacher`.
    """
    if not config.server.teacher_server:
        yield config, None
        return
    assert config.teacher is not None
    if config.teacher == SELF:
        raise UsageError(f"--teacher {SELF} is the student, which no server runs; leave --teacher-server out")
    on_main(lambda: _refuse_moving(config))
    asked, samples = config.server, config.server.server_num_samples
    objective, top_k = config.objective, 0 if samples else config.server.server_top_k
    if objective.distils:  # several ranks capture all before they train
        refuse(objective.divergence, objective.tail, top_k=top_k, num_samples=samples)
    asked_of = CacheTeacherConfig(
        teacher=config.teacher,
        out=config.out / SERVED,
        data=config.data,
        codec=CodecConfig(top_k=top_k, num_samples=samples or None),
        server=ServerConfig(**{each.name: getattr(asked, each.name) for each in fields(ServerConfig)}),
        sequences_per_shard=(4 if trial else _STEPS) * min(config.batch_size, _MOST // _STEPS),
    )

    def capture_all(live: LiveCache) -> None:
        capture(asked_of, device, live)
        on_main(lambda: None)  # rank 0 writes the manifest after the others have finished

    live = LiveCache(
        asked_of.out,
        seed=config.seed,
        planned=lambda sequences: min(sequences, total_steps(config, sequences) * config.batch_size),
        capture=capture_all,
        trial=trial,
        whole=world_size() > 1,
        asked_to_stop=asked_to_stop,
    )
    data = DataConfig(num_workers=config.data.num_workers)
    try:
        live.open()
        yield replace(config, cache=(str(asked_of.out),), teacher=None, data=data, server=RunServerConfig()), live
    finally:
        live.close()


def _refuse_moving(config: DistillConfig) -> None:
    """UsageError: `config.out` holds something else, or a run that would be moved away with what the server said."""
    if check_out(config.out) and config.checkpoint.resume == "never" and not restarted(config):
        raise UsageError(
            f"--out {config.out} holds a run, and --resume never would move aside what the server said with it; name "
            "another folder"
        )
