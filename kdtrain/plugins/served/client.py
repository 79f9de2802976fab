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
import queue
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kdtrain.errors import RunError, UsageError, printable, shown_address
from kdtrain.monitor.progress import log
from kdtrain.net.address import ALLOW_HTTP, is_inside
from kdtrain.plugins.served.answers import Entry, Wrong
from kdtrain.plugins.served.options import KEY, api_url

if TYPE_CHECKING:
    import requests

    from kdtrain.net.request import Session

T = TypeVar("T")

WRONG = 3
"""Answers to one request that cannot be right, after which it is given up."""
CONNECT = 10.0
"""Seconds for a connection."""
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
_LATE = "the answer takes too long"
_HTML = "a page of HTML"


class Refused(Exception):
    """A final answer: a code, and the server's words."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words := quoted(words))
        self.code, self.words = code, words


class _Passing(Exception):
    """A failure that may pass. wait: seconds that the server asks for. away: it may come back as another."""

    def __init__(self, text: str, wait: float | None = None, *, away: bool = True) -> None:
        super().__init__(quoted(text))
        self.wait, self.away = wait, away


class Unanswered(RunError):
    """No server answered any of the attempts. problem: without what to do."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; what is here stays: run the same command again")
        self.problem = problem


class WrittenEntries(msgspec.Struct):
    """Log-probabilities of the generated tokens, by `token_id:ID`."""

    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    """The answer to one prompt."""

    prompt_logprobs: list[dict[int, Entry] | None] | None = None
    token_ids: list[int] | None = None
    logprobs: WrittenEntries | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """What a request cost."""

    prompt_tokens: int | None = None


