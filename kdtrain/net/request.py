"""One way over the network: bounded in size and time, and retried.

`Session` is a session of requests whose answers end at a deadline, headers and body, and that sends no password of
this machine. `download` fetches one file: it resumes a part (Range), retries what may pass (drops, short answers,
time-outs, 408, 425, 429, 5xx; urllib3's `Retry` counts and waits) and refuses bytes beyond the stated size. Redirects
lead to https, or from this machine to this machine, take no key to another host, and do not lead from a public host
into a private network.

What it gives up: a part of a file that was replaced meanwhile is found by its caller, who compares the whole file.
"""

import http.client
import io
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ConnectTimeoutError, HTTPError, InvalidHeader, MaxRetryError, ProtocolError
from urllib3.util.retry import Retry

from kdtrain import faults
from kdtrain.errors import RunError, UsageError, log, printable, shown_address, writing
from kdtrain.files import remove_file
from kdtrain.net.address import ALLOW_HTTP, Unreachable, is_allowed, is_inside, is_private

LATER = (408, 425, 429, 500, 502, 503, 504)
"""Codes of answers that may be another one later."""
RETRY = Retry(total=5, backoff_factor=0.5, backoff_jitter=0.5, backoff_max=30, status_forcelist=LATER)
"""Failures in a row that a download survives."""
CONTACT = RETRY.new(connect=2)
"""The same for the first contact with a server, which may not exist."""
BRIEF = RETRY.new(total=1)
"""Where there is something to fall back on."""
CONNECT, IDLE = 10.0, 30.0
"""Seconds for a connection, and for one read of an answer."""
SLOWEST = 2**16 / 60
"""Bytes a second below which a server counts as silent, after the first minute."""
_MINUTE = 60.0
_LONGEST_WAIT = 300.0  # seconds that a server may ask for
_PIECE = 2**18
_REDIRECTS = 5
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")


class Passing(Exception):
    """A failure that may pass. wait: seconds that the server asks to wait. far: no server was reached."""

    def __init__(self, text: str, wait: float | None = None, far: bool = False) -> None:
        super().__init__(text)
        self.wait, self.far = wait, far


class Session(requests.Session):
    """A session whose answers end when the clock (`time.monotonic`) shows `until`, and that reads no body by itself."""

    until = math.inf

    def __init__(self) -> None:
        super().__init__()
        self.auth = lambda request: request  # keeps requests from sending what ~/.netrc has
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter(self))

    def request(self, method: Any, url: Any, *args: Any, **options: Any) -> requests.Response:
        """Send a request as `requests` does, by default without redirects or compression, and as a stream."""
        options["headers"] = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
        bounds = {"stream": True, "timeout": (CONNECT, IDLE)}
        return super().request(method, url, *args, **{**bounds, **options, "allow_redirects": False})

    @staticmethod
    def refuse_plain(url: str, what: str) -> None:
        """Raise UsageError if `what` would go over a network that is not private, where anybody on the way reads it."""
        if urlsplit(url).scheme == "http" and not is_inside(url) and os.environ.get(ALLOW_HTTP) != "1":
            raise UsageError(
                f"{what} would be sent unencrypted; give https://, or set {ALLOW_HTTP}=1 if you trust the network"
            )

    def exchange(
        self, method: str, url: str, *, most: int, key: str | None = None, **options: Any
    ) -> tuple[requests.Response, bytes]:
        """Send a request; return the answer and its body, of a redirect none.

        most: bytes of the body; a longer one is longer by some, and its rest is not read. key: authorizes the request.

        Passing: there is no answer, and another try may get one. Unreachable: none would.
        """
        # Proxies of the environment reach no host inside, and through http they would read the key.
        self.trust_env = not is_inside(url) and (key is None or urlsplit(url).scheme == "https")
        if key is not None:
            options["headers"] = {**options["headers"], "Authorization": f"Bearer {key}"}
        try:
            with self.request(method, url, **options) as answer:
                found = bytearray()
                for piece in () if answer.is_redirect else body(answer):
                    found += piece
                    if len(found) > most:
                        break
                return answer, bytes(found)
        except (requests.RequestException, requests.exceptions.BaseHTTPError) as error:
            words, kind = reason(error)
            if kind == "final":
                raise Unreachable(words) from None
            words = "the answer takes too long" if time.monotonic() >= self.until else words
            raise Passing(words) from None

    @staticmethod
    def retry_after(answer: requests.Response) -> float | None:
        """Return the seconds that a server asks to wait, by its header Retry-After, at most 300; None: none."""
        try:
            found = RETRY.parse_retry_after(answer.headers.get("Retry-After", ""))
        except (InvalidHeader, ValueError, OverflowError):
            return None
        return min(max(0.0, found), _LONGEST_WAIT)

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return None: given a target, requests reads a redirect's whole body, of any size, even unfollowed."""


