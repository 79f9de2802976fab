"""What is checked before the first sequence is requested from a server, a line each, with its words and the remedy.

the model       it is served here, by this name
its length      it takes a row and one token more
the entries     it gives as many as are requested (--max-logprobs of vLLM)
the samples     where a cache keeps samples: kdtrain's plugin draws them, and leaves its receipt
log p           they are the model's own: they do not change with a temperature and top-p, and sum to at most 1
its own text    where it writes: its numbers of each token are those of the same prompt, whatever the temperature
the same again  a prompt that was sent before, and one with its beginning, gives the same numbers: cached prompts have
                given stale ones (vLLM #42019, #42245). Each request has a `cache_salt` of its own as well
the tokenizer   the ids that it returns read as the same text here; ids are sent, never text
BOS             the server adds no token: it answers about as many as were sent
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from transformers import PreTrainedTokenizerFast

from kdtrain.cache.format.spec import CodecSpec
from kdtrain.errors import RunError, UsageError, log, printable
from kdtrain.models.spec import ModelSpec
from kdtrain.plugins.served.answers import Answers, Arrays, Choice, Span, read_text, read_top, text_parameters
from kdtrain.plugins.served.client import Client, Host, Refused, Unanswered, quoted
from kdtrain.plugins.served.fingerprint import LENGTH, LOUD, TEXTS, TOP, UNSTEADY, Fingerprint, Probe, farthest
from kdtrain.plugins.served.options import KEY, ServerConfig
from kdtrain.teaching.teacher import Teacher, Writing

_LONGEST_NAME = 200
_SILENT = 10.0
"""Seconds for which an address that has never answered may be silent."""
_WRITTEN = 8
"""Tokens of a text that is requested."""
_UNREADABLE = 0.1
"""The share of ids that may read as another text: some are part of a character."""
_REMEDIES = (
    ("max allowed", "start the server with --max-logprobs {entries}, or use a smaller --top-k"),
    ("context length", "start the server with --max-model-len {length}, or use a smaller --seq-len"),
    ("max_model_len", "start the server with --max-model-len {length}, or use a smaller --seq-len"),
    ("does not exist", "name the model that it serves with --server-model"),
    ("out of vocabulary", "it serves another model than --teacher names"),
    ("redirects", "give that address, if it is the server's"),
    ("certificate", "check the address"),
)
"""What a server's words contain -> what to do."""
_BALANCER = f"more than {UNSTEADY} nats come of low precision, or of a balancer before several models"
_CODES = {401: f"set {KEY}", 403: f"set {KEY}", 404: "check the address, which ends in /v1"}


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    root: str | None = None
    owned_by: Any = None


class _Models(msgspec.Struct):
    data: list[_Model]


