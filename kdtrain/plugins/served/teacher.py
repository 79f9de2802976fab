"""A teacher that an inference server runs: the kind of `--teacher-server`.

The top-k of each position is requested, or samples where it has kdtrain's plugin, a shard ahead of what is
encoded, and makes caches only, which are right at T = 1: no more is known of the distributions.

Who it is stands in the cache's settings, so that every shard is bound to it: the model, what the server tells, and the
fingerprint of its answers (`fingerprint`). A resume takes the earlier record if the answers are still the same, and is
refused otherwise. Before a shard is published the probes are sent again, and with them some sequences of it, so that
nothing is kept of a server that was replaced, or that gave stale numbers, in the meantime.

What it gives up: the shard in work is requested again after such a refusal; at its end the servers wait for the check.
One of several servers that is gone by then is not identified: some sequences that it answered must be what the
others return.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kdtrain.cache.build.answers import Encode, ShardAnswers
from kdtrain.cache.build.shard_writer import ShardRows
from kdtrain.cache.format.codec import CodecSpec, decode
from kdtrain.cache.format.compression import Arrays
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.tools.kept_mass import kept_mass
from kdtrain.cache.tools.self_check import examine
from kdtrain.config import CodecConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.files import json_digest
from kdtrain.models.loading import vocabulary
from kdtrain.models.spec import ModelSpec
from kdtrain.monitor.progress import log
from kdtrain.objective.batch import Batch
from kdtrain.plugins.served.answers import Answers, Span, answers_of, placed, spans_of
from kdtrain.plugins.served.client import Client, Completion, Host, Refused, Unanswered
from kdtrain.plugins.served.fingerprint import TOP, Fingerprint
from kdtrain.plugins.served.options import ServerConfig
from kdtrain.plugins.served.preflight import Preflight
from kdtrain.plugins.served.written import Prompt, Text
from kdtrain.ranks import on_main
from kdtrain.teaching.teacher import Teacher, Writing
from kdtrain.teaching.writing import log_first_texts

AGAIN = 2
"""Sequences of each shard that are requested twice."""
AGAIN_APART = 0.1
"""Nats by which the two answers may differ at least: one comes among others, the other alone."""
_FIRST_PATIENCE = 5.0
"""Seconds for which a server that has never answered is tried."""
_LOOKED, _ENTRIES = 64, 2**24
"""Rows of a shard that are looked at, and entries of them."""


class ServedTeacher(Teacher):
    """An inference server, by the most likely entries (--teacher-server)."""

    def __init__(self, spec: ModelSpec, device: torch.device, mode: str) -> None:
        super().__init__(spec, device, mode)
        if unknown := sorted(spec.options.keys() - {"vocab_size"}):
            raise UsageError(f"{spec.name}: unknown option '{unknown[0]}'; a served teacher has vocab_size only")
        stated = spec.options.get("vocab_size", 2)
        if not isinstance(stated, int) or isinstance(stated, bool) or stated < 2:
            raise UsageError(f"{spec.name}: vocab_size under [options] must be a whole number of at least 2")
        self._document_mask = False
        self._row_length = 0
        self._facts: dict[str, Any] = {}
        self._fingerprint: Fingerprint | None = None
        self._allowed = 0.0
        self._jobs: dict[Any, Any] = {}
        self._span_lists: dict[int, list[Span]] = {}
        self._said: dict[str, list[tuple[Span, Arrays]]] = {}
        self._seen: list[Batch] = []
        self._unseen = 0
        self._server: ServerConfig | None = None

    def connect(self, remote: ServerConfig, codec: CodecConfig) -> None:
        """Take the servers' addresses. UsageError: the API key would be sent unencrypted."""
        server = remote
        self._server, self._codec = server, codec
        self._client = Client(
            server.teacher_server,
            concurrency=server.server_concurrency,
            timeout=server.server_timeout,
            patience=server.server_patience,
        )
        self._client.verify = self._verify

    def __str__(self) -> str:
        return self.name if self._server is None else f"{self.name}, served at {' and '.join(map(str, self._hosts))}"

    @property
    def _hosts(self) -> list[Host]:
        return self._client.hosts

    @property
    def vocab_size(self) -> int:
        """By `vocab_size` of the spec's options, the model's configuration, or that beside its tokenizer."""
        stated = self.spec.options.get("vocab_size")
        if stated is not None:
            assert isinstance(stated, int), "__init__ has refused all others"
            return stated
        source = self.spec.source or self.spec.tokenizer
        try:
            return vocabulary(replace(self.spec, source=source))
        except UsageError as error:
            bare = source and os.path.isdir(source) and not os.path.exists(os.path.join(source, "config.json"))
            why = f"{source} has no config.json" if bare else error
            raise UsageError(
                f"{self.name}: the size of its vocabulary is not known: {why}; add vocab_size = N under [options] of "
                "a TOML with kind = 'served'"
            ) from None

    @property
    def digest(self) -> str:
        """Of the record of who it is."""
        return json_digest(dict(self.identity))

    @property
    def identity(self) -> Mapping[str, Any]:
        """The spec, the model, what the server tells of itself, and the fingerprint of its answers."""
        assert self._fingerprint is not None, "begin looks at the server"
        return {"spec": self.name, **self._facts, "fingerprint": self._fingerprint.to_json()}

    def load(self, sharded: bool = False) -> None:
        """Nothing is loaded here. UsageError: no server was named."""
        if self._server is None:
            raise UsageError(f"{self.name}: give --teacher-server URL, the address of the server that runs it")

    def check(self, seq_len: int, document_mask: bool) -> None:
        """Keep what decides the prompts; the server's own length is looked at by `begin`."""
        self._document_mask, self._row_length = document_mask, seq_len + 1

    def begin(self, earlier: Mapping[str, Any] | None, finished: bool) -> None:
        """Look at the servers, on rank 0 for all, and compare them with those of an earlier attempt.

        A finished cache asks nothing of them.

        UsageError: they do not serve this teacher as it must be, or are another one. RunError: one that has answered
            before does not answer.
        """
        known = None if earlier is None else Fingerprint.from_json(earlier.get("fingerprint"))
        if earlier is not None and (known is None or earlier.get("spec") != self.name):
            raise UsageError(
                f"the cache there was begun with another teacher ({earlier.get('spec')}); choose another --out"
            )
        if not (finished and earlier and known):
            self._look(known is not None)
            if earlier is None or known is None:
                return
            now = self._fingerprint
            assert now is not None
            if known.tokens != now.tokens:
                raise UsageError("the cache there was begun with another tokenizer; choose another --out")
            self._allowed = max(known.allowed(self._tolerance), now.allowed(self._tolerance))
            if (distance := known.distance(now.probes)) > self._allowed:
                raise UsageError(self._another(self._hosts[0], known, now, distance))
            log.info("server: the same teacher as when the cache was begun, by its fingerprint")
        facts = {name: value for name, value in earlier.items() if name not in ("spec", "fingerprint")}
        if not finished and facts | {"unsteady": 0} != self._facts | {"unsteady": 0}:  # that is measured anew
            log.warning("server: it tells %s, and told %s before; its answers are the same", self._facts, facts)
        self._facts, self._fingerprint = facts, known

    def _look(self, again: bool) -> None:
        """again: they have answered before, and are waited for."""
        assert self._server is not None
        if not again:
            self._client.patience = min(self._server.server_patience, _FIRST_PATIENCE)
        given = self._server.server_model
        names = [given] if given else [self.name, *filter(None, [self.spec.source])]
        samples = None
        if number := self._codec.samples:
            samples = answers_of(CodecSpec(kind="sparse", vocab_size=self.vocab_size, num_samples=number), 0)
        self._flight = Preflight(
            client=self._client,
            names=[*names, *(os.path.basename(each) for each in names if not given)],
            named=bool(given),
            entries=self._codec.top_k or TOP,
            length=self._row_length,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            tolerance=self._tolerance,
            again=again,
            samples=samples,
            writing=self.writing,
        )
        found = on_main(lambda: (*self._flight.look(), self._client.salted))
        self._facts, self._fingerprint, self._client.salted = found
        self._allowed = self._fingerprint.allowed(self._tolerance)
        self._flight.model = self._facts["model"]
        self._client.patience = self._server.server_patience
        for host in self._hosts:
            host.scores = True  # on the ranks that sent no request, too

    def write(self, how: Writing) -> None:
        """Have prompts continued from here on, each by a request of its own: no batch decides its bits."""
        self.writing = replace(how, batch_size=None)

    def answers(self, settings: CacheSettings) -> ShardAnswers:
        """What the servers answer for each shard."""
        return _ServedAnswers(self, settings)

    @contextmanager
    def capturing(self, part: ShardRows, codec: CodecSpec, seed: int) -> Iterator[None]:
        """Ask for all sequences of a shard in the block; then ask for some again, and the probes.

        RunError: the servers' answers are not those of this teacher.
        """
        answers = answers_of(codec, seed)
        self._said = {host.url: [] for host in self._hosts}
        rows = max(10, min(_LOOKED, _ENTRIES // (part.loss_mask.shape[1] * codec.columns)))
        if sum(len(each.tokens) for each in self._seen) >= rows:
            self._seen.clear()
        self._unseen = min(len(part), rows)
        if self.writing is not None:
            with self._writing(part, answers, self.writing):
                yield
            return
        spans = {part.first + i: self._spans(part, i) for i in range(len(part))}
        jobs = [((row, span.start), self._asking(answers, span)) for row, each in spans.items() for span in each]
        with self._client.working(jobs) as self._jobs:
            self._answers, self._span_lists = answers, spans
            yield
            requested = [span for each in spans.values() for span in each]
            self._ask_again(answers, [(span, self._jobs[span.row, span.start].result()) for span in requested])
        self._look_again(answers)

    def kept(self, rows: ShardRows, codec: CodecSpec) -> Arrays:
        """What a cache keeps of these rows, once the servers have answered.

        RunError: no server answers, or not with what can be right.
        """
        length, found = rows.tokens.shape[1] - 1, list[Arrays]()
        for row in range(rows.first, rows.first + len(rows)):
            parts = {span.start: self._jobs[row, span.start].result() for span in self._span_lists[row]}
            found.append(placed(self._answers.blank(length), parts))
        arrays = {name: np.stack([each[name] for each in found]) for name in found[0]}
        self._refuse_wrong_rows(rows, arrays, codec)
        return arrays

    def _look_again(self, answers: Answers) -> None:
        """Verify the servers that answered. One that is gone is vouched for by the others."""
        used, gone = [host for host in self._hosts if host.answered], list[Host]()
        for host in used:
            try:
                self._verify(host)
            except Unanswered as problem:
                gone.append(host)
                if len(gone) == len(self._hosts):
                    raise
                log.warning("server: %s; what it said in this shard is compared with what others say", problem)
            host.answered = False
        for host in gone:
            self._ask_again(answers, self._said[host.url])

    @contextmanager
    def _writing(self, part: ShardRows, answers: Answers, how: Writing) -> Iterator[None]:
        """Have all prompts of a shard continued in the block; then score some of the texts, and ask the probes."""
        prompts = [Prompt.of(part, i) for i in range(len(part))]
        with self._client.working([(each.row, self._continuing(answers, each, how)) for each in prompts]) as self._jobs:
            self._answers = answers
            yield
            texts = [self._jobs[each.row].result() for each in prompts]
            self._ask_again(answers, [(each.span, each.arrays) for each in texts])
        self._look_again(answers)

    def written(self, rows: ShardRows, codec: CodecSpec) -> tuple[ShardRows, Arrays]:
        """Rows with what the servers wrote, and what a cache keeps of it, once they have answered.

        RunError: no server answers, or not with what can be right.
        """
        texts = [self._jobs[row].result() for row in range(rows.first, rows.first + len(rows))]
        length, arrays = rows.loss_mask.shape[1], list[Arrays]()
        tokens, mask = rows.tokens.copy(), np.zeros(rows.loss_mask.shape, bool)
        for i, text in enumerate(texts):
            start = len(text.span.tokens) - 1 - text.written
            tokens[i, : len(text.span.tokens)] = text.span.tokens
            mask[i, start : start + text.written] = True
            arrays.append(placed(self._answers.blank(length), {start: text.arrays}))
        rows = replace(rows, tokens=tokens, loss_mask=mask)
        kept = {name: np.stack([each[name] for each in arrays]) for name in arrays[0]}
        self._refuse_wrong_rows(rows, kept, codec)
        return rows, kept

    def _continuing(self, answers: Answers, prompt: Prompt, how: Writing) -> Callable[[], Text]:
        def ask() -> Text:
            body = self._flight.request(prompt.tokens, **prompt.parameters(answers, how))
            try:
                found = self._client.complete(body, lambda answer: prompt.read(answers, how, answer.choices[0]))
            except Refused as refused:
                raise RunError(f"{prompt}: {self._flight.refusal('the server', refused)}") from None
            if found.arrays is not None:
                self._said[self._client.last.url].append((found.span, found.arrays))
                return found
            return replace(found, arrays=_last(self._asking(answers, found.span)(), found.written))

        return ask

    @property
    def _tolerance(self) -> float | None:
        return None if self._server is None else self._server.server_tolerance

    def _spans(self, part: ShardRows, i: int) -> list[Span]:
        segments = part.segments[i] if self._document_mask else None
        return spans_of(part.split, part.first + i, part.tokens[i], part.loss_mask[i].astype(bool), segments)

    def _asking(self, answers: Answers, span: Span) -> Callable[[], Arrays]:
        def read(found: Completion) -> Arrays:
            return answers.read(span, found.choices[0].prompt_logprobs or ())

        def ask() -> Arrays:
            try:
                found = self._client.complete(self._flight.request(span.tokens, **answers.parameters(span)), read)
            except Refused as refused:
                raise RunError(f"{span}: {self._flight.refusal('the server', refused)}") from None
            self._said[self._client.last.url].append((span, found))
            return found

        return ask

    def _ask_again(self, answers: Answers, earlier: list[tuple[Span, Arrays]]) -> None:
        """Compare some answers, each about the last positions of its span, with what the server returns now."""
        allowed = self._tolerance or max(AGAIN_APART, self._allowed)
        step = max(1, len(earlier) // AGAIN)
        for span, before in earlier[::step][:AGAIN]:
            now = _last(self._asking(answers, span)(), len(before["ids"]))
            if (distance := answers.distance(before, now)) > allowed:
                raise RunError(
                    f"{span}: the server gives other numbers than before, {distance:.3f} nats apart where "
                    f"{allowed:.3f} are allowed: it was replaced, or cached prompts give stale ones (start it with "
                    "--no-enable-prefix-caching); nothing of this shard is kept"
                )

    def _refuse_wrong_rows(self, rows: ShardRows, arrays: Arrays, codec: CodecSpec) -> None:
        """RunError: the entries are not about the next token, fit other rows, or are not a teacher's own.

        That takes some ten rows: the first ones of a shard are looked at together, with those of small shards before.
        """
        if self._unseen <= 0:
            return
        tokens_BT, segments_BT = (torch.from_numpy(each.astype(np.int64)) for each in (rows.tokens, rows.segments))
        mask_BT = torch.from_numpy(rows.loss_mask.astype(bool))
        self._seen.append(Batch(tokens_BT, mask_BT, segments_BT, decode(arrays, codec)))
        self._unseen -= len(rows)
        if self._unseen > 0:
            return
        seen = examine(
            self._seen,
            systematic=codec.num_samples > 0,
            samples=False,
            vocab_size=codec.vocab_size,
            drawn_at=1.0 if self.writing is None else self.writing.temperature,
        )
        if seen is not None and seen.findings:
            last = rows.first + len(rows) - 1
            raise RunError(f"{rows.split} up to sequence {last}, as the server answers: {seen.findings[0]}")

    def _verify(self, host: Host) -> None:
        """RunError: a server is not this teacher any more."""
        if (known := self._fingerprint) is None:
            return
        try:
            probes = self._flight.probe(host, known.tokens)
        except Refused as refused:
            raise RunError(f"{self._flight.refusal(host, refused)}; nothing of this shard is kept") from None
        if (distance := known.distance(probes)) > self._allowed:
            now = Fingerprint.take(known.tokens, probes, known.noise)
            raise RunError(f"{self._another(host, known, now, distance)}; nothing of this shard is kept")

    def _another(self, host: Host, known: Fingerprint, now: Fingerprint, distance: float) -> str:
        return (
            f"{host} is another teacher than the one that this cache was begun with: its fingerprint is {now}, that "
            f"of the cache {known}, {distance:.3f} nats apart where {self._allowed:.3f} are allowed; serve the same "
            "model in the same number format, or choose another --out"
        )


class _ServedAnswers(ShardAnswers):
    """What the servers answer, shard by shard."""

    def __init__(self, teacher: ServedTeacher, settings: CacheSettings) -> None:
        self._teacher, self._settings, self._first = teacher, settings, True
        self.writes = teacher.writing is not None
        if settings.codec.top_k:
            self.examine = kept_mass

    def session(self, shard: ShardRows) -> AbstractContextManager[None]:
        """As `ShardAnswers.session`."""
        return self._teacher.capturing(shard, self._settings.codec, self._settings.seed)

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Encode]:
        """As `ShardAnswers.rows`."""
        if not self.writes:
            kept = self._teacher.kept(rows, self._settings.codec)
            return rows, lambda: kept
        rows, kept = self._teacher.written(rows, self._settings.codec)
        if self._first:
            log_first_texts(rows, self._settings)
        self._first = False
        return rows, lambda: kept


def _last(arrays: Arrays, number: int) -> Arrays:
    """What is kept of the last positions."""
    return {name: values[-number:] for name, values in arrays.items()}
