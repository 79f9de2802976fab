"""What is sound and has to work: without these, a harness that breaks everything would find that all is refused."""

from tests.hostile import seal
from tests.hostile.case import COMMANDS, Cases, Place, remove
from tests.hostile.shapes import in_shards


def cases() -> Cases:
    """List a case for each command, and cases that reseal without a change."""
    found = Cases("controls")
    for command in COMMANDS:
        same = command in ("evaluate", "model", "again", "finish")
        found.add("untouched", command, ends="works", same=same)
    for command in ("verify", "repair", "inspect", "evaluate", "distill", "again"):
        found.add(
            "sealed again", command, in_shards(lambda file, name: None, ""), ends="works", same=command == "evaluate"
        )
    for command in ("export", "resume", "inspect run", "verify run", "evaluate run"):
        found.add("sealed again", command, Place.seal_run, ends="works")
    for command in ("verify", "evaluate", "distill"):
        same = command == "evaluate"
        found.add("cache is a link", command, lambda place: place.twin("cache"), ends="works", same=same)
    for command in ("export", "inspect run"):
        found.add("run is a link", command, lambda place: place.twin("run"), ends="works")
    found.add("extra file of the user", "repair", _extra, ends="works")
    found.add("shard lost, extra file", "repair", _lost_shard)
    return found


def _extra(place: Place) -> None:
    place.plant("cache/notes.txt")
    place.plant("cache/shards/notes.txt")


def _lost_shard(place: Place) -> None:
    _extra(place)
    remove(place.path("cache/shards/train-00001.h5"))
    seal.cache(place.path("cache"))
