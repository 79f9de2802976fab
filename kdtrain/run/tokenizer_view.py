"""The data of a run with `--cross-tokenizer`: the view of the text in the student's tokens, in the run's folder."""

from typing import Any

from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import LocalCache, open_cache
from kdtrain.config.commands import DistillConfig, EvaluateConfig, partners
from kdtrain.config.values import refuse
from kdtrain.errors import UsageError, log
from kdtrain.files import set_aside
from kdtrain.models.loading import vocabulary
from kdtrain.models.tokenizer import digest_of, load_tokenizer, tokenizer_digest
from kdtrain.monitor.progress import bar
from kdtrain.ranks import on_main, raise_on_all_ranks
from kdtrain.run.build_cache import TextData
from kdtrain.tokenizers.view import View
from kdtrain.tokenizers.view_builder import OtherViewError, build_view
from kdtrain.tokenizers.view_format import TEXT, VIEWS
from kdtrain.training.sources.aligned import AlignedSource, aligned_facts
from kdtrain.training.sources.plan import DataPlan, PlanRequest, register_plan
from kdtrain.training.sources.source import Facts, Source

_TOKENS = CodecSpec(kind="tokens", vocab_size=2)
"""Of an online teacher's own tokens."""


class AlignedData(TextData):
    """A cache, or an online teacher's own text, in the tokens of a student with another tokenizer."""

    def __init__(self, request: PlanRequest, facts: Facts) -> None:
        super().__init__(request)
        self.facts = facts
        self.view = self.config.out / (TEXT if self.config.cache else VIEWS)

    def prepare(self, resumed: bool) -> tuple[dict[str, Source], Source]:
        """Prepare as `DataPlan` does. UsageError, RunError: as `build_view`; cells disagree with the text too often."""
        text = None if self.teacher is None else super().prepare(resumed)
        on_main(lambda: self._align(resumed))
        with raise_on_all_ranks():
            view = View(self.view, self._cache())
            sources: dict[str, Source] = {split: AlignedSource(view, split) for split in ("train", "validation")}
        return sources, sources["validation"] if text is None else text[1]

    def _align(self, resumed: bool) -> None:
        """Make the view; with an online teacher its text is packed."""
        tokenizer = load_tokenizer(self.student)
        with bar("align", None) as shown:
            options: dict[str, Any] = {"events": partners(self.config.special_tokens), "progress": shown.update}
            try:
                view = build_view(self.view, self._cache(), tokenizer, **options)
            except OtherViewError:
                if resumed:
                    raise
                set_aside(self.config.out, self.view.name, "left")  # of an earlier attempt with other options
                view = build_view(self.view, self._cache(), tokenizer, **options)
        for line in view.lines():
            log.info("%s", line)

    def _cache(self) -> LocalCache:
        """Open the cache, or with an online teacher its own tokens of the text."""
        return open_cache(self.config.cache[0]) if self.config.cache else LocalCache(self.config.out / TEXT)


@register_plan("aligned")
def aligned_data(request: PlanRequest) -> DataPlan:
    """Make the plan of a run across tokenizers; with one tokenizer, the plan of the other options.

    UsageError: the cache has no teacher's numbers, or `differ`.
    """
    config, student, teacher = request.config, request.student, request.teacher
    data = config.data
    with raise_on_all_ranks():
        if teacher is not None:
            name = str(data.data)
            codec = _TOKENS
            theirs: str | None = tokenizer_digest(teacher.tokenizer)
            seq_len = data.seq_len
            document_mask = data.document_mask is True
        else:
            cache = open_cache(config.cache[0])
            name, stated = cache.name, cache.manifest.settings
            codec, theirs = stated.codec, stated.tokenizer_digest
            seq_len, document_mask = stated.seq_len, stated.document_mask
            if not codec.taught:
                raise UsageError(f"{name} holds no teacher's numbers; --cross-tokenizer needs them")
        if differ(config, digest_of(student), theirs):
            known = student.init == "pretrained" or "vocab_size" in (student.config or ())
            size = entries(student.name, load_tokenizer(student), vocabulary(student) if known else None)
            facts = aligned_facts(name, seq_len=seq_len, document_mask=document_mask, size=size, codec=codec)
            return AlignedData(request, facts)
    return request.next()


def entries(name: str, tokenizer: Any, rows: int | None) -> int:
    """Return the largest id of a student's tokenizer + 1. UsageError: its model has fewer `rows`; None: no limit."""
    size = 1 + int(max(tokenizer.get_vocab().values()))  # ids may have gaps
    if rows is not None and size > rows:
        raise UsageError(f"{name} has a tokenizer of {size} entries, and its model {rows}; name the model's own")
    return size


def differ(config: DistillConfig | EvaluateConfig, own: str | None, theirs: str | None) -> bool:
    """Return whether student and teacher have different tokenizers, by digest; a student without one has the teacher's.

    UsageError: they do not, and special tokens are matched.
    """
    if own not in (None, theirs):
        return True
    why = "teacher and student have the same tokenizer" if own else "the student has no tokenizer but the teacher's"
    refuse(bool(config.special_tokens), f"--special-tokens has no effect: {why}; leave it out")
    log.info("--cross-tokenizer: %s", why)
    return False