class Completion(msgspec.Struct):
    """An answer of /completions; other keys are ignored."""

    model: str
    choices: list[Choice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class _Words(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _Words | str


@dataclass
class Host:
    """A server."""

    url: str
    """Of its API, with /v1 at the end."""
    busy: int = 0
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    doubted: bool = False
    """It was away, and may be another one now."""
    answered: bool = False
    """It has answered since it was last looked at."""
    scores: bool = False
    """It has given prompt_logprobs."""
    checking: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return self.url

    @property
    def root(self) -> str:
        """Where its other endpoints are: /tokenize, /version."""
        return self.url.removesuffix("/v1")


class Client:
    """Requests to some servers of one model.

    Args:
        urls: their addresses.
        concurrency: requests at once. timeout: seconds of one answer. patience: seconds of failures of one request.
    """

    def __init__(self, urls: Iterable[str], *, concurrency: int, timeout: float, patience: float) -> None:
        self.hosts = [Host(api_url(url)) for url in urls]
        self.concurrency, self.timeout, self.patience = concurrency, timeout, patience
        self.verify: Callable[[Host], None] = lambda _: None
        """Raises an error if a server that was away is not what it was."""
        self._key = _key()
        self.salted = True
        """Each request has a `cache_salt` of its own."""
        self._salt, self._salts = os.urandom(8).hex(), itertools.count()
        self._lock, self._thread = threading.Lock(), threading.local()
        self._sessions: queue.SimpleQueue[Session] = queue.SimpleQueue()
        for url in (host.url for host in self.hosts if self._key):
            # the key would go over a network that is not private, where anybody on the way can read it
            if urlsplit(url).scheme == "http" and not is_inside(url) and os.environ.get(ALLOW_HTTP) != "1":
                raise UsageError(
                    f"--teacher-server {url}: {KEY} would be sent unencrypted; give https://, or set {ALLOW_HTTP}=1 if "
                    "you trust the network"
                )

    def get(self, host: Host, url: str, kind: type[T], tries: int = WRONG) -> T:
        """A small record. Refused: by the server. RunError: it does not answer, or `tries` times not with a `kind`."""
        return self.ask(lambda host: _typed(self._exchange(host, "GET", url, None, SMALL), kind), host, tries)

    def post(self, host: Host, url: str, body: dict[str, Any], kind: type[T]) -> T:
        """As `get`, for a small record that needs a request."""
        return self.ask(lambda host: _typed(self._exchange(host, "POST", url, body, SMALL), kind), host)

    def complete(self, body: dict[str, Any], read: Callable[[Completion], T], host: Host | None = None) -> T:
        """What `read` makes of the answer of a server to a prompt.

        read: raises `Wrong` for an answer that cannot be right. host: which server; None: one that is free.

        Refused: the server does not take the request. RunError: no answer.
        """
        prompt, samples = body["prompt"], body.get("vllm_xargs", {}).get("kdtrain_samples", 0)
        entries = max(int(body.get("prompt_logprobs") or body.get("logprobs") or 0), samples)
        most = SMALL + (len(prompt) + body.get("max_tokens", 1)) * (entries + 2) * 500

        def once(at: Host) -> T:
            # a second try would find what the first one left in the cache of prompts
            sent = {**body, "cache_salt": f"{self._salt}-{next(self._salts)}"} if self.salted else body
            answer = _typed(self._exchange(at, "POST", f"{at.url}/completions", sent, most), Completion)
            if "prompt_logprobs" in body and not at.scores:
                if all(each.prompt_logprobs is None for each in answer.choices):
                    raise Refused(0, "an answer without prompt_logprobs")
                at.scores = True
            if answer.model != body["model"]:
                raise Wrong(f"an answer of the model {quoted(answer.model, 100)}")
            counted = None if answer.usage is None else answer.usage.prompt_tokens
            if counted not in (None, len(prompt)):
                raise Wrong(f"it counts {counted} tokens, {len(prompt)} were sent: it adds or drops some")
            if len(answer.choices) != 1:
                raise Wrong(f"{len(answer.choices)} answers instead of one")
            found = answer.choices[0].prompt_logprobs
            if "prompt_logprobs" not in body:
                return read(answer)
            if found is None:
                raise Wrong("no prompt_logprobs, which it gave before")
            if len(found) != len(prompt):
                raise Wrong(f"prompt_logprobs of {len(found)} tokens, {len(prompt)} were sent")
            return read(answer)

        return self.ask(once, host)

    def ask(self, once: Callable[[Host], T], host: Host | None = None, tries: int = WRONG) -> T:
        """Call `once` with a server until it returns, or its answers were wrong `tries` times."""
        wrong, began = 0, None
        while True:
            at = self._take(host)
            try:
                found = once(at)
                if at.doubted and host is None:
                    self._recognise(at)
                at.failures = 0
                at.answered = at.answered or host is None
                self._thread.host = at
                return found
            except Wrong as problem:
                wrong, words = wrong + 1, quoted(str(problem))
                if wrong >= tries:
                    raise RunError(f"{at} answers with {words}; tried {wrong} times") from None
                self._rest(at, _Passing(f"it answers with {words}", _WRONG_WAIT * (wrong - 1), away=False))
            except _Passing as problem:
                now = time.monotonic()
                began = now if began is None else began
                wait = self._rest(at, problem)
                if now + min(wait, 1.0) - began > self.patience:
                    raise Unanswered(f"{at}: {problem}, for {now - began:.0f} s") from None
            finally:
                with self._lock:
                    at.busy -= 1

    @property
    def last(self) -> Host:
        """The server that answered this thread's last request."""
        host: Host = self._thread.host
        return host

    @contextmanager
    def working(self, jobs: Iterable[tuple[Hashable, Callable[[], Any]]]) -> Iterator[dict[Hashable, "Future[Any]"]]:
        """Do the jobs, in order, as many at once as `concurrency`; their results by key. The first error is all's."""
        futures: dict[Hashable, Future[Any]] = {}
        waiting = deque[tuple[Future[Any], Callable[[], Any]]]()
        for key, job in jobs:
            futures[key] = Future()
            waiting.append((futures[key], job))
        broken: list[BaseException] = []
        stop = threading.Event()

        def work() -> None:
            self._thread.stop = stop
            with suppress(IndexError):
                while True:
                    future, job = waiting.popleft()
                    try:
                        if broken:
                            raise broken[0]
                        future.set_result(job())
                    except BaseException as error:
                        broken.append(error)
                        future.set_exception(error)

        for number in range(min(self.concurrency, len(waiting))):
            # a daemon: a server that does not answer keeps no process alive
            threading.Thread(target=work, daemon=True, name=f"teacher-server-{number}").start()
        try:
            yield futures
        finally:
            waiting.clear()
            stop.set()

    def _take(self, wanted: Host | None) -> Host:
        """The server of the next request, when its rest is over."""
        while True:
            with self._lock:
                now = time.monotonic()
                rested = [each for each in ([wanted] if wanted else self.hosts) if each.rests_until <= now]
                if rested:
                    best = min(rested, key=lambda each: each.busy)
                    best.busy += 1
                    return best
                until = min(each.rests_until for each in ([wanted] if wanted else self.hosts))
            stop: threading.Event | None = getattr(self._thread, "stop", None)
            if stop is None:
                time.sleep(max(0.0, until - now))
            elif stop.wait(max(0.0, until - now)):
                raise RunError("the answer is not wanted any more")

    def _rest(self, host: Host, problem: _Passing) -> float:
        """Let a server rest after a failure; the seconds of it."""
        with self._lock:
            now = time.monotonic()
            if host.rests_until <= now:  # of several requests that fail at once, one counts
                host.failures += 1
                longest = min(LONGEST, max(FIRST_WAIT, self.patience / 4))
                wait = min(longest, FIRST_WAIT * 2 ** min(host.failures - 1, 20)) * _jitter.uniform(0.5, 1)
                host.rests_until = now + max(wait, min(problem.wait or 0.0, self.patience))
                log.info("%s: %s; asking again in %.1f s", host, problem, host.rests_until - now)
            host.doubted = host.doubted or problem.away
            return max(0.0, host.rests_until - now)

    def _recognise(self, host: Host) -> None:
        with host.checking:
            if host.doubted:
                try:
                    self.verify(host)
                except Unanswered as problem:
                    if len(self.hosts) == 1:
                        raise
                    raise _Passing(str(problem)) from None
                host.doubted = False

    def _exchange(self, host: Host, method: str, url: str, content: dict[str, Any] | None, most: int) -> bytes:
        """The body of an answer with code 200. _Passing, Refused: there is none."""
        import requests

        from kdtrain.net.request import LATER, reason, retry_after

        session = self._session(url)
        session.until = time.monotonic() + self.timeout
        try:
            with session.request(
                method,
                url,
                data=None if content is None else msgspec.json.encode(content),
                headers={"Content-Type": "application/json"},
                timeout=(CONNECT, self.timeout),
            ) as answer:
                if answer.is_redirect:
                    target = shown_address(quoted(answer.headers.get("Location", "")))
                    raise Refused(answer.status_code, f"it redirects to {target}, which is not followed")
                found = _body(answer, most)
                code, wait = answer.status_code, retry_after(answer)
        except (requests.RequestException, requests.exceptions.BaseHTTPError) as error:
            words, kind = reason(error)
            if kind == "final":
                raise Refused(0, words) from None
            raise _Passing(_LATE if time.monotonic() >= session.until else words) from None
        except UsageError:
            raise
        except ValueError as error:  # its text may quote the key
            raise Refused(0, f"the request cannot be sent ({type(error).__name__})") from None
        self._sessions.put(session)  # one that failed is not used again
        if code == 200:
            return found
        words = quoted(_words_of(found)) or "nothing more"
        if code in LATER or code >= 500:
            raise _Passing(f"it answers {code}: {words}", wait, away=code != 429)
        raise Refused(code, words)

    def _session(self, url: str) -> "Session":
        try:
            session = self._sessions.get_nowait()
        except queue.Empty:
            from kdtrain.net.request import Session

            session, key = Session(), self._key
            session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True

            if key is not None:
                session.headers["Authorization"] = f"Bearer {key}"
        # Proxies of the environment reach no host inside, and through http they would read the key.
        session.trust_env = not is_inside(url) and (self._key is None or urlsplit(url).scheme == "https")
        return session


def _key() -> str | None:
    """The API key. UsageError: it is none, which its text must not show."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"{KEY} holds spaces or characters that no key has; set it to the key alone")
    return key or None


def quoted(text: str, most: int = _WORDS) -> str:
    """A server's words as they are kept and shown: printable, at most so many characters, and without the API key.

    The key is found however its characters are escaped: by JSON, also twice, in an address, or in HTML.
    """
    if len(key := _key() or "") > _SHORT:
        forms = ({each, html.escape(each), f"%{ord(each):02x}", f"u{ord(each):04x}"} for each in key)
        pattern = r"\\*".join(f"(?:{'|'.join(map(re.escape, each))})" for each in forms)
        text = re.sub(pattern, "...", text, flags=re.IGNORECASE)
    return printable(" ".join(text.split()))[:most]


def _body(answer: "requests.Response", most: int) -> bytes:
    """At most `most` bytes; of an error `SMALL`, and no more is read."""
    from kdtrain.net.request import body

    content, failed = bytearray(), answer.status_code != 200
    if (packed := answer.headers.get("Content-Encoding", "").lower()) not in ("", "identity"):
        if failed:
            return b""
        raise Wrong(f"a body that is packed ({quoted(packed, 40)}), which was not requested")
    for piece in body(answer):
        content += piece
        if failed and len(content) > SMALL:
            break
        if len(content) > most:
            raise Wrong(f"more than {most:,} bytes")
    return bytes(content)


def _typed(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        words = quoted(str(error)).replace("`", "")
        raise Wrong(f"what is not the requested JSON ({_HTML if _is_page(content) else words})") from None


def _words_of(content: bytes) -> str:
    """A server's own words for an error, as they came."""
    with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        found = msgspec.json.decode(content, type=_Error).error
        return found if isinstance(found, str) else found.message
    return _HTML if _is_page(content) else content[:SMALL].decode("utf-8", "replace")


def _is_page(content: bytes) -> bool:
    return content.lstrip()[:1] == b"<"
