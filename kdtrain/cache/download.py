"""The one way in which a file comes over the network: bounded, resumed, retried, and checked before it has a name.

A download goes into a part, which a later one continues (Range), if the server still has the same (If-Range and its
ETag); a changed ETag starts anew. Drops, short answers, time-outs, 408, 429 and 5xx are tried again, later each time,
or when the server says (Retry-After). Bytes beyond the stated size end it at once, and a SHA-256 that is not the stated
one makes it start anew, once. Redirects lead to https, or from this machine to this machine, and take no password to
another host; from a public host they do not lead into a private network.
"""

import email.utils
import hashlib
import logging
import os
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from kdtrain import faults
from kdtrain.cache.address import is_allowed, is_private
from kdtrain.errors import RunError, UsageError, printable, shown_address, writing
from kdtrain.files import open_regular, publish_json, read_sealed, remove_file

if TYPE_CHECKING:
    import requests

log = logging.getLogger("kdtrain")

PATIENCE = 6
"""Failures in a row after which a download is given up."""
WAIT = 0.5
"""Seconds before the second attempt; they double."""
CONTACTS = 3
"""Failures in a row to reach the server after which a first contact is given up."""
LONGEST_WAIT = 300.0
"""Seconds that a server may ask for."""
TIMEOUT = (10.0, 30.0)
"""Seconds for a connection, and between two pieces of an answer."""
SLOWEST = 2**16 / 60
"""Bytes a second, over a minute, below which a server counts as silent."""
_PIECE = 2**18
_REDIRECTS = 5
LATER = (408, 425, 429, 500, 502, 503, 504)
"""Codes of answers that may be another one later."""
_LENGTH = r"[0-9]{1,18}"
_CONTENT_RANGE = re.compile(rf"bytes ({_LENGTH})-{_LENGTH}/({_LENGTH}|\*)")


class Unreachable(RunError):
    """The server did not answer, however often it was asked."""


class _Passing(Exception):
    """A failure that may pass; `wait`: the seconds that the server asks for; `reached`: there is a server."""

    def __init__(self, text: str, wait: float | None = None, *, reached: bool = True) -> None:
        super().__init__(text)
        self.wait, self.reached = wait, reached


def fetch(
    url: str,
    part: Path,
    *,
    what: str,
    most: int,
    sha256: str | None = None,
    exact: bool = False,
    headers: Mapping[str, str] | None = None,
    patience: int = PATIENCE,
    contacts: int = PATIENCE,
) -> None:
    """Bring `url` into the file `part`, behind the bytes that are there, and check it.

    Args:
        what: names the file in messages.
        most: bytes that it may have. exact: it has exactly these.
        sha256: of the file; None for one that carries its own seal.
        headers: for the first host only.
        patience: failures in a row before it is given up. contacts: the same, if no server was reached.

    Raises:
        Unreachable: no answer. UsageError: it is not there, or not to be had without a permission.
        RunError: it is another file than was stated, or the disk refuses.
    """
    failed, anew = 0, False
    largest = size_of(part)
    while True:
        try:
            _attempt(url, part, what, most, exact, headers or {})
            if sha256 is None or _digest(part) == sha256:
                return
        except _Passing as problem:
            have = size_of(part)
            gained = have - largest  # what a server makes it drop is no progress
            failed = 1 if gained > min(0.01 * most, 0.1 * (most - largest)) else failed + 1
            largest = max(largest, have)
            if failed >= (patience if problem.reached else min(patience, contacts)):
                raise Unreachable(
                    f"{what} cannot be fetched: {problem}; tried {failed} times. What is here stays; run the same "
                    "command again"
                ) from None
            seconds = problem.wait if problem.wait is not None else WAIT * 2**failed * random.uniform(0.5, 1)
            log.info("%s: %s; trying again in %.1f s", what, problem, seconds)
            time.sleep(seconds)
            continue
        _drop(part)
        if anew:
            raise RunError(
                f"{what} is not what the manifest states (its SHA-256 differs), and was not kept: it was altered, or "
                "the cache was replaced there; name a revision, or ask its author"
            )
        anew, largest = True, 0


