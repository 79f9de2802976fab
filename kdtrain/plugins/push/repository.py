"""A repository of the hub: what is in it, and one commit that names all that was sent."""

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdtrain.errors import UsageError
from kdtrain.files import MEDIUM
from kdtrain.net.address import Address
from kdtrain.net.hub import LOGIN, api, ask, fetch_file

log = logging.getLogger("kdtrain")

CARD = "README.md"


class Repository(NamedTuple):
    """A repository of the hub, which `main` has made if it was missing."""

    address: Address
    kind: str
    """dataset or model."""
    names: Collection[str]
    """The files in it."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None: there is none."""
        if name not in self.names:
            return None
        return fetch_file(self.address, name, most=MEDIUM, kind=self.kind).read_bytes()

    def keeps_card(self, is_own: Callable[[bytes], bool]) -> bool:
        """Whether there is a card that kdtrain did not write, which stays."""
        card = self.read(CARD)
        if stays := card is not None and not is_own(card):
            log.warning("%s has a %s that kdtrain did not write; it stays as it is", self.address, CARD)
        return stays


class Upload(NamedTuple):
    """What is published."""

    files: Mapping[str, Path]
    """By their paths in the repository."""
    message: str
    result: dict[str, object]
    """What is shown of it."""
    remove: Collection[str] = ()
    """Paths in the repository of files that go in the same commit."""


def make_repository(address: Address, kind: str, private: bool) -> tuple[str, set[str]]:
    """The page of the repository, made if it is not there, and the files in it.

    UsageError: no token, no permission, or it is public where a private one is requested. Unreachable: no answer.
    """
    from huggingface_hub import get_token

    hub, name = api(), str(address.repository)
    if get_token() is None:
        raise UsageError(f"{address}: no token for the hub; {LOGIN}")
    made = ask(address, lambda: hub.create_repo(name, repo_type=kind, private=private or None, exist_ok=True))
    info: Any = ask(address, lambda: hub.repo_info(name, repo_type=kind))
    if private and not info.private:
        raise UsageError(f"{address} is public; leave --private out, or make it private on the hub first")
    return str(made), {each.rfilename for each in info.siblings or ()}


def send(address: Address, kind: str, upload: Upload) -> str:
    """Upload the files, name all of them in one commit, and return that."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(name, str(path)) for name, path in upload.files.items()),
        *(CommitOperationDelete(name) for name in sorted(upload.remove)),
    ]
    commit = ask(
        address,
        lambda: api().create_commit(str(address.repository), operations, repo_type=kind, commit_message=upload.message),
    )
    return str(commit.oid)


def digest(content: bytes) -> str:
    """SHA-256 (hex)."""
    return hashlib.sha256(content).hexdigest()
