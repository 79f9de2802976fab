"""Asks inference servers of one model, many requests at once, and again where that helps.

What may pass is requested again, later each time, of another server where there is one: 408, 425, 429, 5xx, time-outs,
connections that break, an answer that is cut off or cannot be right (`Wrong`). A server rests for as long as it wants
(Retry-After), or twice as long after each failure. A request is given up after `patience` seconds of failures, or three
answers that are wrong. Any other code is final, with the server's own words.

A server that was away may come back as another: `doubted` is set, and `verify` is called before its next answer counts.

The API key stands in the environment, goes to the hosts that were named and nowhere else: no redirect is followed, no
proxy sees it, and no other password of this machine is sent. Where a server quotes it, dots take its place (`quoted`).
Answers are bounded in size and time, and typed.

What it gives up: threads that wait for a server are not waited for at the end of the process; each holds one answer in
memory, up to 500 bytes an entry.
"""

import html
import itertools
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kdtrain.errors import RunError, UsageError, log, printable, shown_address
from kdtrain.net.request import Passing, Session
from kdtrain.plugins.served.answers import Choice, Wrong
from kdtrain.plugins.served.engine import Engine
from kdtrain.plugins.served.options import KEY, api_url

T = TypeVar("T")

WRONG = 3
"""Answers to one request that cannot be right, after which it is given up."""
FIRST_WAIT, LONGEST = 0.2, 60.0
"""Seconds that a server rests after its first failure, and the most after many."""
SMALL = 2**20
"""Bytes of an answer without distributions."""
_WRONG_WAIT = 1.0
"""Seconds that a server rests at least after a second wrong answer: a proxy speaks for it while it starts."""
_SHORT = 5
"""Characters up to which a key is not looked for: EMPTY and its like stand in any text."""
_jitter = random.Random()  # not the generator of a run that trains meanwhile
_WORDS = 400
"""Characters of a server's words that are shown."""
_HTML = "a page of HTML"


class Refused(Exception):
    """A refusal, which is final: a code, and the server's words."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words := quoted(words))
        self.code, self.words = code, words


class Unanswered(RunError):
    """A failure of all attempts to get an answer. problem: the reason, without what to do."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; what is here stays: run the same command again")
        self.problem = problem