def _attempt(url: str, part: Path, what: str, most: int, exact: bool, headers: Mapping[str, str]) -> None:
    import requests

    from kdtrain.cache.session import Session

    have, note = size_of(part), part.with_name(f"{part.name}.json")
    tag = _tag(note) if have else None
    if have > most or (have == most and not exact):
        _drop(part)
        have, tag = 0, None
    if have == most:
        return
    asked = {**headers, "Accept-Encoding": "identity"}
    if have:
        asked |= {"Range": f"bytes={have}-"} | ({"If-Range": tag} if tag else {})
    try:
        with Session() as session, _ask(session, url, asked, what) as answer:
            start = _beginning(answer, have, tag, what, most, exact)
            if start is None:
                _drop(part)
                raise _Passing("the server has another file now")
            _note(note, answer)
            _receive(answer, part, start, what, most, exact)
    except (requests.RequestException, requests.exceptions.BaseHTTPError) as error:
        words, kind = reason(error)
        if kind == "final":
            raise Unreachable(f"{what} cannot be fetched: {words}. What is here stays") from None
        raise _Passing(words, reached=kind != "far") from error


def _ask(session: "requests.Session", url: str, headers: dict[str, str], what: str) -> "requests.Response":
    """The answer at the end of the redirects. UsageError: it will not be another one later."""
    import requests

    inside = is_private(url)
    for _ in range(_REDIRECTS + 1):
        try:
            answer = session.get(url, headers=headers, stream=True, timeout=TIMEOUT, allow_redirects=False)
            target = urljoin(url, answer.headers.get("Location", ""))
            read = is_allowed(target) and (urlsplit(url).scheme != "https" or urlsplit(target).scheme == "https")
            hidden = not inside and is_private(target)  # what only this machine reaches is not a stranger's to name
        except (requests.RequestException, UsageError):
            raise
        except ValueError as error:
            raise UsageError(f"{what}: the server redirects to no URL ({printable(str(error))[:200]})") from None
        if not answer.is_redirect:
            return _refuse(answer, what)
        answer.close()
        if not read:
            raise UsageError(f"{what}: the server redirects to {shown_address(target)}, which is not read; give https")
        if hidden:
            raise UsageError(
                f"{what}: the server redirects to {shown_address(target)}, which is not a public host; ask its author"
            )
        if urlsplit(target)[:2] != urlsplit(url)[:2]:
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        url = target
    raise UsageError(f"{what}: the server redirects more than {_REDIRECTS} times; ask its author")


def _refuse(answer: "requests.Response", what: str) -> "requests.Response":
    code = answer.status_code
    if code in (200, 206, 416):
        return answer
    answer.close()
    if code in LATER:
        raise _Passing(f"the server answers {code}", retry_after(answer.headers.get("Retry-After")))
    if code in (401, 403):
        raise UsageError(
            f"{what}: the server refuses it ({code}): ask for access, and log in (on the hub: hf auth login)"
        )
    if code in (404, 410):
        raise UsageError(f"{what} is not there ({code}); check the address")
    raise UsageError(f"{what}: the server answers {code}; check the address")


def retry_after(text: str | None) -> float | None:
    """Seconds that a server asks to wait, by its header Retry-After, at most `LONGEST_WAIT`; None: it does not say."""
    if text is None:
        return None
    if re.fullmatch(r"\d{1,9}", text):
        return min(float(text), LONGEST_WAIT)
    try:
        then = email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(0.0, then - time.time()), LONGEST_WAIT)


def _beginning(
    answer: "requests.Response", have: int, tag: str | None, what: str, most: int, exact: bool
) -> int | None:
    """The byte at which the answer begins; None if what is here is of another file.

    RunError: the file has another size.
    """
    if answer.status_code == 416:
        return None
    total, start = _length(answer), 0
    if answer.status_code == 206:
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != have or (tag and answer.headers.get("ETag", tag) != tag):
            return None
        start, total = have, None if found[2] == "*" else int(found[2])
    if total is not None and (total > most or (exact and total != most)):
        raise RunError(
            f"{what} has {total:,} bytes there instead of {'' if exact else 'at most '}{most:,}: it was altered, or "
            "the cache was replaced there; name a revision, or ask its author"
        )
    return start


