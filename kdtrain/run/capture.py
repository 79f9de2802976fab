"""Runs a teacher once over the data of a cache: what `cache-teacher` does, and a run whose teacher runs elsewhere."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from kdtrain.cache.format.manifest import read_sidecar, weights_line
from kdtrain.cache.format.names import DICTIONARY, MANIFEST
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import LocalCache
from kdtrain.cache.tools.facts import contents
from kdtrain.cache.tools.unfinished import progress
from kdtrain.cache.write.folder import claim_folder
from kdtrain.cache.write.writer import CacheBuilder, not_empty
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig
from kdtrain.data.corpus import documents_of, has_prompts
from kdtrain.data.formats import Document
from kdtrain.data.packing import pack, split_text
from kdtrain.errors import UsageError, log
from kdtrain.files import refuse_no_folder
from kdtrain.models.hub import has_weights
from kdtrain.models.loading import check_student
from kdtrain.models.spec import ModelSpec, with_weights
from kdtrain.objective.divergence import refuse
from kdtrain.parallel.footprint import ModelFootprint
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.memory_plan import shards_teacher
from kdtrain.precision.modes import MODES, pick_mode
from kdtrain.ranks import free_everywhere, is_main, on_main, peak_memory_mb, raise_on_all_ranks, world_size
from kdtrain.run.build_cache import (
    begun,
    begun_with,
    build_cache,
    decided,
    known_text,
    pin_text,
    refined_cache,
    refuse_no_rows,
    refuse_other_teacher,
    validation_rows,
)
from kdtrain.run.folder import check_out, existing_parent, restarted, trial_folder
from kdtrain.teaching.teacher import MEASURED, Teacher
from kdtrain.tokenizers.view_format import TEXT
from kdtrain.training.sources.plan import Ordered

_SECONDS = 20.0
"""How long --dry-run tokenizes text, and then reads on, before it estimates its sequences."""

RATES = {
    "NVIDIA H200": ((1_235_746_816, 96_847), (7_504_658_432, 28_605)),
    "two CPU cores": ((5_267_456, 9_322), (101_253_120, 800)),
}
"""Measured captures by device: the teacher's weights in matrices, and tokens per second."""
BYTES = {2_048: (27.2, 88.4, 31.3, 69.5), 32_000: (28.4, 94.7, 40.5, 74.7), 151_936: (30.0, 103.2, 44.5, 82.3)}
"""Measured bytes per token by vocabulary: of 12 and 50 likely entries, of 50 samples, of 8 entries with 24 samples."""
DENSE = 1.39
"""Measured bytes of an entry of a whole distribution."""


def capture(config: CacheTeacherConfig, device: torch.device, ordered: Ordered | None = None) -> dict[str, Any] | None:
    """Build the cache, inside `same_ranks`; rank 0 returns last. UsageError, RunError: as `cache_teacher`.

    ordered: of a run that reads it meanwhile. Returns, with --dry-run, what the cache will hold and take.
    """
    on_main(lambda: refuse_no_folder(config.out))
    tensor = config.parallel.teacher_tensor_parallel
    layout = RankLayout.of_ranks(device, tensor, option="--teacher-tensor-parallel")
    with raise_on_all_ranks():
        refined = None if config.refine is None else refined_cache(config.refine)
        seq_len = config.data.seq_len if refined is None else refined.manifest.settings.seq_len
        spec = ModelSpec.read(config.teacher, "teachers")
        if (remote := config.remote) is not None:
            spec = replace(spec, kind=remote.teacher_kind, weights=None)
        spec = with_weights(spec, config.teacher_weights, "--teacher-weights", config.parallel.teacher_parallel)
        mode = pick_mode(config.precision, device)
        earlier = (begun_with(config.out) if refined is None else refined.manifest.settings.teacher) or {}
        if config.precision == "auto" and (before := earlier.get("precision")) in MODES and before != mode:
            log.info("the teacher runs in %s, as this cache was begun; on %s auto is %s", before, device, mode)
            mode = pick_mode(before, device)
        teacher = Teacher.open(spec, device, mode)
        if tensor > 1:
            teacher.cut(layout, alike=1)
        if remote is not None:
            remote.connect(teacher, config.codec)
        _ = teacher.tokenizer  # one that is missing is found before the weights are loaded
        if refined is not None:
            refuse_other_teacher(refined, teacher, loaded=False)
    text = None
    pinned = dict[str, str]()
    if config.data.data is not None and ordered is None:
        text = None if config.dry_run else on_main(lambda: known_text(config.out, config.data))
        pinned = on_main(lambda: pin_text(config.out, config.data, teacher.tokenizer))
        if refined is None:
            there = (config.text.generate and has_prompts(config.data)) or (config.out / MANIFEST).exists()
            data = config.data
            on_main(lambda: None if there else refuse_no_rows(config.out, data, teacher.tokenizer, data.limits))
    if config.text.generate:
        pinned.pop("packing", None)  # a prompt has a row of its own
        config = replace(config, data=replace(config.data, document_mask=False))
    teacher.tokenizer.pinned = pinned  # type: ignore[attr-defined]
    free = free_everywhere(device, config.parallel.device_memory)
    absent = f"the weights of {teacher.name} are not on this machine"
    why = absent if config.dry_run and not on_main(lambda: has_weights(spec)) else ""
    with raise_on_all_ranks():
        model = teacher.footprint(seq_len)
        try:
            sharded = shards_teacher(config, model, free, seq_len)
        except UsageError as error:
            if not config.dry_run or config.parallel.teacher_parallel == "fsdp":
                raise
            why = why or str(error)

    def with_mask(*checks: Callable[[int, bool], None]) -> CacheTeacherConfig:
        return replace(config, data=on_main(lambda: decided(config.data, config.out, *checks)))

    if why:
        return _plan(with_mask(), teacher, refined, model, why)
    with raise_on_all_ranks():
        teacher.load(sharded)
        if config.writer is not None:
            from kdtrain.run.saved_student import open_student

            teacher = config.writer.teacher(config, teacher, partial(open_student, device=device))
    config = with_mask(teacher.check)
    document_mask = bool(config.data.document_mask) if refined is None else refined.manifest.settings.document_mask
    with raise_on_all_ranks():
        teacher.check(seq_len, document_mask)
        measured = spec.weights is not None and teacher.texts is None and is_main()
        measured = measured and not (config.dry_run or (config.out / MANIFEST).exists())
        rows = validation_rows(config, teacher, refined, MEASURED) if measured else ()
        teacher.pack(rows, document_mask=document_mask)
    # the shapes of decoding change with every step, and a compiled layer with each of them
    teacher.prepare(mesh=layout.mesh if sharded else None, compile=config.compile and not config.text.generate)
    if config.dry_run:
        return _plan(config, teacher, refined, model, "")
    over = f" over {source}" if (source := config.data.data or config.refine) else ""
    many = f" in {world_size()} ranks" if world_size() > 1 else ""
    log.info("caching %s%s into %s%s", teacher, over, config.out, many)
    if teacher.cost is not None:
        log.info("%s", weights_line(teacher.cost))
    build_cache(config, teacher, refined, ordered, text)
    return None


