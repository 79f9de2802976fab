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
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kdtrain.cache.format.codec import decode
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.self_check import Look
from kdtrain.cache.write.answers import ShardAnswers, ShardRows
from kdtrain.config.sections import CodecConfig
from kdtrain.errors import RunError, UsageError, log
from kdtrain.files import json_digest
from kdtrain.models.loading import configuration
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.batch import Batch
from kdtrain.plugins.served.answers import Arrays, Span, answers_of, spans_of
from kdtrain.plugins.served.client import Client, Host, Refused, Unanswered
from kdtrain.plugins.served.engine import ENGINES, Engine
from kdtrain.plugins.served.fingerprint import Fingerprint
from kdtrain.plugins.served.options import ServerConfig
from kdtrain.plugins.served.preflight import Preflight
from kdtrain.ranks import on_main
from kdtrain.teaching.teacher import Writing

AGAIN = 2
"""Sequences of each shard that are requested twice."""
AGAIN_APART = 0.1
"""Nats by which the two answers may differ at least: one comes among others, the other alone."""
_FIRST_PATIENCE = 5.0
"""Seconds for which a server that has never answered is tried."""
_LOOKED, _ENTRIES = 64, 2**24
"""Rows of a shard that are looked at, and entries of them."""


class ServedTeacher(Preflight):
    """A teacher on inference servers, known by its most likely entries (--teacher-server)."""

    def __init__(self, spec: ModelSpec, device: torch.device, mode: str) -> None:
        super().__init__(spec, device, mode)
        if unknown := sorted(spec.options.keys() - {"vocab_size", "engine"}):
            raise UsageError(f"{spec.name}: unknown option '{unknown[0]}'; a served teacher has vocab_size and engine")
        stated = spec.options.get("vocab_size", 2)
        if not isinstance(stated, int) or isinstance(stated, bool) or stated < 2:
            raise UsageError(f"{spec.name}: vocab_size under [options] must be a whole number of at least 2")
        self.engine: Engine = ENGINES.get(spec.options.get("engine", "vllm"))()
        self._identity: Mapping[str, Any] | None = None

    def connect(self, remote: ServerConfig, codec: CodecConfig) -> None:
        """Take the servers' addresses. UsageError: the API key would be sent unencrypted."""
        self.server, self._codec = remote, codec
        self.client = Client(
            remote.teacher_server,
            concurrency=remote.server_concurrency,
            timeout=remote.server_timeout,
            patience=remote.server_patience,
            engine=self.engine,
        )

    def __str__(self) -> str:
        return (
            self.name if self.server is None else f"{self.name}, served at {' and '.join(map(str, self.client.hosts))}"
        )

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, from the spec's options, the model's configuration, or that beside its tokenizer.

        UsageError: it is unknown.
        """
        stated = self.spec.options.get("vocab_size")
        if stated is not None:
            assert isinstance(stated, int), "__init__ has refused all others"
            return stated
        source = self.spec.source or self.spec.tokenizer
        try:
            return int(configuration(replace(self.spec, source=source), None).get_text_config().vocab_size)
        except UsageError as error:
            bare = source and os.path.isdir(source) and not os.path.exists(os.path.join(source, "config.json"))
            why = f"{source} has no config.json" if bare else error
            raise UsageError(
                f"{self.name}: the size of its vocabulary is not known: {why}; add vocab_size = N under [options] of "
                "a TOML with kind = 'served'"
            ) from None

    @property
    def digest(self) -> str:
        """The digest of the teacher's identity."""
        return json_digest(dict(self.identity))

    @property
    def identity(self) -> Mapping[str, Any]:
        """The spec, the model, what the server reports of itself, and the fingerprint of its answers."""
        assert self._identity is not None, "begin looks at the server"
        return self._identity

    def load(self, sharded: bool = False) -> None:
        """Load nothing: the model runs on the server. UsageError: no server was named."""
        if self.server is None:
            raise UsageError(f"{self.name}: give --teacher-server URL, the address of the server that runs it")

    def check(self, seq_len: int, document_mask: bool) -> None:
        """Keep the longest prompt's tokens; `begin` checks the server's own length."""
        self.length = max(self.length, seq_len + 1)

    def begin(self, earlier: Mapping[str, Any] | None, finished: bool) -> None:
        """Check the servers, on rank 0 for all, and compare them with an earlier attempt.

        A finished cache needs no request.

        UsageError: they do not serve this teacher as it must be, or are another one. RunError: a server that has
        answered before does not answer.
        """
        known = None if earlier is None else Fingerprint.from_json(earlier.get("fingerprint"))
        if earlier is not None and (known is None or earlier.get("spec") != self.name):
            raise UsageError(
                f"the cache there was begun with another teacher ({earlier.get('spec')}); choose another --out"
            )
        assert self.server is not None, "load has refused it"
        patience, codec, size = self.server.server_patience, self._codec, self.vocab_size
        self.asked = answers_of(CodecSpec(kind="sparse", vocab_size=size, top_k=codec.top_k, num_samples=codec.samples))
        self.again = known is not None
        self._identity = earlier
        if finished and earlier:
            return
        if earlier is None:
            self.client.patience = min(patience, _FIRST_PATIENCE)
        facts, now, self.client.salted = on_main(lambda: (*self.look(), self.client.salted))
        self.model, self.client.scores = facts["model"], True  # on the ranks that sent no request, too
        self.know(known or now, now)
        self.client.patience = patience
        self.client.verify = self.verify
        found = {"spec": self.name, **facts, "fingerprint": now.to_json()}
        if earlier is None or known is None:
            self._identity = found
            return
        if known.tokens != now.tokens:
            raise UsageError("the cache there was begun with another tokenizer; choose another --out")
        if different := self.different(self.client.hosts[0], now.probes):
            raise UsageError(different)
        log.info("server: the same teacher as when the cache was begun, by its fingerprint")
        told, before = ({**each, "fingerprint": 0, "unsteady": 0} for each in (found, earlier))  # measured anew
        if told != before:
            log.warning("server: it reports %s, and reported %s before; its answers are the same", told, before)

    def write(self, how: Writing) -> None:
        """Let the servers continue prompts from here on, each by a request of its own: no batch decides its bits."""
        self.writing = replace(how, batch_size=None)

    def answers(self, settings: CacheSettings) -> ShardAnswers:
        """Return the answers of the servers for each shard."""
        return _ServedAnswers(self, settings)


