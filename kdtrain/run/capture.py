"""Runs a teacher once over the data of a cache: what `cache-teacher` does, and a run whose teacher runs elsewhere."""

from contextlib import ExitStack
from dataclasses import replace

import torch

from kdtrain.cache.build.live_capture import Capture, LiveCache
from kdtrain.cache.format.manifest import weights_line
from kdtrain.cache.format.names import MANIFEST
from kdtrain.config import CacheTeacherConfig, DataConfig, DistillConfig
from kdtrain.errors import UsageError
from kdtrain.models.spec import read_spec, with_weights
from kdtrain.monitor.progress import log
from kdtrain.objective.divergence import refuse
from kdtrain.parallel.memory_plan import free_everywhere, shards_teacher
from kdtrain.precision.modes import MODES, pick_mode
from kdtrain.ranks import is_main, on_main, raise_on_all_ranks, world_size
from kdtrain.run.build_cache import (
    begun_with,
    build_cache,
    known_text,
    pin_date,
    refined_cache,
    refuse_no_rows,
    refuse_other_teacher,
    validation_rows,
)
from kdtrain.run.data_plan import CachedData
from kdtrain.run.folder import check_out, refuse_no_folder, restarted
from kdtrain.teaching.teacher import MEASURED, open_teacher
from kdtrain.tokenizers.view_format import SERVED
from kdtrain.training.schedule import total_steps
from kdtrain.training.signals import asked_to_stop

_STEPS, _MOST = 16, 256
"""Steps of a shard, and sequences at most: the student's first step waits for one, and the server rests between two."""


def capture(config: CacheTeacherConfig, device: torch.device, live: LiveCache | None = None) -> None:
    """Build the cache, inside `same_ranks`; rank 0 returns last. UsageError, RunError: as `cache_teacher`.

    live: of a run that reads it meanwhile.
    """
    on_main(lambda: refuse_no_folder(config.out))
    with raise_on_all_ranks():
        refined = None if config.refine is None else refined_cache(config.refine)
        seq_len, document_mask = config.data.seq_len, config.data.document_mask
        if refined is not None:
            seq_len, document_mask = refined.manifest.settings.seq_len, refined.manifest.settings.document_mask
        spec = read_spec(config.teacher, "teachers")
        if (remote := config.remote) is not None:
            spec = replace(spec, kind=remote.teacher_kind, weights=None)
        spec = with_weights(spec, config.teacher_weights, "--teacher-weights", config.parallel.teacher_parallel)
        mode = pick_mode(config.precision, device)
        earlier = (begun_with(config.out) if refined is None else refined.manifest.settings.teacher) or {}
        if config.precision == "auto" and (before := earlier.get("precision")) in MODES and before != mode:
            log.info("the teacher runs in %s, as this cache was begun; on %s auto is %s", before, device, mode)
            mode = pick_mode(before, device)
        teacher = open_teacher(spec, device, mode)
        if remote is not None:
            teacher.connect(remote, config.codec)
        _ = teacher.tokenizer  # one that is missing is found before the weights are loaded
        if refined is not None:
            refuse_other_teacher(refined, teacher, loaded=False)
    text = date = None
    if config.data.data is not None and live is None:
        text = on_main(lambda: known_text(config.out, config.data))
        date = on_main(lambda: pin_date(config.out, config.data, teacher.tokenizer))
        if refined is None:
            on_main(lambda: None if (config.out / MANIFEST).exists() else refuse_no_rows(config, teacher))
    teacher.tokenizer.date = date  # type: ignore[attr-defined]
    free = free_everywhere(device, config.parallel.device_memory)
    with raise_on_all_ranks():
        sharded = shards_teacher(config, teacher.footprint(seq_len), free, seq_len)
        teacher.load(sharded)
        teacher.check(seq_len, document_mask)
        measured = spec.weights is not None and is_main() and not (config.out / MANIFEST).exists()
        rows = validation_rows(config, teacher, refined, MEASURED) if measured else ()
        teacher.pack(rows, document_mask=document_mask)
    # the shapes of decoding change with every step, and a compiled layer with each of them
    teacher.prepare(sharded=sharded, compile=config.compile and not config.text.generate)
    over = f" over {source}" if (source := config.data.data or config.refine) else ""
    many = f" in {world_size()} ranks" if world_size() > 1 else ""
    log.info("caching %s%s into %s%s", teacher, over, config.out, many)
    if teacher.cost is not None:
        log.info("%s", weights_line(teacher.cost))
    build_cache(config, teacher, refined, live, text)


def served_data(config: DistillConfig, device: torch.device, held: ExitStack, trial: bool) -> CachedData:
    """Begin to capture what a server answers into a cache in the run's folder; a finished one requests nothing."""
    on_main(lambda: _refuse_moving(config))
    per_shard = (4 if trial else _STEPS) * min(config.batch_size, _MOST // _STEPS)
    capture_config = config.remote.capture(config, out=config.out / SERVED, sequences_per_shard=per_shard)
    objective, codec = config.objective, capture_config.codec
    if objective.distils:  # several ranks capture all before they train
        refuse(objective.divergence, objective.tail, top_k=codec.top_k, num_samples=codec.samples)

    def capture_all(live: LiveCache) -> None:
        capture(capture_config, device, live)
        on_main(lambda: None)  # rank 0 writes the manifest after the others have finished

    how = Capture(
        seed=config.seed,
        planned=lambda sequences: min(sequences, total_steps(config, sequences) * config.batch_size),
        build=capture_all,
        trial=trial,
        whole=world_size() > 1,
        asked_to_stop=asked_to_stop,
    )
    live = LiveCache(capture_config.out, how)
    held.callback(live.close)
    live.open()
    cache, data = (str(capture_config.out),), DataConfig(num_workers=config.data.num_workers)
    plugins = {name: each for name, each in config.plugins.items() if each is not config.remote}
    plan = CachedData(config, [live])
    plan.live, plan.options = live, {"cache": cache, "teacher": None, "data": data, "plugins": plugins}
    return plan


def _refuse_moving(config: DistillConfig) -> None:
    """UsageError: `config.out` holds something else, or a run that would be moved away with the server's answers."""
    if check_out(config.out) and config.checkpoint.resume == "never" and not restarted(config):
        raise UsageError(
            f"--out {config.out} holds a run, and --resume never would move aside the server's answers with it; name "
            "another folder"
        )
