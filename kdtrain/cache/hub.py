"""Questions to the hub about data sets, and its refusals in one line."""

import logging
import os
import re
import time
from collections.abc import Callable
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


def ask(address: Address, question: Callable[[], Answer], patience: int = 4, contacts: int = 4) -> Answer:
    """Ask the hub, again where it may pass: `patience` times, or `contacts` times if no server is reached.

    UsageError: the data set is missing or gated, or a token. Unreachable: no answer.
    """
    from huggingface_hub import errors

    for attempt in range(1, patience + 1):
        try:
            return question()
        except (UsageError, RunError):
            raise
        except errors.GatedRepoError as error:
            raise UsageError(f"{address}: it is gated; ask for access on its page on the hub, and {_LOGIN}") from error
        except errors.RepositoryNotFoundError as error:
            raise UsageError(
                f"{address}: no such data set on the hub, or it is private; check the name, or {_LOGIN}"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise UsageError(f"{address}: the data set has no such revision; check what follows @") from error
        except errors.LocalTokenNotFoundError as error:
            raise UsageError(f"{address}: no token for the hub; {_LOGIN}") from error
        except Exception as error:
            passing, kind = _passing(error)
            if passing is None:
                raise UsageError(f"{address}: the hub refuses it ({_line(error)}); check name and token") from error
            if attempt == patience or kind == "final" or (kind == "far" and attempt >= contacts):
                raise Unreachable(f"{address}: the hub does not answer: {passing}; try again later") from error
            log.info("%s: %s; trying again in %.0f s", address, passing, seconds := WAIT * 2**attempt)
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
