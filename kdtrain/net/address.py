"""Where a cache lies that is not a folder here: a data set on the hub, or a folder that a web server shows.

    hf:datasets/ORG/NAME[@REVISION]     also hf:ORG/NAME, and hf://datasets/... as fsspec writes it
    https://HOST/FOLDER                 http:// to this machine only, or where KDTRAIN_ALLOW_HTTP=1

A manifest that comes over plain http may be anybody's on the way, and its digests with it; that is why it takes a
choice. An address is looked at without the network and without anything heavy.
"""

import ipaddress
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from kdtrain.errors import RunError, UsageError, shown_address

ALLOW_HTTP = "KDTRAIN_ALLOW_HTTP"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?=//)|(hf):", re.ASCII)
_LOST_SLASH = re.compile(r"^(https?|hf|s3|gs|file):/(?=[^/])", re.IGNORECASE)
_REPOSITORY = re.compile(r"(?:datasets/)?([\w][\w.-]{0,95}/[\w][\w.-]{0,95})(?:@([\w][\w./-]{0,199}))?", re.ASCII)
_SHAPE = "hf:datasets/ORG/NAME[@REVISION] or https://HOST/FOLDER"
_LONGEST = 2000


class Unreachable(RunError):
    """The server did not answer, however often it was tried."""


@dataclass(frozen=True)
class Address:
    """The address of a cache elsewhere. Its text is canonical: equal for two spellings of one place."""

    text: str
    repository: str | None = None
    """ORG/NAME on the hub; None: `text` is a URL."""
    revision: str = "main"

    def __str__(self) -> str:
        return self.text

    def at(self, commit: str) -> "Address":
        """Return the address of the same data set at one commit."""
        return Address(f"hf:datasets/{self.repository}@{commit}", self.repository, commit)

    def url(self, name: str) -> str:
        """Return the URL of the file `name`, a path inside of a cache that a web server shows."""
        return f"{self.text}/{quote(name)}"


def parse_address(where: Path | str) -> Address | None:
    """Parse `where` as an address; None for a path. UsageError: it is meant as an address, but cannot be read."""
    # pathlib makes one slash of two
    text = where if isinstance(where, str) else _LOST_SLASH.sub(r"\1://", os.fspath(where))
    found = _SCHEME.match(text)
    if found is None:
        return None
    scheme = (found[1] or found[2]).lower()
    shown = shown_address(text)
    if len(text) > _LONGEST or not text.isprintable() or " " in text:
        raise UsageError(f"{shown}: an address has no spaces and at most {_LONGEST} characters; give {_SHAPE}")
    if scheme == "hf":
        return _hub(text[found.end() :].removeprefix("//").rstrip("/"), shown)
    if scheme in ("http", "https"):
        return _web(text, shown)
    raise UsageError(f"{shown}: caches are not read from {scheme}:; give {_SHAPE}, or a folder")


def _hub(rest: str, shown: str) -> Address:
    kind = rest.partition("/")[0]
    if kind in ("models", "spaces") and rest.count("/") > 1:
        raise UsageError(f"{shown}: a cache is a data set; give hf:datasets/ORG/NAME")
    found = _REPOSITORY.fullmatch(rest)
    if found is None or ".." in rest or (kind == "datasets" and rest.count("/") < 2):
        raise UsageError(f"{shown}: names no data set on the hub; give hf:datasets/ORG/NAME[@REVISION]")
    revision = found[2] or "main"
    suffix = "" if revision == "main" else f"@{revision}"
    return Address(f"hf:datasets/{found[1]}{suffix}", found[1], revision)


def _web(text: str, shown: str) -> Address:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{shown}: is not a URL ({error}); give {_SHAPE}") from None
    if not host:
        raise UsageError(f"{shown}: names no host; give {_SHAPE}")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{parts.scheme}://...@{host}: a password would end in logs; give the folder of a copy")
    if parts.query or parts.fragment:
        raise UsageError(f"{shown}: names of files are put behind it, so leave out what follows ? or #")
    if not is_allowed(text):
        raise UsageError(
            f"{shown}: http can be altered on the way, and with it the digests; give https://, "
            f"or set {ALLOW_HTTP}=1 if you trust the network"
        )
    path = parts.path.rstrip("/").removesuffix("/manifest.json")
    if ".." in path.split("/"):
        raise UsageError(f"{shown}: leads out of its folder; leave .. out")
    return Address(f"{parts.scheme.lower()}://{parts.netloc.lower()}{path}")


def is_allowed(url: str) -> bool:
    """Return True if a URL may be read: https, or http to this machine, to the hub of HF_ENDPOINT, or by choice."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return True
    endpoint = os.environ.get("HF_ENDPOINT", "")
    same = bool(endpoint) and urlsplit(endpoint)[:2] == parts[:2]
    address = _ip(url)
    here = parts.hostname == "localhost" if address is None else address.is_loopback
    return parts.scheme == "http" and (here or same or os.environ.get(ALLOW_HTTP) == "1")


def is_private(url: str) -> bool:
    """Return True if the host of a URL is written as this machine, or as one of a network that is not public."""
    if (address := _ip(url)) is None:
        host = (urlsplit(url).hostname or "").rstrip(".")
        return host == "localhost" or host.endswith(".localhost")
    return not (getattr(address, "ipv4_mapped", None) or address).is_global


def is_inside(url: str) -> bool:
    """Return True if the host of a URL is private, or has a name that no public host has."""
    host = urlsplit(url).hostname or ""
    # A name is taken as it stands: requests turns %2E and dots of other scripts into dots.
    named = _ip(url) is None and re.fullmatch(r"[\w.-]+", host, re.ASCII) is not None
    return is_private(url) or (named and ("." not in host or host.endswith((".local", ".internal", ".lan"))))


def _ip(url: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address as which systems read the host of a URL, 127.1 and 0x7f000001 too; None: it is a name."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    with suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.inet_aton(host))
    return None


def offline() -> bool:
    """Return True if the user wants no network (HF_HUB_OFFLINE)."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in names)


def no_network(endpoint: str) -> bool:
    """Return True if the hub's name is unknown here: its client would try for half a minute. A proxy may know it."""
    from urllib.request import getproxies  # imports an HTTP client: no mistake waits for it

    for wait in () if getproxies() else (1.0, 0.0):
        try:
            socket.getaddrinfo(urlsplit(endpoint).hostname, None)
            return False
        except OSError as error:
            time.sleep(wait if error.errno == socket.EAI_AGAIN else 0.0)
    return not getproxies()
