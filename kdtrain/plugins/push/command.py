"""`kdtrain push`: all files go up before one commit names them, so that nobody ever reads half of a cache or a student.

What the hub holds already, by its SHA-256, is not sent again: an upload that broke off resumes. Sent is what the format
or the export's sealed record names and the digests vouch for, nothing else that lies in the folder.
"""

import hashlib
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypedDict

from huggingface_hub.constants import REPOCARD_NAME as CARD

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.errors import UsageError, log, printable
from kdtrain.files import (
    file_digest,
    read_json,
    read_sealed,
    refuse_links,
    typed,
)
from kdtrain.models.spec import ADAPTER_CONFIG, ORIGIN, is_export, is_hub_id
from kdtrain.monitor.facts import is_run
from kdtrain.monitor.progress import setup_logging
from kdtrain.net.hub import Repository
from kdtrain.outputs import OutFolder
from kdtrain.plugins.push import PushConfig
from kdtrain.plugins.push.cache import MOST, Upload, plan_cache
from kdtrain.plugins.push.model_card import student_card


class _Origin(TypedDict):
    """The record of an export, as far as it is about its files."""

    files: dict[str, str]


def main(config: PushConfig) -> int:
    """Check what lies in the folder, upload it, and print where it is.

    UsageError: it is damaged, unfinished or neither cache nor student, the address is none on the hub or holds
    something else, or no permission. RunError: the hub does not answer.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    setup_logging()
    folder = config.path
    if not folder.exists() and ":" in folder.parts[0]:
        raise UsageError(f"{folder} is not a folder; push publishes the folder in which it was built")
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; name a cache, a run or an export")
    kind = "dataset"
    if CacheSettings.begun(folder):
        config.refuse_missing()
    else:
        folder = _export_in(folder)
        kind = "model"
        if any(config.licenses.values()):
            raise UsageError("a student's licence is kdtrain export --license; leave the licences of a cache out")
    refuse_links(folder)
    there = Repository(config.to, kind)
    name = there.name
    there.refuse_no_token()
    # before minutes go into digests
    private = config.private or None
    url = there.ask(lambda hub: hub.create_repo(name, repo_type=kind, private=private, exist_ok=True))
    info: Any = there.ask(lambda hub: hub.repo_info(name, repo_type=kind))
    if config.private and not info.private:
        raise UsageError(f"{there} is public; leave --private out, or make it private on the hub first")
    names = {each.rfilename for each in info.siblings or ()}

    def fetch(file: str) -> Path | None:
        return there.fetch(file, MOST) if file in names else None

    with tempfile.TemporaryDirectory(prefix="kdtrain-") as beside:
        if kind == "dataset":
            upload = plan_cache(config, folder, there, fetch, Path(beside))
        else:
            upload = _plan_student(folder, there, fetch(ORIGIN), names, Path(beside))
        files = dict(upload.files)
        if (card := fetch(CARD)) is not None and not upload.owns(card.read_bytes()):
            log.warning("%s has a %s that kdtrain did not write; it stays as it is", there, CARD)
            del files[CARD]
        log.info("uploading %d files of %s to %s", len(files), folder, there)
        changes: list[Any] = [CommitOperationAdd(file, str(path)) for file, path in files.items()]
        changes += [CommitOperationDelete(file) for file in sorted(upload.remove)]
        how: dict[str, Any] = {"repo_type": kind, "commit_message": upload.message}
        commit = there.ask(lambda hub: hub.create_commit(name, changes, **how))
    result = {**upload.result, "to": str(there), "url": str(url), "commit": str(commit.oid)}
    config.show(f"pushed {folder}", result)
    return 0


def _export_in(path: Path) -> Path:
    """Find the export in a folder, or that of a run. UsageError: there is none."""
    for folder in (path, path / "student"):
        if is_export(folder):
            return folder
    if is_run(path):
        raise UsageError(f"{path} has no exported student; run kdtrain export {path} --out {path / 'student'}")
    raise UsageError(f"{path} holds neither a cache nor an exported student; name a cache, a run or an export")


def _plan_student(
    folder: Path, address: Repository, there: Path | None, names: Collection[str], beside: Path
) -> Upload:
    """Plan the upload of a student.

    Files of an earlier export that this one lacks are removed from the repository.

    there: the record of the export in the repository. names: the files in it. beside: a folder for the card.

    UsageError: a file was changed, nobody else has the base of the adapters, or the repository holds something else.
    """
    record = typed(read_sealed(folder / ORIGIN), dict[str, Any])
    files = typed(record, _Origin)["files"]
    below = {each.relative_to(folder).as_posix(): each for each in folder.rglob("*") if each.is_file()}
    for name, digest in files.items():
        if name not in below or (name != CARD and file_digest(below[name]) != digest):  # a card may be edited
            raise UsageError(f"{folder / printable(name)} is not as it was exported; export the student again")
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_json(folder / ADAPTER_CONFIG, dict[str, Any], MOST).get("base_model_name_or_path")
        if not isinstance(base, str) or not is_hub_id(base) or Path(base).exists():
            raise UsageError(
                f"nobody else has {printable(str(base))}, the base of these adapters; publish that, and name it with "
                "kdtrain export --base ORG/NAME"
            )
    ours = dict[str, str]()
    if there is not None:
        try:
            ours = read_json(there, _Origin, MOST)["files"]
        except (OSError, ValueError) as error:
            raise UsageError(f"{address}: {ORIGIN} there is not what kdtrain writes ({error})") from None
    elif other := sorted({*names} - {".gitattributes", CARD}):
        raise UsageError(
            f"{address} holds {printable(other[0])}, which kdtrain did not publish; name another repository, "
            "which push makes if it is missing"
        )
    sent = {name: folder / name for name in (*files, ORIGIN)}
    if CARD in files and file_digest(below[CARD]) == files[CARD] and (card := student_card(folder, files)) is not None:
        (beside / CARD).write_text(card, encoding="utf-8")
        stated = {**files, CARD: file_digest(beside / CARD)}
        OutFolder(beside).publish(ORIGIN, {**record, "files": stated}, "push.origin")
        sent |= {name: beside / name for name in (CARD, ORIGIN)}
    return Upload(
        sent,
        f"Step {record['step']:,} by kdtrain" if isinstance(record.get("step"), int) else "By kdtrain",
        {"student": str(folder)},
        lambda card: hashlib.sha256(card).hexdigest() == ours.get(CARD),
        (ours.keys() & {*names}) - {CARD, *files, ORIGIN},
    )