class Preflight(Teacher):
    """A teacher behind servers of one model, which checks them first, and sends the requests that they support."""

    client: Client
    server: ServerConfig | None = None
    asked: Answers
    """What is requested of each position."""

    def __init__(self, spec: ModelSpec, device: torch.device, mode: str) -> None:
        super().__init__(spec, device, mode)
        self.length = 0
        """Tokens of a row, T + 1."""
        self.model = ""
        """Its name there."""
        self.again = False
        """The servers have answered before, and are waited for."""
        self.known: Fingerprint | None = None
        """Of the teacher, once it is known."""
        self.allowed = 0.0
        """Nats by which answers to the probes may differ from it."""
        self._texts: dict[int, str] = {}

    @property
    def tolerance(self) -> float | None:
        """The allowed distance in nats (--server-tolerance)."""
        return None if self.server is None else self.server.server_tolerance

    def look(self) -> tuple[dict[str, Any], Fingerprint]:
        """Check all servers; return what they report, and the fingerprint of the first, which all must match.

        UsageError: a line of the list above does not hold. RunError: a server does not answer.
        """
        first, *others = self.client.hosts
        facts, found = self._look_at(first)
        for host in others:
            reported, other = self._look_at(host)
            found = replace(found, noise=max(found.noise, other.noise))
            if (distance := found.distance(other.probes)) > (allowed := found.allowed(self.tolerance)):
                raise UsageError(
                    f"{host} serves another teacher than {first}: {other} there, {found} here, {distance:.3f} nats "
                    f"apart where {allowed:.3f} are allowed; name servers of one model and one number format, or give "
                    "--server-tolerance"
                )
            if reported != facts:
                words = "server: %s tells %s, %s tells %s; their answers are the same"
                log.warning(words, host, reported, first, facts)
        return facts | ({"unsteady": _BALANCER} if found.noise > UNSTEADY else {}), found

    def request(self, tokens: list[int], read: Any, host: Host | None, **parameters: Any) -> tuple[Any, Host]:
        """Request the answer about some tokens (`Client.complete`); return what `read` makes of it, and the server."""
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, **parameters}
        return self.client.complete(body, read, host)

    def score(self, answers: Answers, span: Span, host: Host | None = None) -> tuple[Arrays, Host]:
        """Score a span, or the text in it; return the arrays that a cache keeps, and the server."""

        def read(found: Choice) -> Arrays:
            arrays = answers.read(span, found.prompt_logprobs or ())
            return {name: values[-(span.written or len(span)) :] for name, values in arrays.items()}

        return self.request(span.tokens, read, host, **answers.parameters(span))

    def text(
        self, answers: Answers, prompt: Span, how: Writing, host: Host | None = None
    ) -> tuple[tuple[Span, Arrays | None], Host]:
        """Request the text that continues a prompt; return the prompt with it (`read_text`), and the server."""
        read = partial(read_text, prompt, answers, how)
        return self.request(prompt.tokens, read, host, **text_parameters(prompt, answers, how))

    def probe(self, host: Host, tokens: list[list[int]], **parameters: Any) -> list[Probe]:
        """Request a server's answers to probes, one after the other."""

        def ask(each: list[int]) -> Probe:
            def read(found: Choice) -> Probe:
                for table in found.prompt_logprobs or ():
                    self._texts.update({i: entry.decoded_token or "" for i, entry in (table or {}).items()})
                return read_top(each, found.prompt_logprobs or (), TOP, self.asked.codec.vocab_size)[:2]

            return self.request(each, read, host, prompt_logprobs=TOP, **parameters)[0]

        return [ask(each) for each in tokens]

    def know(self, known: Fingerprint, now: Fingerprint) -> None:
        """Take a fingerprint as the teacher's. now: the servers' own, which may be noisier."""
        self.known, self.allowed = known, max(each.allowed(self.tolerance) for each in (known, now))

    def verify(self, host: Host) -> None:
        """Raise RunError if a server is not this teacher any more."""
        if self.known is None:
            return
        try:
            probes = self.probe(host, self.known.tokens)
        except Refused as refused:
            raise RunError(f"{self.refusal(host, refused)}; nothing of this shard is kept") from None
        if different := self.different(host, probes):
            raise RunError(f"{different}; nothing of this shard is kept")

    def different(self, host: Host, probes: list[Probe]) -> str:
        """Compare a server's answers with the known fingerprint; return what is wrong, or an empty text."""
        known = self.known
        assert known is not None
        if (distance := known.distance(probes)) <= self.allowed:
            return ""
        now = Fingerprint.take(known.tokens, probes, known.noise)
        return (
            f"{host} is another teacher than the one that this cache was begun with: its fingerprint is {now}, that "
            f"of the cache {known}, {distance:.3f} nats apart where {self.allowed:.3f} are allowed; serve the same "
            "model in the same number format, or choose another --out"
        )

    def refusal(self, host: Host | str, refused: Refused) -> str:
        """Describe a server's refusal, with the remedy."""
        remedy = _remedy(refused) or _CODES.get(refused.code, "see the server's log")
        filled = remedy.format(entries=self.asked.codec.top_k or TOP, length=self.length + 1)
        code = f" ({refused.code})" if refused.code else ""
        return f"{host} says: {refused.words}{code}; {filled}"

    def _look_at(self, host: Host) -> tuple[dict[str, Any], Fingerprint]:
        try:
            served = self._find_model(host)
            # of a folder there its name alone
            root = served.root and (os.path.basename(served.root) if os.path.isabs(served.root) else served.root)
            stated = {
                "version": self._version(host),
                "root": root and quoted(root, _LONGEST_NAME),
                "max_model_len": served.max_model_len,
            }
            length = min(LENGTH, (served.max_model_len or 2**20) - 1)  # one more is written
            tokens = [list(self.tokenizer(text, add_special_tokens=False)["input_ids"])[:length] for text in TEXTS]
            try:
                self._check_entries(host, tokens[0])
            except Refused as refused:
                # a proxy may hide both, but what stands behind it answers
                known = stated["version"] and served.owned_by == "vllm"
                if known or _remedy(refused) or refused.code in (401, 403):
                    raise
                code = f" ({refused.code})" if refused.code else ""
                raise UsageError(
                    f"{host} does not look like vLLM: asked with prompt_logprobs it answers: {refused.words}{code}; "
                    "kdtrain needs vLLM's completions endpoint with prompt_logprobs: serve the teacher with vLLM"
                ) from None
            build = stated["system_fingerprint"] = host.build and quoted(host.build, 100)
            words = "server: %s gives %d entries per token, and adds no token to a prompt (%s)"
            log.info(words, host, self.asked.codec.top_k or TOP, build or stated["version"] or "of an unknown version")
            if self.asked.codec.num_samples:
                self._check_samples(host, tokens[0])
            found = self._fingerprint(host, tokens)
            self._check_raw(host, found)
            if self.writing is not None and self.asked.codec.top_k:
                self._check_written(host, tokens[0], self.writing)
            self._check_texts(host)
        except Refused as refused:
            raise UsageError(self.refusal(host, refused)) from None
        except Unanswered as error:
            without = f"; or leave --teacher-server {host} out" if len(self.client.hosts) > 1 else ""
            if self.again:
                raise RunError(f"{error}{without}") from None
            raise UsageError(
                f"{error.problem}; check the address and the port, and that the server has started{without}"
            ) from None
        except RunError as error:
            raise UsageError(f"{error.args[0]}") from None
        return {"model": self.model, **{name: each for name, each in stated.items() if each}}, found

    def _find_model(self, host: Host) -> _Model:
        """Choose the model."""
        patient = self.client.timeout
        if not self.again:  # what is no server may take the connection and say nothing
            self.client.timeout = min(patient, _SILENT)
        try:
            found = self.client.get(host, f"{host.url}/models", _Models).data
        except Unanswered:
            raise
        except RunError as error:
            raise UsageError(f"{error}; {_CODES[404]}") from None
        finally:
            self.client.timeout = patient
        listed = [each for each in found if each.id == quoted(each.id, _LONGEST_NAME)]
        served = [each.id for each in listed]
        shown = ", ".join(each.id for each in listed)[:300]
        given = None if self.server is None else self.server.server_model
        names = [given] if given else [self.name, *filter(None, [self.spec.source])]
        known = [each for each in (*names, *map(os.path.basename, () if given else names)) if each in served]
        if not known and (given or len(served) != 1):
            raise UsageError(f"{host} serves {shown or 'nothing'}, not {names[0]}; give --server-model NAME")
        model = known[0] if known else served[0]
        if self.model not in ("", model):
            raise UsageError(f"{host} serves {shown}, not {self.model} as the first server; give --server-model NAME")
        self.model = model
        chosen = next(each for each in listed if each.id == model)
        longest = chosen.max_model_len
        length = "and does not tell its length" if longest is None else f"up to {longest} tokens"
        log.info("server: %s serves %s, %s", host, model, length)
        if longest is not None and longest < self.length + 1:
            raise UsageError(
                f"{host} takes {longest} tokens, and a row needs {self.length} and one more; start the server with "
                f"--max-model-len {self.length + 1}, or use --seq-len {longest - 2} or less"
            )
        return chosen

    def _version(self, host: Host) -> str | None:
        try:
            url = f"{host.url.removesuffix('/v1')}/version"
            return quoted(self.client.get(host, url, dict[str, str], tries=1)["version"], 100)
        except (Refused, RunError, KeyError):
            return None

    def _check_entries(self, host: Host, tokens: list[int]) -> None:
        span = Span("preflight", 0, 0, tokens)
        plain = self.asked
        if self.asked.codec.num_samples:
            plain = Answers(CodecSpec(kind="sparse", top_k=TOP, vocab_size=self.vocab_size))
        try:
            self.score(plain, span, host)
        except Refused as refused:
            if not self.client.salted or "cache_salt" not in refused.words:
                raise
            log.info("server: %s takes no cache_salt; its cache of prompts must be off", host)
            self.client.salted = False
            self.score(plain, span, host)

    def _check_samples(self, host: Host, tokens: list[int]) -> None:
        try:
            self.score(self.asked, Span("preflight", 0, 0, tokens), host)
        except Unanswered:
            raise
        except RunError as error:
            raise UsageError(f"{error}; or give --top-k 64, which every vLLM has") from None
        number = self.asked.codec.num_samples
        log.info("server: %s gives %d samples per token, with the receipt of kdtrain's plugin", host, number)

    def _fingerprint(self, host: Host, tokens: list[list[int]]) -> Fingerprint:
        """Take the fingerprint: send the probes alone, after a prompt with their beginning, and among others."""
        first = self.probe(host, tokens)
        beginnings = [(each[: len(each) // 2 + 1] + each[:3])[: len(each)] for each in tokens]
        self.probe(host, beginnings)
        again = farthest(first, self.probe(host, tokens))
        busy = [*beginnings, *tokens] * 2
        with self.client.working([partial(self.probe, host, [each]) for each in busy]) as jobs:
            answers = [(each, job.result()) for each, job in zip(busy, jobs, strict=True)]
        among = max(farthest([first[tokens.index(each)]], answer) for each, answer in answers if each in tokens)
        found = Fingerprint.take(tokens, first, max(again, among))
        if found.noise > LOUD:
            raise UsageError(
                f"{host} answers one prompt with numbers that are {found.noise:.2f} nats apart: cached prompts give "
                "stale ones; start the server with --no-enable-prefix-caching"
            )
        if found.noise > UNSTEADY:
            words = "%s answers one prompt with numbers that are %.2g nats apart: %s; give the address of each server"
            log.warning(words, host, found.noise, _BALANCER)
        log.info("server: %s gives the same again: %.2g nats apart alone, %.2g among others", host, again, among)
        return found

    def _check_raw(self, host: Host, found: Fingerprint) -> None:
        sampled = self.probe(host, found.tokens, temperature=0.5, top_p=0.5)
        if (moved := found.distance(sampled)) > max(0.02, found.allowed(None)):
            raise UsageError(
                f"{host} returns processed log-probabilities: temperature and top-p move them by {moved:.2f} nats; "
                "start the server with --logprobs-mode raw_logprobs"
            )
        log.info("server: %s returns raw log-probabilities: temperature and top-p do not move them", host)

    def _check_written(self, host: Host, tokens: list[int], how: Writing) -> None:
        """Raise UsageError if a server processes the log-probabilities of the text that it writes.

        vLLM never processes its numbers of prompts, but may process those of its own text, which samples do not use.
        """
        room = min(_WRITTEN, self.length - 1)
        prompt = Span("preflight", 0, 0, tokens[: self.length - room], room)
        (whole, arrays), _ = self.text(self.asked, prompt, replace(how, temperature=0.5, top_p=0.5), host)
        assert arrays is not None
        if (moved := self.asked.distance(arrays, self.score(self.asked, whole, host)[0])) > LOUD:
            raise UsageError(
                f"{host} returns processed log-probabilities of what it writes: temperature and top-p move them by "
                f"{moved:.2f} nats; start the server with --logprobs-mode raw_logprobs"
            )
        log.info("server: %s says of its own text what it says of a prompt, whatever the temperature", host)

    def _check_texts(self, host: Host) -> None:
        """Raise UsageError if a server reads ids otherwise than the local tokenizer.

        Ids are sent, and must mean the same there.
        """
        read = {i: text.strip() for i, text in self._texts.items() if text and 0 <= i < len(self.tokenizer)}
        whole = {i: text for i, text in read.items() if "\ufffd" not in text}
        wrong = [i for i, text in whole.items() if text not in _texts(self.tokenizer, i)]
        if len(wrong) > _UNREADABLE * len(read):
            raise UsageError(
                f"{host} reads id {wrong[0]} as '{quoted(read[wrong[0]], 40)}', the local tokenizer as "
                f"'{printable(_texts(self.tokenizer, wrong[0])[0])[:40]}'; it serves another model than --teacher "
                "names, or with another tokenizer"
            )
        log.info("server: %s: %d of %d ids read as here", host, len(read) - len(wrong), len(read))
        self._texts.clear()


def _remedy(refused: Refused) -> str | None:
    """Find the remedy for a server's refusal; return None if it is not vLLM's about its options or the request."""
    return next((remedy for words, remedy in _REMEDIES if words in refused.words), None)


def _texts(tokenizer: PreTrainedTokenizerFast, token: int) -> tuple[str, ...]:
    """Return the ways to write a token, without space around it."""
    return (str(tokenizer.decode([token])).strip(), str(tokenizer.convert_ids_to_tokens(token)).strip("\u2581\u0120 "))