def _length(answer: "requests.Response") -> int | None:
    """Bytes that an answer states; None if it states none that can be."""
    stated = answer.headers.get("Content-Length", "")
    return int(stated) if re.fullmatch(_LENGTH, stated) else None


def _receive(answer: "requests.Response", part: Path, start: int, what: str, most: int, exact: bool) -> None:
    have, since, counted = start, time.monotonic(), start
    with writing(part):
        part.touch()
        os.truncate(part, start)
        file = open(part, "r+b")  # noqa: SIM115  (closed below; an error of the network is none of the disk)
    with file:
        file.seek(start)
        while piece := read(answer, _PIECE):
            have += len(piece)
            if have > most:
                _drop(part)
                raise RunError(f"{what}: the server sends more than {most:,} bytes; ask its author")
            with writing(part):
                faults.point("cache.fetch.bytes", len(piece))
                file.write(piece)
                file.flush()
            if (seconds := time.monotonic() - since) > 60:
                if (have - counted) / seconds < SLOWEST:
                    raise _Passing("the server sends next to nothing")
                since, counted = time.monotonic(), have
    if (exact and have < most) or have - start < (_length(answer) or 0):
        raise _Passing(f"the answer ended after {have:,} bytes")


def read(answer: "requests.Response", most: int) -> bytes:
    """What has arrived of a body, without waiting for a whole piece, and never unpacked; empty at its end."""
    raw: Any = answer.raw
    return raw.read1(most, decode_content=False) if hasattr(raw, "read1") else raw.read(2**12, decode_content=False)


def _tag(note: Path) -> str | None:
    try:
        found = read_sealed(note).get("etag")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, str) else None


def _note(note: Path, answer: "requests.Response") -> None:
    """Keep the strong ETag of an answer."""
    tag = answer.headers.get("ETag", "")
    if re.fullmatch(r'"[\x21\x23-\x7e]{1,200}"', tag):
        if _tag(note) != tag:
            publish_json(note, {"etag": tag}, "cache.note")
    else:
        with writing(note):
            remove_file(note)


def _drop(part: Path) -> None:
    with writing(part):
        remove_file(part)
        remove_file(part.with_name(f"{part.name}.json"))


def size_of(part: Path) -> int:
    """Bytes of a file that another process may be about to rename; 0 if it is gone."""
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


def _digest(part: Path) -> str:
    with open_regular(part) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_REASONS = (
    ("certificate", "final", "its certificate is not valid; check the address"),
    ("wrong_version_number", "final", "the server does not speak https there; check the address"),
    ("http_request", "final", "the server does not speak https there; check the address"),
    ("ssl: ", "", "the encrypted connection failed"),
    ("resol", "far", "the name of the server is not known; is there a connection?"),
    ("name or service", "far", "the name of the server is not known; is there a connection?"),
    ("nodename", "far", "the name of the server is not known; is there a connection?"),
    ("refused", "far", "the connection was refused"),
    ("unreachable", "far", "the network does not reach the server"),
    ("no route", "far", "the network does not reach the server"),
    ("connecttimeout", "far", "the server does not answer"),
    ("timed out", "", "the server does not answer"),
    ("timeout", "", "the server does not answer"),
    ("reset", "", "the connection was reset"),
    ("incompleteread", "", "the answer broke off"),
    ("closed", "", "the server closed the connection"),
    ("disconnected", "", "the server closed the connection"),
)
"""What the text of an error contains -> `final`: it will not pass; `far`: no server was reached; and words for it."""


def reason(error: BaseException) -> tuple[str, str]:
    """An error of a connection in words, and its kind, see `_REASONS`."""
    text = f"{type(error).__name__} {error}".lower()
    found = next(((words, kind) for known, kind, words in _REASONS if known in text), None)
    return found or (f"the connection failed ({type(error).__name__})", "")


def offline() -> bool:
    """Whether the user wants no network (HF_HUB_OFFLINE)."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in names)