def _plan(
    config: CacheTeacherConfig, teacher: Teacher, refined: LocalCache | None, model: ModelFootprint | None, why: str
) -> dict[str, Any]:
    """Plan what the cache will hold, its disk and its hours; every rank must call it.

    A loaded teacher builds two shards of a batch in a hidden folder beside `--out`, which is removed; later batches are
    taken to need the time of the second. why: it is not loaded, and the tables above give the numbers.
    """
    settings, rows = begun(config, teacher, refined, {}, here=not why)
    sequences, counted = on_main(lambda: _count(config, teacher, refined))
    batch = config.batch_size
    length = settings.seq_len
    tokens = sum(sequences.values()) * settings.seq_len
    begins = f"at {found['progress']}" if (found := progress(config.out)) else "from the beginning"
    plan: dict[str, Any] = {
        "cache": str(config.out),
        "begins": "it is finished" if (config.out / MANIFEST).exists() else begins,
        "teacher": str(teacher),
        "kept": contents(settings),
        "sequences": sequences,
        "tokens": {split: count * length for split, count in sequences.items()},
        "counted": counted,
    }
    per_token = computed_bytes(settings.codec)
    per_shard = 0.0
    if why:  # text that is written costs more than text that is read
        speeds = {} if model is None or config.text.generate else computed_rates(model)
        plan["numbers below"] = f"computed from those of other teachers and caches, not measured: {why}"
        plan["tokens_per_second"] = {name: round(speed, 1) for name, speed in speeds.items()}
        plan["estimated_hours"] = {name: round(tokens / speed / 3600, 4) for name, speed in speeds.items()}
    else:
        world = world_size()
        clock = list[float]()
        tried = replace(settings, sequences_per_shard=batch, sequences={})
        first_rows = cycle([*islice(not_empty("train", rows["train"], settings), 2 * batch * world)])
        how: dict[str, Any] = {"batch_size": batch, "progress": lambda *_: clock.append(time.perf_counter())}
        with trial_folder(config.out, lambda out: claim_folder(out, settings)) as folder:
            with closing(CacheBuilder(folder, tried, teacher=teacher.answers(tried), all_ranks=True, **how)) as builder:
                builder.build("train", islice(first_rows, 2 * batch * world))
            records = [read_sidecar(folder, f"train-{number:05d}") for number in (0, world)]
        stored = sum(size for each in records for name, size in each["stored"].items() if name != DICTIONARY)
        per_token, per_shard = stored / (2 * batch * length), (sum(each["bytes"] for each in records) - stored) / 2
        first, second = clock[1] - clock[0], clock[3] - clock[2]
        speed = batch * length * world / second
        plan["numbers below"] = f"measured on two batches of {batch}, time on the second"
        plan["seconds"] = {"first batch": round(first, 3), "second batch": round(second, 3)}
        plan["tokens_per_second"] = round(speed, 1)
        plan["estimated_hours"] = round((first - second + tokens / speed) / 3600, 4)
        plan["peak_memory_mb"] = round(peak_memory_mb(teacher.device), 1)
    shards = sum(math.ceil(count / settings.sequences_per_shard) for count in sequences.values())
    disk = tokens * per_token + shards * per_shard
    free = shutil.disk_usage(existing_parent(config.out)).free
    plan |= {"bytes per token": round(disk / tokens, 2), "disk (MiB)": round(disk / 2**20, 1)}
    return plan | {"disk free (MiB)": round(free / 2**20, 1)}