class _Adapter(HTTPAdapter):
    """Makes connections whose answers are read through `_Until`."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **options)
        if "ConnectionCls" not in vars(pool):
            session = self._session

            class Answer(http.client.HTTPResponse):
                def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
                    super().__init__(sock, *args, **options)
                    self.fp = io.BufferedReader(_Until(self.fp.detach(), sock, session))  # type: ignore[attr-defined]

            pool.ConnectionCls = type("Bounded", (pool.ConnectionCls,), {"response_class": Answer})
        return pool

    def cert_verify(self, *args: Any, **options: Any) -> None:
        try:
            super().cert_verify(*args, **options)
        except OSError as error:
            raise UsageError(f"{printable(str(error))}; set REQUESTS_CA_BUNDLE to a file of certificates") from None


class _Until(io.RawIOBase):
    """Reads the bytes of a connection until the session's deadline, while a time-out of requests begins anew at each
    byte."""

    def __init__(self, raw: io.RawIOBase, sock: Any, session: Session) -> None:
        self._raw, self._sock, self._session = raw, sock, session

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._session.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(min(left, IDLE))
        return self._raw.readinto(buffer)  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        self._raw.close()
        super().close()


def body(answer: requests.Response) -> Iterator[bytes]:
    """Yield the bytes of a body as they arrive, without waiting for a whole piece, and never unpacked."""
    raw: Any = answer.raw
    read = raw.read1 if hasattr(raw, "read1") else lambda most, **options: raw.read(min(most, 2**12), **options)
    while found := read(_PIECE, decode_content=False):
        yield found


def pause(retry: Retry, problem: str, what: str, *, wait: float | None = None, far: bool = False) -> Retry:
    """Wait before another attempt, and return the remaining `retry`. Unreachable: nothing remains.

    wait: seconds that the server asks for. far: no server was reached.
    """
    error = (ConnectTimeoutError if far else ProtocolError)(problem)
    try:
        retry = retry.increment("GET", error=error)
    except MaxRetryError:
        times = f"; tried {len(retry.history) + 1} times" if retry.history else ""
        raise Unreachable(f"{what}: {problem}{times}. What is here stays; run the same command again") from None
    seconds = retry.get_backoff_time() if wait is None else wait
    log.info("%s: %s; trying again in %.1f s", what, problem, seconds)
    time.sleep(seconds)
    return retry


def download(
    url: str,
    part: Path,
    *,
    what: str,
    most: int,
    exact: bool = False,
    retry: Retry = RETRY,
) -> None:
    """Download `url` into the file `part`, after the bytes that it has; its content is for the caller to check.

    Args:
        what: names the file in messages.
        most: bytes that it may have. exact: it has exactly these.
        retry: failures in a row before it is given up.

    Raises:
        Unreachable: no answer. UsageError: it is not there, or needs a permission.
        RunError: it has another size than was stated, or the disk refuses.
    """
    left = retry
    largest = _size(part)
    while True:
        try:
            with Session() as session:
                return _attempt(session, url, part, what, most, exact)
        except Passing as problem:
            gained = _size(part) - largest  # what a server takes back is no progress
            if gained > min(0.01 * most, 0.1 * (most - largest)):
                left = retry
                largest = largest + gained
            left = pause(left, str(problem), f"{what} cannot be fetched", wait=problem.wait, far=problem.far)


def _attempt(session: Session, url: str, part: Path, what: str, most: int, exact: bool) -> None:
    have = _size(part)
    if have > most or (have == most and not exact):
        have = 0
    if have == most:
        return
    session.until = time.monotonic() + _MINUTE
    try:
        with _follow(session, url, {"Range": f"bytes={have}-"} if have else {}, what) as answer:
            stated = answer.headers.get("Content-Range", "")
            raw = cast(Any, answer.raw)
            total: int | None = raw.length_remaining
            if answer.status_code == 206 and (found := _RANGE.fullmatch(stated)) and int(found[1]) == have:
                total = None if found[2] == "*" else int(found[2])
            elif answer.status_code != 200:
                with writing(part):
                    remove_file(part)
                raise Passing("the server has another file now")
            else:
                have = 0
            if total is not None:
                refuse_size(what, total, most, exact)
            start = have
            began = time.monotonic()
            with writing(part):
                part.touch()
                os.truncate(part, start)
                file = open(part, "ab")  # noqa: SIM115  (closed below; an error of the network is none of the disk)
            with file:
                for piece in body(answer):
                    have += len(piece)
                    session.until = began + _MINUTE + (have - start) / SLOWEST
                    if have > most:
                        raise RunError(f"{what}: the server sends more than {most:,} bytes; ask its author")
                    with writing(part):
                        faults.point("cache.fetch.bytes", len(piece))
                        file.write(piece)
                        file.flush()
            if exact and have < most:
                raise Passing(f"the answer ended after {have:,} bytes")
    except (OSError, HTTPError) as error:  # those of requests are OSErrors; writing has turned those of the disk
        words, kind = reason(error)
        if kind == "final":
            raise Unreachable(f"{what} cannot be fetched: {words}. What is here stays") from None
        raise Passing(words, far=kind == "far") from error


def _follow(session: Session, url: str, headers: Mapping[str, str], what: str) -> requests.Response:
    """Return the answer at the end of the redirects. UsageError: a later attempt would fail as well."""
    inside = is_private(url)
    for _ in range(_REDIRECTS + 1):
        try:
            answer = session.get(url, headers=headers)
            target = urljoin(url, answer.headers.get("Location", ""))
            read = is_allowed(target) and (urlsplit(url).scheme != "https" or urlsplit(target).scheme == "https")
            hidden = not inside and is_private(target)  # what only this machine reaches is not a stranger's to name
        except (requests.RequestException, UsageError):
            raise
        except ValueError as error:
            raise UsageError(f"{what}: the server redirects to no URL ({printable(str(error))[:200]})") from None
        if (code := answer.status_code) in (200, 206, 416):
            return answer
        answer.close()
        if code in LATER:
            raise Passing(f"the server answers {code}", session.retry_after(answer))
        if code in (401, 403):
            raise UsageError(
                f"{what}: the server refuses it ({code}), and no password is sent; give the folder of a copy"
            )
        if code in (404, 410):
            raise UsageError(f"{what} is not there ({code}); check the address")
        if not answer.is_redirect:
            raise UsageError(f"{what}: the server answers {code}; check the address")
        if not read:
            raise UsageError(f"{what}: the server redirects to {shown_address(target)}, which is not read; give https")
        if hidden:
            raise UsageError(
                f"{what}: the server redirects to {shown_address(target)}, which is not a public host; ask its author"
            )
        url = target
    raise UsageError(f"{what}: the server redirects more than {_REDIRECTS} times; ask its author")


def refuse_size(what: str, total: int, most: int, exact: bool) -> None:
    """Raise RunError if a file has another size elsewhere than the manifest states."""
    if total > most or (exact and total != most):
        raise RunError(
            f"{what} has {total:,} bytes there instead of {'' if exact else 'at most '}{most:,}: it was altered, or "
            "the cache was replaced there; name a revision, or ask its author"
        )


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


_REASONS = (
    ("certificate", "final", "its certificate is not valid; check the address"),
    ("wrong_version_number|http_request", "final", "the server does not speak https there; check the address"),
    ("ssl: ", "", "the encrypted connection failed"),
    ("resol|name or service|nodename", "far", "the name of the server is not known; is there a connection?"),
    ("refused", "far", "the connection was refused"),
    ("unreachable|no route", "far", "the network does not reach the server"),
    ("connecttimeout", "far", "the server does not answer"),
    ("timed out|timeout", "", "the server does not answer"),
    ("reset", "", "the connection was reset"),
    ("incompleteread", "", "the answer broke off"),
    ("closed|disconnected", "", "the server closed the connection"),
)
"""What the text of an error matches -> `final`: it will not pass; `far`: no server was reached; and words for it."""


def reason(error: BaseException) -> tuple[str, str]:
    """Describe an error of a connection in words, and return its kind, see `_REASONS`."""
    text = f"{type(error).__name__} {error}".lower()
    found = next(((words, kind) for known, kind, words in _REASONS if re.search(known, text)), None)
    return found or (f"the connection failed ({type(error).__name__})", "")
