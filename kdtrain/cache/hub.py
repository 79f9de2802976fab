"""Uploads to the hub."""

from collections.abc import Collection, Mapping
from pathlib import Path

from kdtrain.errors import UsageError
from kdtrain.net.hub import LOGIN, api, ask


def make_repository(where: object, repository: str, kind: str, private: bool) -> str:
    """Make a repository if it is not there, and return the address of its page.

    where: what messages call it. repository: ORG/NAME. kind: model or dataset.

    UsageError: no token, no permission, or it is public where a private one is asked for. Unreachable: no answer.
    """
    from huggingface_hub import get_token

    hub = api()
    if get_token() is None:
        raise UsageError(f"{where}: no token for the hub; {LOGIN}")
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
