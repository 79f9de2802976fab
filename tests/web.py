"""A web server with ranges, ETags, redirects and faults on demand, and a stand-in of the hub, for tests of the network.

Only the standard library: clients are the real ones. `Web.fail(END, FAULT, times)` makes the next requests for paths
with that end fail; `Web.fired` has the faults that did. The hub keeps repositories, of data sets and of models, as
commits, each a whole tree, takes uploads through its LFS endpoints, and lets in a token `hf_good`.
"""

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_good"


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the waits between attempts, and shorten those for a byte."""
    monkeypatch.setattr("urllib3.util.retry.Retry.get_backoff_time", lambda _: 0.001)
    monkeypatch.setattr("kdtrain.net.request.IDLE", 1.0)


def with_hub(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the hub's real client to `url`, and let it keep what it fetches in `folder`."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    settings = {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    for name, value in {**settings, "HF_TOKEN_PATH": str(folder / "no-token")}.items():
        monkeypatch.setattr(constants, name, value)


class Repository:
    """A repository of the stand-in: commits in order, each a tree of files by path."""

    def __init__(self, private: bool = False, gated: bool = False) -> None:
        self.private, self.gated = private, gated
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.commit({".gitattributes": b""})

    def commit(self, files: dict[str, bytes], gone: Collection[str] = ()) -> str:
        """Add files in a commit, take others out, and return its name."""
        tree = {**self.commits[-1][1], **files} if self.commits else files
        tree = {path: content for path, content in tree.items() if path not in gone}
        name = hashlib.sha1(repr((len(self.commits), sorted(tree))).encode()).hexdigest()
        self.commits.append((name, tree))
        return name

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a revision."""
        if revision == "main":
            return self.commits[-1]
        return next((each for each in self.commits if each[0] == revision), None)


class Web:
    """A server on this machine. `root`: the folder that it shows; `hub`: repositories by ORG/NAME."""

    def __init__(self, root: Path | None = None) -> None:
        self.root, self.hub, self.objects = root, dict[str, Repository](), dict[str, bytes]()
        self.replaced: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.ranges: list[tuple[str, str | None]] = []
        self.uploads: list[str] = []
        self.authorized: list[str] = []
        self.passwords = 0
        self.fired: list[str] = []
        self._faults: list[list[Any]] = []
        self._lock = threading.Lock()
        web = self

        class Handler(_Handler):
            server_web = web

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def fail(self, end: str, fault: str, times: int = 1) -> None:
        """Let `times` requests for paths that end in `end` fail by `fault`."""
        self._faults.append([end, fault, times])

    def heal(self) -> None:
        """Forget all faults."""
        self._faults.clear()

    def fault(self, path: str) -> str:
        """Return the fault of this request, or an empty text."""
        with self._lock:
            self.requests.append(path)
            for each in self._faults:
                if path.endswith(each[0]) and each[2] > 0:
                    each[2] -= 1
                    self.fired.append(each[1])
                    return each[1]
        return ""

    def content(self, path: str) -> bytes | None:
        """Return the bytes of a path of the folder."""
        name = unquote(path).lstrip("/")
        if name in self.replaced:
            return self.replaced[name]
        found = None if self.root is None else self.root / name
        return found.read_bytes() if found is not None and found.is_file() else None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(root: Path | None = None) -> Iterator[Web]:
    """Start a server for the block."""
    web = Web(root)
    try:
        yield web
    finally:
        web.close()


