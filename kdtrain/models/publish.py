"""Publish a folder on the Hugging Face hub; HF_ENDPOINT and HF_TOKEN count."""

import os
from pathlib import Path

from kdtrain.errors import RunError, UsageError, printable

_LOGIN = "log in with hf auth login, or set HF_TOKEN"


def publish(folder: Path, repository: str, *, kind: str = "model", private: bool = False, message: str) -> str:
    """Upload all files of a folder in one commit, and return the address of the repository's page.

    Args:
        folder: what to upload; files of the repository that it lacks stay.
        repository: ORG/NAME, which is created if it is missing.
        kind: model or dataset.
        private: of a repository that is created; a public one is refused.
        message: of the commit.

    Raises:
        UsageError: no token, no right to write, or a public repository where a private one is asked for.
        RunError: the hub does not answer.
    """
    from huggingface_hub import HfApi, errors

    endpoint, where = os.environ.get("HF_ENDPOINT"), f"hf:{repository}"
    api = HfApi(endpoint=endpoint.rstrip("/") if endpoint else None, library_name="kdtrain")
    try:
        url = str(api.create_repo(repository, repo_type=kind, private=private or None, exist_ok=True))
        if private and not api.repo_info(repository, repo_type=kind).private:
            raise UsageError(f"{where} is public; leave --private out, or make it private on the hub first")
        api.upload_folder(repo_id=repository, repo_type=kind, folder_path=folder, commit_message=message)
    except UsageError:
        raise
    except errors.LocalTokenNotFoundError as error:
        raise UsageError(f"{where}: no token for the hub; {_LOGIN}") from error
    except errors.GatedRepoError as error:
        raise UsageError(f"{where}: it is gated; ask for access on its page on the hub, and {_LOGIN}") from error
    except Exception as error:
        status = _status(error)
        if status in (401, 403, 404):
            raise UsageError(f"{where}: the hub refuses it ({status}); check the name, and {_LOGIN}") from error
        if isinstance(error, ValueError):
            raise UsageError(f"{where}: {_line(error)}") from error
        raise RunError(f"{where}: the hub does not take it ({_line(error)}); {folder} is whole, try again") from error
    return url


def _status(error: BaseException | None) -> int | None:
    """The status of the answer behind an error: that of an upload wraps it."""
    while error is not None:
        if (found := getattr(getattr(error, "response", None), "status_code", None)) is not None:
            return int(found)
        error = error.__cause__
    return None


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))[:200] or type(error).__name__
