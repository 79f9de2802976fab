"""Files of the hub by its own client (resume, locks, offline mode, HF_HOME), and its refusals in one line.

A file's size there is compared before the download; what it is, its caller compares by digest. The hub is trusted for
time.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from urllib3.util.retry import Retry

from kdtrain.errors import RunError, UsageError, printable
from kdtrain.errors import reason as error_reason
from kdtrain.net.address import Address, Unreachable, no_network, parse_address
from kdtrain.net.request import CONTACT, LATER, RETRY, pause, reason, refuse_size

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Answer = TypeVar("Answer")
LOGIN = "log in with hf auth login, or set HF_TOKEN"
_REFUSALS = {
    "GatedRepoError": f"it is gated; ask for access on its page on the hub, and {LOGIN}",
    "RepositoryNotFoundError": f"no such repository on the hub, or it is private; check the name, or {LOGIN}",
    "RevisionNotFoundError": "it has no such revision; check what follows @",
    "LocalTokenNotFoundError": f"no token for the hub; {LOGIN}",
}
"""Errors of the hub's client, the narrower first, in words."""


def api() -> "HfApi":
    """Return the hub's client; HF_ENDPOINT and HF_TOKEN count."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None, library_name="kdtrain")


class Repository:
    """The repository at hf:ORG/NAME on the hub: its files, and what its client asks. kind: dataset or model.

    UsageError: it is not such an address.
    """

    def __init__(self, where: str, kind: str = "dataset") -> None:
        found = parse_address(where)
        if found is None or found.repository is None or found.revision != "main":
            raise UsageError(f"{where}: it is not a data set on the hub; give hf:ORG/NAME")
        self.name, self.kind = found.repository, kind
        self.address = found if kind == "dataset" else Address(f"hf:{self.name}", self.name)

    def __str__(self) -> str:
        return str(self.address)

    def refuse_no_token(self) -> None:
        """Raise UsageError without a token for the hub."""
        from huggingface_hub import get_token

        if get_token() is None:
            raise UsageError(f"{self.address}: no token for the hub; {LOGIN}")

    def ask(self, question: "Callable[[HfApi], Answer]") -> Answer:
        """Return the answer of the client to a question: as `ask`."""
        return ask(self.address, lambda: question(api()))

    def fetch(self, name: str, most: int) -> Path:
        """Return a file, fetched if it is not here: as `fetch_file`."""
        return fetch_file(self.address, name, most=most, kind=self.kind)


def kept_file(address: Address, name: str) -> Path | None:
    """Return a file of a data set that was fetched before, in HF_HOME; None: it was not."""
    from huggingface_hub import try_to_load_from_cache

    assert address.repository is not None
    found = try_to_load_from_cache(address.repository, name, revision=address.revision, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def fetch_file(
    address: Address,
    name: str,
    *,
    most: int,
    exact: bool = False,
    again: bool = False,
    retry: Retry = RETRY,
    kind: str = "dataset",
) -> Path:
    """Return a file of a repository, in HF_HOME; fetch it if it is not there, or `again`.

    most: bytes that it may have. exact: it has exactly these. kind: of the repository, dataset or model.

    UsageError: it is not there, or needs a permission. Unreachable: no answer. RunError: it has another size, or the
    disk refuses.
    """
    from huggingface_hub import errors, hf_hub_url
    from huggingface_hub.utils import tqdm

    client = api()
    repository = cast(str, address.repository)
    if not again and re.fullmatch(r"[0-9a-f]{40}", address.revision) and (there := kept_file(address, name)):
        return there
    url = hf_hub_url(repository, name, repo_type=kind, revision=address.revision, endpoint=client.endpoint)
    what = f"{address}: {printable(name)}"
    if retry is CONTACT and no_network(client.endpoint):
        raise Unreachable(f"{what} cannot be fetched: {reason(OSError('name or service'))[0]}")

    def size() -> int | None:
        try:
            return client.get_hf_file_metadata(url=url, timeout=10).size
        except errors.EntryNotFoundError as error:
            raise UsageError(f"{what} is not there (404); check the address") from error

    if (found := ask(address, size, retry)) is not None:
        refuse_size(what, found, most, exact)

    def content() -> str:
        return client.hf_hub_download(
            *(repository, name),
            repo_type=kind,
            revision=address.revision,
            force_download=again,
            tqdm_class=cast(Any, partial(tqdm, disable=True)),  # a bar would stand among the lines of a run
        )

    return Path(ask(address, content, Retry(total=0)))


def ask(where: object, question: Callable[[], Answer], retry: Retry = RETRY) -> Answer:
    """Ask the hub, and again where the failure may pass.

    where: what messages call the repository.

    UsageError: the repository is missing or gated, or a token. Unreachable: no answer. RunError: the disk refuses.
    """
    while True:
        try:
            return question()
        except (UsageError, RunError):
            raise
        except Exception as error:
            kinds = {each.__name__ for each in type(error).__mro__}
            if words := next((words for name, words in _REFUSALS.items() if name in kinds), None):
                raise UsageError(f"{where}: {words}") from error
            code = _code(error)
            if isinstance(error, OSError) and error.filename is not None:
                problem = f"cannot use {error.filename}: {error.strerror}"
                raise RunError(f"{problem}; make room, or set HF_HOME", reason=error_reason(error)) from error
            if code is None and not isinstance(error, ValueError | TypeError):
                words, kind = reason(error)
            elif code in LATER or (code or 0) >= 500:
                words = f"it answers {code}"
                kind = ""
            else:
                line = printable(" ".join(str(error).split()))[:200] or type(error).__name__
                raise UsageError(f"{where}: the hub refuses it ({line}); check the name, and {LOGIN}") from error
            problem = f"the hub does not answer: {words}"
            retry = pause(Retry(total=0) if kind == "final" else retry, problem, str(where), far=kind == "far")


def _code(error: BaseException | None) -> int | None:
    """Return the status code of the answer behind an error or its cause; an upload's error wraps the answer."""
    while error is not None:
        if (code := getattr(getattr(error, "response", None), "status_code", None)) is not None:
            return int(code)
        error = error.__cause__
    return None