def kept_mass(batch: Batch) -> dict[str, Any]:
    """Measure the mass of the distributions that a top-k holds, over the positions that count.

    kept_mass: the mean of the mass m inside; mass_loss: the mean of -log m in nats, which is KL(p' || p) of p' = the
    entries scaled to 1, and what no student can learn of the rest; positions: how many.
    """
    targets: Any = batch.targets
    mass_N = targets.listed()[1][:, : targets.top_k].double().sum(-1)
    mass_N = mass_N[batch.loss_mask.flatten()].clamp(max=1)
    if not len(mass_N):
        return {"positions": 0, "kept_mass": None, "mass_loss": None}
    loss = float(-mass_N.clamp(min=1e-30).log().mean())
    return {"positions": len(mass_N), "kept_mass": round(float(mass_N.mean()), 6), "mass_loss": round(loss, 6)}


class _ServedAnswers(ShardAnswers):
    """The answers of the servers, shard by shard: of each row its spans, or a text behind its prompt."""

    def __init__(self, teacher: Preflight, settings: CacheSettings) -> None:
        self._teacher = teacher
        self._settings = settings
        self._codec = replace(settings.codec, written=False)  # a student's log p is not the server's to give
        self._first = True
        self._answers = answers_of(self._codec, settings.seed)
        self._how = teacher.writing
        self.writes = self._how is not None
        if settings.codec.top_k:
            self.examine = kept_mass
        self._jobs: dict[int, list[Future[tuple[Span, Arrays]]]] = {}
        self._given: dict[str, list[tuple[Span, Arrays]]] = {}
        """What each server answered in this shard, by its address."""
        self._seen = deque[Batch]()

    @contextmanager
    def session(self, shard: ShardRows) -> Iterator[None]:
        """Request the answers of a shard in the block; then request some of them again, and the probes.

        RunError: the servers' answers are not those of this teacher.
        """
        self._given, self._jobs = defaultdict(list), defaultdict(list)
        spans = [span for i in range(len(shard)) for span in self._spans(shard, i)]
        with self._teacher.client.working([partial(self._ask, span) for span in spans]) as jobs:
            for span, job in zip(spans, jobs, strict=True):
                self._jobs[span.row].append(job)
            yield
            self._ask_again([job.result() for job in jobs])
        self._refuse_wrong_rows(shard)
        gone = list[Host]()
        for host in [each for each in self._teacher.client.hosts if each.url in self._given]:
            try:
                self._teacher.verify(host)
            except Unanswered as problem:
                gone.append(host)
                if len(gone) == len(self._teacher.client.hosts):
                    raise
                log.warning("server: %s; its answers in this shard are compared with those of the others", problem)
        for host in gone:  # the others vouch for it
            self._ask_again(self._given[host.url])

    def rows(self, rows: ShardRows) -> tuple[ShardRows, Callable[[], Arrays]]:
        """Wait for the servers' answers; return the rows, with the text that they wrote if they write, and the arrays.

        RunError: no server answers, or not with what can be right.
        """
        length = rows.loss_mask.shape[1]
        found = list[Arrays]()
        if self.writes:
            rows = replace(rows, tokens=rows.tokens.copy(), loss_mask=np.zeros(rows.loss_mask.shape, bool))
        for i in range(len(rows)):
            found.append(self._answers.blank(length))
            for span, arrays in (job.result() for job in self._jobs[rows.first + i]):
                stop = span.start + len(span)
                start = stop - (span.written or len(span))
                for name, values in arrays.items():
                    found[i][name][start:stop] = values
                if self.writes:
                    rows.tokens[i, : stop + 1] = span.tokens
                    rows.loss_mask[i, start:stop] = True
        kept = {name: np.stack([each[name] for each in found]) for name in found[0]}
        tokens_BT, segments_BT = (torch.from_numpy(each.astype(np.int64)) for each in (rows.tokens, rows.segments))
        mask_BT = torch.from_numpy(rows.loss_mask.astype(bool))
        self._seen.append(Batch(tokens_BT, mask_BT, segments_BT, decode(kept, self._codec)))
        most = max(10, min(_LOOKED, _ENTRIES // (length * self._codec.columns)))
        while sum(len(each.tokens) for each in self._seen) - len(self._seen[0].tokens) >= most:
            self._seen.popleft()
        if self.writes and self._first:
            rows.log_first(self._settings)
        self._first = False
        return rows, lambda: kept

    def _spans(self, shard: ShardRows, i: int) -> list[Span]:
        """List the requests for row i of a shard; a prompt is what `packing.prompt_rows` makes."""
        split = shard.split
        row = shard.first + i
        tokens = shard.tokens[i]
        mask = shard.loss_mask[i].astype(bool)
        if self.writes:
            return [Span(split, row, 0, tokens[: int(mask.argmax()) + 1].tolist(), int(mask.sum()))]
        return spans_of(split, row, tokens, mask, shard.segments[i] if self._settings.document_mask else None)

    def _ask(self, span: Span) -> tuple[Span, Arrays]:
        """Request the answer about a span, or about the text that the server writes behind it."""
        try:
            found = span
            arrays = None
            if self._how is not None and span.room:
                (found, arrays), host = self._teacher.text(self._answers, span, self._how)
                given = self._given[host.url]
            if arrays is None:
                arrays, host = self._teacher.score(self._answers, found)
                given = self._given[host.url]
        except Refused as refused:
            raise RunError(f"{span}: {self._teacher.refusal('the server', refused)}") from None
        given.append((found, arrays))
        return found, arrays

    def _ask_again(self, earlier: list[tuple[Span, Arrays]]) -> None:
        """Compare some answers with what the server returns now."""
        allowed = self._teacher.tolerance or max(AGAIN_APART, self._teacher.allowed)
        for span, before in earlier[:: max(1, len(earlier) // AGAIN)][:AGAIN]:
            if (distance := self._answers.distance(before, self._ask(span)[1])) > allowed:
                raise RunError(
                    f"{span}: the server gives other numbers than before, {distance:.3f} nats apart where "
                    f"{allowed:.3f} are allowed: it was replaced, or cached prompts give stale ones (start it with "
                    "--no-enable-prefix-caching); nothing of this shard is kept"
                )

    def _refuse_wrong_rows(self, shard: ShardRows) -> None:
        """Raise RunError if the entries are not about the next token, fit other rows, or are not a teacher's own.

        That takes some ten rows: the last ones are looked at, with those of small shards before.
        """
        codec = self._codec
        seen = Look.of(
            self._seen,
            systematic=codec.num_samples > 0,
            samples=False,
            vocab_size=codec.vocab_size,
            drawn_at=1.0 if self._how is None else self._how.temperature,
        )
        if seen is not None and seen.findings:
            last = shard.first + len(shard) - 1
            raise RunError(f"{shard.split} up to sequence {last}, as the server answers: {seen.findings[0]}")