class _Handler(BaseHTTPRequestHandler):
    server_web: Web
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        web, path = self.server_web, urlsplit(self.path).path
        fault = web.fault(path)
        web.passwords += self.headers.get("Authorization", "").startswith("Basic")
        web.ranges.append((path, self.headers.get("Range")))
        if self._failed(fault):
            return
        if (found := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)) is not None:
            return self._info(found[1], unquote(found[2] or "main"))
        if (found := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) is not None:
            return self._resolve(found[1], unquote(found[2]), unquote(found[3]))
        if path.startswith("/cdn/"):
            web.authorized += ["cdn"] * ("Authorization" in self.headers)
            return self._file(web.objects.get(path.removeprefix("/cdn/")), fault)
        if path == "/api/whoami-v2":
            return self._json({"name": "org", "type": "user", "orgs": []}) if self._known() else self._refuse(401)
        self._file(web.content(path), fault)

    do_HEAD = do_GET

    def _failed(self, fault: str) -> bool:
        """Answer by a fault that needs no file."""
        kind, _, rest = fault.partition(":")
        code, _, after = rest.partition("=")
        answers = {
            "later": lambda: self._empty(int(code), {"Retry-After": after}),
            "range": lambda: self._empty(206, {"Content-Range": rest}),
            "redirect": lambda: self._empty(302, {"Location": rest}),
            "loop": lambda: self._empty(302, {"Location": self.path}),
            "close": lambda: self._break(b""),
            "garbage": lambda: self._break(b"\x00\xff nonsense\r\n\r\n"),
            "drip headers": lambda: self._slowly(b"HTTP/1.1 200 OK\r\nX-Filler: " + b"x" * 1000, 1, 0.05),
        }
        if fault.isdecimal():
            self._empty(int(fault))
        elif kind in answers:
            answers[kind]()
        return fault.isdecimal() or kind in answers

    def _break(self, content: bytes) -> None:
        """Send this, and close the connection."""
        self.wfile.write(content)
        self.wfile.flush()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _slowly(self, content: bytes, piece: int, seconds: float) -> None:
        with suppress(OSError):
            for begin in range(0, len(content), piece):
                self.wfile.write(content[begin : begin + piece])
                self.wfile.flush()
                time.sleep(seconds)

    def _file(self, content: bytes | None, fault: str, more: dict[str, str] | None = None) -> None:
        if content is None:
            return self._empty(404)
        half = len(content) // 2
        changed = {
            "flip": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :] if content else b"",
            "html": b"<html>please log in</html>",
            "cut": content[:half],
            "empty": b"",
            "more": content + b"x" * 1000,
        }
        content = changed.get(fault, content)
        headers = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Accept-Ranges": "bytes", **(more or {})}
        start, code = 0, 200
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted is not None and fault != "whole":
            start, code = int(wanted[1]), 206
            if start >= len(content):
                return self._empty(416, {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {0 if fault == 'begin' else start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        headers |= {"Content-Encoding": "gzip"} if fault == "gzip" else {}
        if fault not in ("endless", "unsized"):
            headers["Content-Length"] = "9" * 5000 if fault == "digits" else str(len(body))
        if fault in ("endless", "unsized", "digits"):
            headers["Connection"] = "close"
            self.close_connection = True
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        if fault == "drop":
            return self._break(body[: max(1, len(body) // 2)])
        if fault == "stall":
            self._slowly(body[: len(body) // 2], 2**20, 3)
            self.close_connection = True
            return None
        if fault in ("slow", "drip"):
            return self._slowly(body, *((4096, 0.02) if fault == "slow" else (1, 0.05)))
        self.wfile.write(body + bytes(2**21 if fault == "endless" else 0))
        return None

    # The hub --------------------------------------------------------------------------------------------------------

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _seen(self, name: str, code: str = "RepoNotFound") -> Repository | None:
        """Return a repository that this client may see; answer and return None for another."""
        repository = self.server_web.hub.get(name)
        if repository is None or (repository.private and not self._known()):
            self._refuse(404 if self._known() else 401, code)
        elif repository.gated and not self._known():
            self._refuse(403, "GatedRepo")
        else:
            return repository
        return None

    def _info(self, name: str, revision: str) -> None:
        if (repository := self._seen(name)) is None:
            return None
        if (found := repository.at(revision)) is None:
            return self._refuse(404, "RevisionNotFound")
        siblings = [{"rfilename": path} for path in found[1]]
        return self._json({"id": name, "sha": found[0], "private": repository.private, "siblings": siblings})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        self.server_web.authorized += ["hub"] * self._known()
        if (repository := self._seen(name)) is None:
            return None
        if (found := repository.at(revision)) is None:
            return self._refuse(404, "RevisionNotFound")
        if (content := found[1].get(path)) is None:
            return self._refuse(404, "EntryNotFound")
        oid, commit = hashlib.sha256(content).hexdigest(), {"X-Repo-Commit": found[0]}
        if not path.endswith(".h5"):
            return self._file(content, "", commit)
        self.server_web.objects[oid] = content
        place = f"{self.server_web.url.replace('127.0.0.1', 'localhost')}/cdn/{oid}"
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        return self._empty(302, {"Location": place, **commit, **linked})

    def do_POST(self) -> None:
        web, path = self.server_web, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._failed(web.fault(path)):
            return None
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if not self._known():
            return self._refuse(401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'org'}/{asked['name']}"
            url = f"{web.url}/{'datasets/' if asked.get('type') == 'dataset' else ''}{name}"
            if name in web.hub:
                return self._json({"error": "it exists", "url": url}, 409)
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            web.hub[name] = Repository(private=private)
            return self._json({"url": url, "name": name})
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body)["objects"])
        name = "/".join(path.split("/")[3:5])
        if (repository := self._seen(name)) is None:
            return None
        if "/preupload/" in path:
            files = [
                {"path": each["path"], "uploadMode": _mode(each["path"]), "shouldIgnore": False, "oid": None}
                for each in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if "/commit/" in path:
            return self._commit(repository, name, body)
        return self._empty(404)

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        web, answers = self.server_web, []
        for each in objects:
            there = each["oid"] in web.objects
            action = {"actions": {"upload": {"href": f"{web.url}/lfs/{each['oid']}"}}}
            answers.append({**each, **({} if there else action)})
        return self._json({"transfer": "basic", "objects": answers})

    def do_PUT(self) -> None:
        web, path = self.server_web, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._failed(web.fault(path)):
            return None
        oid = path.removeprefix("/lfs/")
        assert hashlib.sha256(body).hexdigest() == oid
        web.objects[oid] = body
        web.uploads.append(oid)
        return self._empty(200)

    def _commit(self, repository: Repository, name: str, body: bytes) -> None:
        files, gone = {}, []
        for line in body.decode().splitlines():
            each = json.loads(line)
            if each["key"] == "file":
                files[each["value"]["path"]] = base64.b64decode(each["value"]["content"])
            elif each["key"] == "lfsFile":
                files[each["value"]["path"]] = self.server_web.objects[each["value"]["oid"]]
            elif each["key"] == "deletedFile":
                gone.append(each["value"]["path"])
        commit = repository.commit(files, gone)
        url = f"{self.server_web.url}/datasets/{name}/commit/{commit}"
        return self._json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _refuse(self, code: int, name: str | None = None) -> None:
        self._empty(code, {"X-Error-Code": name} if name else {})

    def _json(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self._empty(code, {"Content-Type": "application/json"}, body)

    def _empty(self, code: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".h5", ".parquet", ".safetensors")) else "regular"
