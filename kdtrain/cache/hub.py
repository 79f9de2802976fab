"""Questions to the hub and uploads to it, and its refusals in one line."""

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from kdtrain.cache.address import Address
from kdtrain.cache.download import CONTACTS, WAIT, Unreachable, reason
from kdtrain.errors import RunError, UsageError, printable

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger("kdtrain")
Answer = TypeVar("Answer")
_LOGIN = "log in with hf auth login, or set HF_TOKEN"


def api() -> "HfApi":
    """The hub's client; HF_ENDPOINT and HF_TOKEN count."""
    from huggingface_hub import HfApi

    endpoint = os.environ.get("HF_ENDPOINT")
    return HfApi(endpoint=endpoint.rstrip("/") if endpoint else None, library_name="kdtrain")


def commit_of(address: Address, patience: int) -> str:
    """The commit that the revision of a data set is now. UsageError, Unreachable: as `ask`."""
    assert address.repository is not None
    repository, revision = address.repository, address.revision
    info = ask(
        address,
        lambda: api().repo_info(repository, repo_type="dataset", revision=revision, timeout=10),
        patience,
        CONTACTS,
    )
    if not re.fullmatch(r"[0-9a-f]{40}", str(info.sha)):
        raise UsageError(f"{address}: the hub names no commit; check HF_ENDPOINT")
    return str(info.sha)


def make_repository(where: object, repository: str, kind: str, private: bool) -> str:
    """Make a repository if it is not there, and return the address of its page.

    where: what messages call it. repository: ORG/NAME. kind: model or dataset.

    UsageError: no token, no permission, or it is public where a private one is asked for. Unreachable: no answer.
    """
    from huggingface_hub import get_token

    hub = api()
    if get_token() is None:
        raise UsageError(f"{where}: no token for the hub; {_LOGIN}")
    made = ask(where, lambda: hub.create_repo(repository, repo_type=kind, private=private or None, exist_ok=True))
    if private and not ask(where, lambda: hub.repo_info(repository, repo_type=kind)).private:
        raise UsageError(f"{where} is public; leave --private out, or make it private on the hub first")
    return str(made)


def names_in(where: object, repository: str, kind: str) -> set[str]:
    """The paths of the files in a repository. UsageError, Unreachable: as `ask`."""
    info = ask(where, lambda: api().repo_info(repository, repo_type=kind))
    return {each.rfilename for each in getattr(info, "siblings", None) or ()}


def upload(
    where: object,
    repository: str,
    kind: str,
    files: Mapping[str, Path],
    message: str,
    remove: Collection[str] = (),
) -> str:
    """Upload files, by their paths there, name all of them in one commit, and return that.

    remove: paths there of files that this commit takes out.

    What the hub holds already, by its SHA-256, is not sent again. UsageError, Unreachable: as `ask`.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(name, str(path)) for name, path in files.items()),
        *(CommitOperationDelete(name) for name in sorted(remove)),
    ]
    commit = ask(where, lambda: api().create_commit(repository, operations, repo_type=kind, commit_message=message))
    return str(commit.oid)


def ask(where: object, question: Callable[[], Answer], patience: int = 4, contacts: int = 4) -> Answer:
    """Ask the hub, again where it may pass: `patience` times, or `contacts` times if no server is reached.

    where: what messages call the repository.

    UsageError: the repository is missing or gated, or a token. Unreachable: no answer.
    """
    from huggingface_hub import errors

    for attempt in range(1, patience + 1):
        try:
            return question()
        except (UsageError, RunError):
            raise
        except errors.GatedRepoError as error:
            raise UsageError(f"{where}: it is gated; ask for access on its page on the hub, and {_LOGIN}") from error
        except errors.RepositoryNotFoundError as error:
            raise UsageError(
                f"{where}: no such repository on the hub, or it is private; check the name, or {_LOGIN}"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise UsageError(f"{where}: it has no such revision; check what follows @") from error
        except errors.LocalTokenNotFoundError as error:
            raise UsageError(f"{where}: no token for the hub; {_LOGIN}") from error
        except Exception as error:
            passing, kind = _passing(error)
            if passing is None:
                raise UsageError(
                    f"{where}: the hub refuses it ({_line(error)}); check the name, and {_LOGIN}"
                ) from error
            if attempt == patience or kind == "final" or (kind == "far" and attempt >= contacts):
                raise Unreachable(f"{where}: the hub does not answer: {passing}; try again later") from error
            log.info("%s: %s; trying again in %.0f s", where, passing, seconds := WAIT * 2**attempt)
            time.sleep(seconds)
    raise AssertionError


def _passing(error: Exception) -> tuple[str | None, str]:
    """What may pass, in words, None for an answer that will stay; and the kind of `reason`."""
    status, cause = None, cast("BaseException | None", error)
    while status is None and cause is not None:  # an upload's error wraps the answer
        status, cause = getattr(getattr(cause, "response", None), "status_code", None), cause.__cause__
    if status is None:
        return reason(error) if not isinstance(error, ValueError | TypeError) else (None, "")
    return f"it answers {status}" if status in (408, 425, 429) or status >= 500 else None, ""


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))[:200] or type(error).__name__