def _count(config: CacheTeacherConfig, teacher: Teacher, refined: LocalCache | None) -> tuple[dict[str, int], str]:
    """Count the sequences of each split, and name how: a long text is tokenized in part, and its rest read."""
    if refined is not None:
        return {split: stated["sequences"] for split, stated in refined.manifest.splits.items()}, "exactly"
    data = config.data
    found = dict[str, int]()
    how = "exactly"
    read = 0
    prompts = config.text.generate and has_prompts(data)

    def pieces(source: str) -> Iterator[Document]:
        nonlocal read
        for each in documents_of(data, source, prompts):
            plain = each.text is not None and not each.prompt
            for part in [replace(each, text=text) for text in split_text(str(each.text))] if plain else [each]:
                read += len(part.text or json.dumps(part.messages))
                yield part

    for split, source in data.sources(data.limits).items():
        limit = data.limits[split]
        text = pieces(source)
        until = time.monotonic() + _SECONDS
        whole = "packing" in teacher.tokenizer.pinned  # type: ignore[attr-defined]
        packed = pack(
            text, teacher.tokenizer, data.seq_len, parse_special_tokens=data.parse_special_tokens, whole=whole
        )
        found[split] = read = seen = 0
        for _ in islice(text if prompts else packed, limit):
            if read > seen > 0 and time.monotonic() > until:  # the rows so far are those of the characters seen
                whole = all(time.monotonic() < until + _SECONDS for _ in text)
                found[split] = min(about := found[split] * read // seen, limit or about)
                how = "at least" if not whole or how == "at least" else "about"
                break
            found[split] = found[split] + 1
            seen = read
    return found, "about" if prompts and how == "exactly" else how  # a prompt may leave no room


def computed_rates(model: ModelFootprint) -> dict[str, float]:
    """Return tokens per second by device, from measured teachers.

    A token costs a product with each weight but embeddings'.
    """
    weights = model.active - (0 if model.tied else model.vocabulary * model.width)
    found = dict[str, float]()
    for device, measured in RATES.items():
        sizes, products = zip(*((math.log(size), size * rate) for size, rate in measured), strict=True)
        found[device] = float(np.interp(math.log(weights), sizes, products)) / weights
    return found


def computed_bytes(codec: CodecSpec) -> float:
    """Return bytes per token, from measured codecs; with samples alone they grow with the root of their number."""
    if not codec.coded:
        return DENSE * codec.vocab_size
    few, many, drawn, both = BYTES[min(BYTES, key=lambda size: abs(math.log(size / codec.vocab_size)))]
    if not codec.top_k:
        return drawn * math.sqrt(codec.num_samples / 50)
    entry = (many - few) / 38
    return few + entry * (codec.top_k - 12) + (both - few + 4 * entry) / 24 * codec.num_samples


def capturing(
    run: DistillConfig, student: ModelSpec, device: torch.device, config: CacheTeacherConfig
) -> Callable[[Ordered], None]:
    """Return how a run has a teacher's answers cached in its own folder, while it reads them (`PlanRequest.capturing`).

    UsageError: tensor ranks, with which it was not tried; another run in the folder; a divergence without targets.
    """
    if run.parallel.tensor_parallel > 1:
        raise UsageError("--tensor-parallel cannot be used with a cache that is made while training; make it first")
    on_main(lambda: _refuse_moving(run))
    objective = run.objective
    codec = config.codec
    if objective.distils:  # several ranks capture all before they train
        refuse(objective.divergence, objective.tail, top_k=codec.top_k, num_samples=codec.samples)
    text = on_main(lambda: decided(run.data, run.out / TEXT, partial(check_student, student)))

    def build(ordered: Ordered) -> None:
        capture(replace(config, data=text), device, ordered)
        on_main(lambda: None)  # rank 0 writes the manifest after the others have finished

    return build


def _refuse_moving(config: DistillConfig) -> None:
    """Raise a UsageError if `config.out` holds something else, or a run that would move with the server's answers."""
    if check_out(config.out) and config.checkpoint.resume == "never" and not restarted(config):
        raise UsageError(
            f"--out {config.out} holds a run, and --resume never would move aside the server's answers with it; name "
            "another folder"
        )
