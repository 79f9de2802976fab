"""What the scripts that draw are told on the command line: a record, and where its pictures go."""

from argparse import ArgumentParser
from pathlib import Path

HERE = Path(__file__).resolve().parent


def paths(description: str | None, record: str, pictures: str = "") -> tuple[Path, Path]:
    """The record to draw and the file or folder to write.

    record, pictures: what they are by default, in `results` and in `figures`.
    """
    parser = ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("record", nargs="?", type=Path, default=HERE / "results" / record)
    parser.add_argument("pictures", nargs="?", type=Path, default=HERE / "figures" / pictures)
    given = parser.parse_args()
    if not given.record.exists():
        parser.error(f"{given.record} does not exist; name the record that the benchmark wrote")
    return given.record, given.pictures
