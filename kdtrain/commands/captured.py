"""`kdtrain distill --teacher-server`: what the server says is cached in the run's folder, and the run reads that cache.

So there is one way to train from a server's answers, and they can be resumed, reused and audited as any cache. What it
gives up: the student begins when the capture is whole.
"""

from dataclasses import fields, replace

import torch

from kdtrain.commands.cache_teacher import build
from kdtrain.commands.run_folder import check_out
from kdtrain.config import CacheTeacherConfig, CodecConfig, DataConfig, DistillConfig, RunServerConfig, ServerConfig
from kdtrain.ranks import on_main


def captured(config: DistillConfig, device: torch.device) -> DistillConfig:
    """The run that reads what a server says of the text, from a cache in its own folder, which is made first.

    A finished one asks nothing of the server. Every rank calls it, inside `same_ranks`.

    UsageError, RunError: as `cache_teacher`.
    """
    assert config.teacher is not None
    on_main(lambda: check_out(config.out))
    folder, asked, samples = config.out / "data", config.server, config.server.server_num_samples
    capture = CacheTeacherConfig(
        teacher=config.teacher,
        out=folder,
        data=config.data,
        codec=CodecConfig(num_samples=samples) if samples else CodecConfig(top_k=asked.server_top_k),
        server=ServerConfig(**{each.name: getattr(asked, each.name) for each in fields(ServerConfig)}),
        device=config.device,
    )
    build(capture, device)
    on_main(lambda: None)  # rank 0 writes the manifest after the others have finished
    data = DataConfig(num_workers=config.data.num_workers)
    return replace(config, cache=(str(folder),), teacher=None, data=data, server=RunServerConfig())
