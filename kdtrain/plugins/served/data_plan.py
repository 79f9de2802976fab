"""The plan of a server's answers: they are cached in the run's own folder while the student trains (`live_capture`).

There is one way to train from a server's answers, and they can be resumed, reused and audited as any cache. A finished
one requests nothing.
"""

from collections.abc import Mapping
from typing import Any

from kdtrain.plugins.served.live_capture import Capture, LiveCache
from kdtrain.training.sources.plan import CachedData, PlanRequest

_STEPS, _MOST = 16, 256
"""Steps of a shard, and sequences at most: the student's first step waits for one, and the server rests between two."""


class ServedData(CachedData):
    """The plan of a run on the answers of the teacher's servers; a trial requests only what it reads."""

    apart = True

    def __init__(self, request: PlanRequest) -> None:
        config = request.config
        per_shard = (4 if request.trial else _STEPS) * min(config.batch_size, _MOST // _STEPS)
        capture = config.remote.capture(config, out=config.out / "served", sequences_per_shard=per_shard)
        how = Capture(
            seed=config.seed,
            order=request.first_epoch,
            planned=lambda sequences: min(sequences, config.total_steps(sequences) * config.batch_size),
            build=request.capturing(capture),
            trial=request.trial,
            whole=not request.alone,
            asked_to_stop=request.stopping,
        )
        self.live = LiveCache(capture.out, how)
        request.held.callback(self.live.close)
        self.live.open()
        plugins = {name: each for name, each in config.plugins.items() if each is not config.remote}
        data = type(config.data)(num_workers=config.data.num_workers)
        self.options = {"cache": (str(capture.out),), "teacher": None, "data": data, "plugins": plugins}
        super().__init__(config, [self.live])

    def cost(self, validation: int) -> Mapping[str, Any]:
        """Estimate what the run requests, at the rate of the trial's first sequences."""
        rate = self.live.rate
        sequences = self.live.planned + validation
        hours = round(sequences / rate / 3600, 4) if rate else None
        speed = round(rate * self.live.manifest.settings.seq_len, 1)
        found = {"sequences": sequences, "tokens_per_second": speed, "estimated_hours": hours}
        return {"server": {**found, "fingerprint of an earlier capture": "not compared"}}

    def finish(self) -> None:
        """Complete the cache of what was captured."""
        self.live.finish()
