"""A student as a model: the files of an export, as its sealed record lists them."""

from pathlib import Path
from typing import Any, TypedDict

from kdtrain.errors import UsageError, printable
from kdtrain.files import MEDIUM, file_digest, files_below, parse_json, read_json, read_sealed, typed
from kdtrain.models.export import ORIGIN, is_export
from kdtrain.models.spec import ADAPTER_CONFIG, is_hub_id
from kdtrain.plugins.push.options import PushConfig
from kdtrain.plugins.push.repository import CARD, Repository, Upload, digest
from kdtrain.run.path_kind import is_run


class _Origin(TypedDict):
    """What the record of an export states of its files."""

    files: dict[str, str]


def folder_of(path: Path) -> Path:
    """The export in a folder, or that of a run. UsageError: there is none."""
    for folder in (path, path / "student"):
        if is_export(folder):
            return folder
    if is_run(path):
        raise UsageError(f"{path} has no exported student; run kdtrain export {path} --out {path / 'student'}")
    raise UsageError(f"{path} holds neither a cache nor an exported student; name a cache, a run or an export")


def plan(config: PushConfig, folder: Path, there: Repository, beside: Path) -> Upload:
    """What is published of a student. Files of an earlier export that this one lacks are taken out.

    UsageError: a file was changed, nobody else has the base of the adapters, or the repository holds something else.
    """
    record = typed(read_sealed(folder / ORIGIN), dict[str, Any])
    files = typed(record, _Origin)["files"]
    below = files_below(folder)
    for name, stated in files.items():
        if name not in below or (name != CARD and file_digest(below[name]) != stated):  # a card may be edited
            raise UsageError(f"{folder / printable(name)} is not as it was exported; export the student again")
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_json(folder / ADAPTER_CONFIG, dict[str, Any], MEDIUM).get("base_model_name_or_path")
        if not isinstance(base, str) or not is_hub_id(base) or Path(base).exists():
            raise UsageError(
                f"nobody else has {printable(str(base))}, the base of these adapters; publish that, and name it with "
                "kdtrain export --base ORG/NAME"
            )
    ours = dict[str, str]()
    if (content := there.read(ORIGIN)) is not None:
        try:
            ours = typed(parse_json(content.decode()), _Origin)["files"]
        except ValueError as error:
            raise UsageError(f"{there.address}: {ORIGIN} there is not what kdtrain writes ({error})") from None
    elif other := sorted({*there.names} - {".gitattributes", CARD}):
        raise UsageError(
            f"{there.address} holds {printable(other[0])}, which kdtrain did not publish; name another repository, "
            "which push makes if it is missing"
        )
    card_stays = there.keeps_card(lambda card: digest(card) == ours.get(CARD))
    sent = {name: folder / name for name in (*files, ORIGIN) if name != CARD or not card_stays}
    gone = (ours.keys() & {*there.names}) - {CARD} - sent.keys()
    message = f"Step {record['step']:,} by kdtrain" if isinstance(record.get("step"), int) else "By kdtrain"
    return Upload(sent, message, {"student": str(folder)}, gone)
