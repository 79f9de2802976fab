"""What is checked before the first sequence is requested from a server, a line each, with its words and the remedy.

the model       it is served here, by this name
its length      it takes a row and one token more
the entries     it gives as many as are requested (--max-logprobs of vLLM)
the samples     where a cache keeps samples: kdtrain's plugin draws them, and leaves its receipt
log p           they are the model's own: they do not change with a temperature and top-p, and sum to at most 1
its own text    where it writes: its numbers of each token are those of the same prompt, whatever the temperature
the same again  a prompt that was sent before, and one with its beginning, gives the same numbers: cached prompts have
                given stale ones (vLLM #42019, #42245). Each request has a `cache_salt` of its own as well
the tokenizer   text becomes the same ids there, and the ids that it returns read as the same text here
BOS             the server adds no token: it answers about as many as were sent
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from kdtrain.cache.format.codec import CodecSpec
from kdtrain.cache.format.compression import Arrays
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.monitor.progress import log
from kdtrain.plugins.served.answers import Answers, Span, Top, read_top
from kdtrain.plugins.served.client import Client, Completion, Host, Refused, Unanswered, quoted
from kdtrain.plugins.served.fingerprint import LOUD, TEXTS, TOP, UNSTEADY, Fingerprint, Probe, farthest, probe_tokens
from kdtrain.plugins.served.options import KEY
from kdtrain.plugins.served.written import Prompt, Text
from kdtrain.teaching.teacher import Writing

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


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


@dataclass
class Preflight:
    """Looks at servers of one teacher.

    Args:
        names: what the model may be called there, the first one that is served counts. named: by the user.
        entries: requested at each position. length: tokens of a row, T + 1.
        tokenizer: the local one. vocab_size: the teacher's. samples: how they are requested, instead of entries.
        tolerance: --server-tolerance. again: the servers have answered before, and are waited for.
        writing: how they write text.
    """

    client: Client
    names: list[str]
    named: bool
    entries: int
    length: int
    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    samples: Answers | None = None
    model: str = ""
    tolerance: float | None = None
    again: bool = False
    writing: Writing | None = None

    def look(self) -> tuple[dict[str, Any], Fingerprint]:
        """What the servers tell of themselves, and the fingerprint of the first; all others have the same.

        UsageError: a line of the list above does not hold. RunError: a server does not answer.
        """
        first, *others = self.client.hosts
        facts, found = self._look_at(first)
        for host in others:
            reported, other = self._look_at(host)
            noise = max(found.noise, other.noise)
            found = Fingerprint(found.tokens, found.ids, found.logprobs, noise)
            if (distance := found.distance(other.probes)) > found.allowed(self.tolerance):
                raise UsageError(
                    f"{host} serves another teacher than {first}: {other} there, {found} here, {distance:.3f} nats "
                    f"apart where {found.allowed(self.tolerance):.3f} are allowed; name servers of one model and one "
                    "number format, or give --server-tolerance"
                )
            if reported != facts:
                log.warning(
                    "server: %s tells %s, %s tells %s; their answers are the same", host, reported, first, facts
                )
        return facts | ({"unsteady": _BALANCER} if found.noise > UNSTEADY else {}), found

    def request(self, tokens: list[int], **parameters: Any) -> dict[str, Any]:
        """The body of a request about some tokens."""
        return {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, **parameters}

    def probe(self, host: Host, tokens: list[list[int]], **parameters: Any) -> list[Probe]:
        """A server's answers to probes, sent one after the other."""

        def ask(each: list[int]) -> Probe:
            body = self.request(each, prompt_logprobs=TOP, **parameters)
            return self.client.complete(body, lambda found: self._top(each, found, TOP)[:2], host)

        return [ask(each) for each in tokens]

    def _top(self, tokens: list[int], found: Completion, entries: int) -> Top:
        return read_top(tokens, found.choices[0].prompt_logprobs or (), entries, self.vocab_size)

    def refusal(self, host: Host | str, refused: Refused) -> str:
        """A server's refusal in words, with the remedy."""
        remedy = _remedy(refused) or _CODES.get(refused.code, "see the server's log")
        filled = remedy.format(entries=self.entries, length=self.length + 1)
        code = f" ({refused.code})" if refused.code else ""
        return f"{host} says: {refused.words}{code}; {filled}"

    def _look_at(self, host: Host) -> tuple[dict[str, Any], Fingerprint]:
        try:
            served = self._find_model(host)
            longest = served.max_model_len
            # of a folder there its name alone
            root = served.root and (os.path.basename(served.root) if os.path.isabs(served.root) else served.root)
            stated = {"root": root and quoted(root, _LONGEST_NAME), "max_model_len": longest}
            facts = {
                "model": self.model,
                **self._version(host),
                **{name: each for name, each in stated.items() if each},
            }
            tokens = probe_tokens(self._tokenize, longest)
            try:
                self._check_entries(host, tokens[0], facts)
            except Refused as refused:
                # a proxy may hide both, but what stands behind it answers
                if ("version" in facts and served.owned_by == "vllm") or _remedy(refused) or refused.code in (401, 403):
                    raise
                code = f" ({refused.code})" if refused.code else ""
                raise UsageError(
                    f"{host} does not look like vLLM: asked for prompt_logprobs it says: {refused.words}{code}; "
                    "kdtrain needs vLLM's completions endpoint with prompt_logprobs: serve the teacher with vLLM"
                ) from None
            if self.samples is not None:
                self._check_samples(host, tokens[0], self.samples)
            found = self._fingerprint(host, tokens)
            self._check_raw(host, found)
            if self.writing is not None:
                self._check_written(host, tokens[0], self.writing)
            self._check_tokenizer(host, tokens)
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
        return facts, found

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
        served, shown = [each.id for each in listed], ", ".join(each.id for each in listed)[:300]
        known = [each for each in self.names if each in served]
        if not known and (self.named or len(served) != 1):
            raise UsageError(f"{host} serves {shown or 'nothing'}, not {self.names[0]}; give --server-model NAME")
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

    def _version(self, host: Host) -> dict[str, Any]:
        try:
            version = self.client.get(host, f"{host.root}/version", _Version, tries=1).version
        except (Refused, RunError):
            return {}
        return {"version": quoted(version, 100)}

    def _check_entries(self, host: Host, tokens: list[int], facts: dict[str, Any]) -> None:
        def read(found: Completion) -> None:
            self._top(tokens, found, self.entries)
            if found.system_fingerprint:
                facts["system_fingerprint"] = quoted(found.system_fingerprint, 100)

        try:
            self.client.complete(self.request(tokens, prompt_logprobs=self.entries), read, host)
        except Refused as refused:
            if not self.client.salted or "cache_salt" not in refused.words:
                raise
            log.info("server: %s takes no cache_salt; its cache of prompts must be off", host)
            self.client.salted = False
            self.client.complete(self.request(tokens, prompt_logprobs=self.entries), read, host)
        log.info(
            "server: %s gives %d entries a token, and adds no token to a prompt (%s)",
            host,
            self.entries,
            facts.get("system_fingerprint") or facts.get("version") or "of an unknown version",
        )

    def _check_samples(self, host: Host, tokens: list[int], samples: Answers) -> None:
        span = Span("preflight", 0, 0, tokens)

        def read(found: Completion) -> None:
            samples.read(span, found.choices[0].prompt_logprobs or ())

        try:
            self.client.complete(self.request(tokens, **samples.parameters(span)), read, host)
        except Unanswered:
            raise
        except RunError as error:
            raise UsageError(f"{error}; or give --top-k 64, which every vLLM has") from None
        number = samples.codec.num_samples
        log.info("server: %s gives %d samples a token, with the receipt of kdtrain's plugin", host, number)

    def _fingerprint(self, host: Host, tokens: list[list[int]]) -> Fingerprint:
        """Ask the probes alone, after a prompt with their beginning, and among others."""
        first = self.probe(host, tokens)
        beginnings = [(each[: len(each) // 2 + 1] + each[:3])[: len(each)] for each in tokens]
        self.probe(host, beginnings)
        again = farthest(first, self.probe(host, tokens))
        busy = [*beginnings, *tokens] * 2
        with self.client.working((i, partial(self.probe, host, [each])) for i, each in enumerate(busy)) as jobs:
            answers = [jobs[i].result() for i in range(len(busy))]
        among = max(
            farthest([first[tokens.index(each)]], answer)
            for each, answer in zip(busy, answers, strict=True)
            if each in tokens
        )
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
        """vLLM never processes its numbers of prompts, but may those of its own text, which samples do not use."""
        if self.samples is not None:
            return
        room = min(_WRITTEN, self.length - 1)
        prompt = Prompt("preflight", 0, tokens[: self.length - room], room)
        cut = replace(how, temperature=0.5, top_p=0.5)
        answers = Answers(CodecSpec(kind="sparse", top_k=self.entries, vocab_size=self.vocab_size))

        def written(found: Completion) -> Text:
            return prompt.read(answers, cut, found.choices[0])

        def scored(found: Completion) -> Arrays:
            return answers.read(text.span, found.choices[0].prompt_logprobs or ())

        text = self.client.complete(self.request(prompt.tokens, **prompt.parameters(answers, cut)), written, host)
        assert text.arrays is not None
        whole = self.client.complete(self.request(text.span.tokens, **answers.parameters(text.span)), scored, host)
        moved = answers.distance(text.arrays, {name: each[-text.written :] for name, each in whole.items()})
        if moved > LOUD:
            raise UsageError(
                f"{host} returns processed log-probabilities of what it writes: temperature and top-p move them by "
                f"{moved:.2f} nats; start the server with --logprobs-mode raw_logprobs"
            )
        log.info("server: %s says of its own text what it says of a prompt, whatever the temperature", host)

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check_tokenizer(self, host: Host, tokens: list[list[int]]) -> None:
        other = "it serves another model than --teacher names, or with another tokenizer"
        try:
            for text in TEXTS:
                body = {"model": self.model, "prompt": text, "add_special_tokens": False}
                theirs = self.client.post(host, f"{host.root}/tokenize", body, _Tokens).tokens
                if theirs != (ours := self._tokenize(text)):
                    at = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if len({*pair}) > 1), 0)
                    raise UsageError(
                        f"{host} has another tokenizer: {len(theirs)} ids for a text that has {len(ours)} here, the "
                        f"first other one is number {at + 1}; {other}"
                    )
            how = "/tokenize gives the ids of the local tokenizer"
        except Refused as refused:
            how = f"/tokenize is not there ({refused.code})"
        texts: dict[int, str] = {}

        def collect(found: Completion) -> None:
            for table in found.choices[0].prompt_logprobs or ():
                entries = (table or {}).items()
                texts.update({each: entry.decoded_token for each, entry in entries if entry.decoded_token is not None})

        for each in tokens:
            self.client.complete(self.request(each, prompt_logprobs=TOP), collect, host)
        read = {each: text.strip() for each, text in texts.items() if 0 <= each < len(self.tokenizer)}
        whole = {each: text for each, text in read.items() if "\ufffd" not in text}
        wrong = [each for each, text in whole.items() if text not in _texts(self.tokenizer, each)]
        if len(wrong) > _UNREADABLE * len(read):
            raise UsageError(
                f"{host} reads id {wrong[0]} as '{quoted(read[wrong[0]], 40)}', the local tokenizer as "
                f"'{printable(_texts(self.tokenizer, wrong[0])[0])[:40]}'; {other}"
            )
        log.info("server: %s: %s; %d of %d ids read as here", host, how, len(read) - len(wrong), len(read))


def _remedy(refused: Refused) -> str | None:
    """What to do by a server's words; None: they are not vLLM's about its options or the request."""
    return next((remedy for words, remedy in _REMEDIES if words in refused.words), None)


def _texts(tokenizer: PreTrainedTokenizerFast, token: int) -> tuple[str, ...]:
    """How a token may be written, without space around it."""
    return (str(tokenizer.decode([token])).strip(), str(tokenizer.convert_ids_to_tokens(token)).strip("\u2581\u0120 "))