class _Words(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _Words | str


@dataclass
class Host:
    """A server, and its state."""

    url: str
    """Of its API, with /v1 at the end."""
    busy: int = 0
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    doubted: bool = False
    """It was away, and may be another one now."""
    build: str | None = None
    """What it calls itself in its answers (`system_fingerprint`)."""
    checking: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return self.url


class Client:
    """A client of some servers of one model.

    Args:
        urls: their addresses.
        concurrency: requests at once. timeout: seconds of one answer. patience: seconds of failures of one request.
        engine: whose requests and answers these are.
    """

    def __init__(
        self, urls: Iterable[str], *, concurrency: int, timeout: float, patience: float, engine: Engine | None = None
    ) -> None:
        self.hosts = [Host(api_url(url)) for url in urls]
        self.engine = engine or Engine()
        self.concurrency, self.timeout, self.patience = concurrency, timeout, patience
        self.verify: Callable[[Host], object] = lambda _: None
        """Raises an error if a server that was away is not what it was."""
        self.scores = False
        """The servers have given prompt_logprobs; without them one is refused at once."""
        self.salted = True
        """Each request has a `cache_salt` of its own."""
        self._salt = os.urandom(8).hex()
        self._salts = itertools.count()
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._ended = threading.Event()
        self._key = _key()
        for url in (host.url for host in self.hosts if self._key):
            Session.refuse_plain(url, f"--teacher-server {url}: {KEY}")

    def get(self, host: Host, url: str, kind: type[T], tries: int = WRONG) -> T:
        """Get a small record.

        Refused: by the server. RunError: it does not answer, or `tries` times not with a `kind`.
        """
        return self._ask(lambda host: _typed(self._exchange(host, url, None, SMALL), kind), host, tries)[0]

    def complete(self, body: dict[str, Any], read: Callable[[Choice], T], host: Host | None = None) -> tuple[T, Host]:
        """Request the answer of a server to a prompt; return what `read` makes of it, and the server.

        read: raises `Wrong` for an answer that cannot be right. host: which server; None: one that is free.

        Refused: the server does not take the request. RunError: no answer.
        """
        prompt = body["prompt"]
        samples = body.get("vllm_xargs", {}).get("kdtrain_samples", 0)
        entries = max(int(body.get("prompt_logprobs") or body.get("logprobs") or 0), samples)
        most = SMALL + (len(prompt) + body.get("max_tokens", 1)) * (entries + 2) * 500

        def once(at: Host) -> T:
            # a second try would find what the first one left in the cache of prompts
            sent = {**body, "cache_salt": f"{self._salt}-{next(self._salts)}"} if self.salted else body
            content = self._exchange(at, self.engine.url(at.url), self.engine.request(sent), most)
            answer = self.engine.read(_typed(content, self.engine.answer), body)
            if answer.model != body["model"]:
                raise Wrong(f"an answer of the model {quoted(answer.model, 100)}")
            counted = None if answer.usage is None else answer.usage.prompt_tokens
            if counted not in (None, len(prompt)):
                raise Wrong(f"it counts {counted} tokens, {len(prompt)} were sent: it adds or drops some")
            if len(answer.choices) != 1:
                raise Wrong(f"{len(answer.choices)} answers instead of one")
            found = answer.choices[0].prompt_logprobs
            if "prompt_logprobs" in body and found is None:
                if not self.scores:
                    raise Refused(0, "an answer without prompt_logprobs")
                raise Wrong("no prompt_logprobs, which it gave before")
            if found is not None and len(found) != len(prompt):
                raise Wrong(f"prompt_logprobs of {len(found)} tokens, {len(prompt)} were sent")
            at.build = answer.system_fingerprint
            return read(answer.choices[0])

        return self._ask(once, host)

    def _ask(self, once: Callable[[Host], T], host: Host | None, tries: int = WRONG) -> tuple[T, Host]:
        """Call `once` with a server until it returns, or its answers were wrong `tries` times."""
        wrong = 0
        began = None
        while True:
            at = self._take(host)
            try:
                found = once(at)
                if at.doubted and host is None:
                    self._recognise(at)
                at.failures = 0
                return found, at
            except Wrong as problem:
                wrong = wrong + 1
                words = quoted(str(problem))
                if wrong >= tries:
                    raise RunError(f"{at} answers with {words}; tried {wrong} times") from None
                self._rest(at, Passing(f"it answers with {words}", _WRONG_WAIT * (wrong - 1)))
            except Passing as problem:
                now = time.monotonic()
                began = now if began is None else began
                wait = self._rest(at, problem)
                if now + min(wait, 1.0) - began > self.patience:
                    raise Unanswered(f"{at}: {problem}, for {now - began:.0f} s") from None
            finally:
                with self._lock:
                    at.busy -= 1

    @contextmanager
    def working(self, jobs: Iterable[Callable[[], T]]) -> Iterator[list["Future[T]"]]:
        """Run the jobs, in order, as many at once as `concurrency`.

        The first error is raised by all jobs, and ends all requests.
        """
        waiting = deque((Future[T](), job) for job in jobs)
        futures = [future for future, _ in waiting]
        broken = list[BaseException]()

        def work() -> None:
            with suppress(IndexError):
                while True:
                    future, job = waiting.popleft()
                    try:
                        if broken:
                            raise broken[0]
                        future.set_result(job())
                    except BaseException as error:
                        broken.append(error)
                        future.set_exception(broken[0])
                        self._ended.set()

        for number in range(min(self.concurrency, len(waiting))):
            # a daemon: a server that does not answer keeps no process alive
            threading.Thread(target=work, daemon=True, name=f"teacher-server-{number}").start()
        try:
            yield futures
        finally:
            if not all(future.done() for future in futures):
                self._ended.set()
            waiting.clear()

    def _take(self, wanted: Host | None) -> Host:
        """Choose the server of the next request, and wait until its rest is over.

        RunError: the answer is no longer wanted.
        """
        with self._lock:
            now = time.monotonic()
            best = wanted or min(self.hosts, key=lambda each: (max(now, each.rests_until), each.busy))
            best.busy += 1
        if self._ended.wait(max(0.0, best.rests_until - now)):
            raise RunError("the answer is no longer needed")
        return best

    def _rest(self, host: Host, problem: Passing) -> float:
        """Let a server rest after a failure; return the seconds of the rest."""
        with self._lock:
            now = time.monotonic()
            if host.rests_until <= now:  # of several requests that fail at once, one counts
                host.failures += 1
                longest = min(LONGEST, max(FIRST_WAIT, self.patience / 4))
                wait = min(longest, FIRST_WAIT * 2 ** min(host.failures - 1, 20)) * _jitter.uniform(0.5, 1)
                host.rests_until = now + max(wait, min(problem.wait or 0.0, self.patience))
                if not self._ended.is_set():  # else nobody asks again, and the error is the last line
                    log.info("%s: %s; asking again in %.1f s", host, problem, host.rests_until - now)
            return max(0.0, host.rests_until - now)

    def _recognise(self, host: Host) -> None:
        with host.checking:
            if host.doubted:
                try:
                    self.verify(host)
                except Unanswered as problem:
                    if len(self.hosts) == 1:
                        raise
                    raise Passing(str(problem)) from None
                host.doubted = False

    def _exchange(self, host: Host, url: str, content: dict[str, Any] | None, most: int) -> bytes:
        """Send a request and return the body of an answer with code 200. Passing, Refused: there is none."""
        session = getattr(self._thread, "session", None) or Session()
        self._thread.session = None
        session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
        session.until = time.monotonic() + self.timeout
        try:
            answer, found = session.exchange(
                "GET" if content is None else "POST",
                url,
                most=most,
                key=self._key,
                data=None if content is None else msgspec.json.encode(content),
                headers={"Content-Type": "application/json"},
                timeout=(10.0, self.timeout),  # seconds for a connection, and for a read
            )
        except Passing:
            host.doubted = True
            raise
        except RunError as error:
            raise Refused(0, str(error)) from None
        code = answer.status_code
        if answer.is_redirect:
            target = shown_address(quoted(answer.headers["Location"]))
            raise Refused(code, f"it redirects to {target}, which is not followed")
        if len(found) > most and code == 200:
            raise Wrong(f"more than {most:,} bytes")
        self._thread.session = session  # one that failed is not used again
        if code == 200:
            return found
        words = quoted(_words_of(found)) or "nothing more"
        if code in (408, 425, 429) or code >= 500:
            host.doubted |= code != 429
            raise Passing(f"it answers {code}: {words}", session.retry_after(answer))
        raise Refused(code, words)


def _key() -> str | None:
    """Return the API key, or None. UsageError: it cannot be a key; the message does not show its text."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"{KEY} holds spaces or characters that no key has; set it to the key alone")
    return key or None


def quoted(text: str, most: int = _WORDS) -> str:
    """Clean a server's text for files and messages: printable, at most `most` characters, and without the API key.

    The key is found however its characters are escaped: by JSON, also twice, in an address, or in HTML.
    """
    if len(key := _key() or "") > _SHORT:
        forms = ({each, html.escape(each), f"%{ord(each):02x}", f"u{ord(each):04x}"} for each in key)
        pattern = r"\\*".join(f"(?:{'|'.join(map(re.escape, each))})" for each in forms)
        text = re.sub(pattern, "...", text, flags=re.IGNORECASE)
    return printable(" ".join(text.split()))[:most]


def _typed(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        words = _HTML if content.lstrip()[:1] == b"<" else quoted(str(error)).replace("`", "")
        raise Wrong(f"what is not the requested JSON ({words})") from None


def _words_of(content: bytes) -> str:
    """Extract the message of a server's error; without one return its text as it came, or a phrase for HTML."""
    with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        found = msgspec.json.decode(content, type=_Error).error
        return found if isinstance(found, str) else found.message
    return _HTML if content.lstrip()[:1] == b"<" else content[:SMALL].decode("utf-8", "replace")
