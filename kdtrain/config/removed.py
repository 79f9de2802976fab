"""Options that earlier versions had: what answers on a command line, in a file of `--config`, and in a checkpoint.

Each stands here once, in `REMOVED`. A file or a checkpoint in which a removed option has the value that is fixed today
is read; any other use ends with exit code 2 and what replaces the option. CHANGELOG.md has the list for people.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from kdtrain.config.values import flag


class Removed(NamedTuple):
    """The answer for an option that was removed, or for one of its values."""

    answer: str
    """The rest of the message that begins with the flag: what replaces it, and what to type."""
    default: Any = None
    """The value that is fixed today, with which a file is read. None: no file holds it."""
    of: Collection[str] = ()
    """The commands that had it; empty: all that took it."""
    becomes: Mapping[str, Any] | None = None
    """Of a value: the options of today that say the same, by which a file is read; None: it is refused."""


_RUNS = ("distill", "find-lr")
_IMPORT = "kdtrain import FILE --layout prompt-logprobs --teacher NAME --tokenizer SPEC --out FOLDER"
_CELLS = Removed("is now --cross-tokenizer alone: cells are the one term", becomes={"cross_tokenizer": True})
_CHUNKS = Removed(
    "is gone: version 0.2.0 (commit ab61eace) is the last that trains chunks; use --cross-tokenizer alone"
)
_AUDIT = Removed("is an option of kdtrain audit CACHE --teacher T", of=("verify",))
REMOVED: dict[str, Removed] = {
    "from_logprobs": Removed(f"is gone: use {_IMPORT}", None, ("cache-teacher",)),
    "weights": Removed("is gone: train on all caches with kdtrain distill --cache-weights", None, ("merge",)),
    "temperature_schedule": Removed(
        "is gone: --temperature-mode schedule is linear, --temperature-mode cosine a cosine", "linear", _RUNS
    ),
    "temperature_schedule cosine": Removed(
        "is now --temperature-mode cosine", None, _RUNS, {"temperature_mode": "cosine"}
    ),
    **dict.fromkeys(("teacher", "rows", "seed", "device"), _AUDIT),
    "histogram_freq": Removed("is gone: histograms are logged with each validation; use --eval-freq", 250, _RUNS),
    "push": Removed("is a command: kdtrain push OUT hf:ORG/NAME publishes what export has written", of=("export",)),
    "private": Removed("is an option of kdtrain push OUT hf:ORG/NAME", of=("export",)),
    "local_limit": Removed("is gone: what is fetched stays, and hf cache or rm makes room; leave it out", 50.0),
    "local": Removed("is gone: hf cache ls, and a folder of KDTRAIN_HOME/caches, show it", False, ("inspect",)),
    "log_all_ranks": Removed("is gone: each rank writes its log, rank-00001.log for rank 1", False, _RUNS),
    "yes": Removed("is gone: only a command at a terminal waits for an answer; use --resume latest", False, _RUNS),
    "spike_rule": Removed("is gone: --spike-patience 0 disables the guard", "mad", _RUNS),
    **{f"cross_tokenizer {each}": _CELLS for each in ("cells", "auto")},
    **{f"cross_tokenizer {each}": _CHUNKS for each in ("chunks", "both")},
}
"""The name of an option (`spike_rule`), or its name and a value (`precision int4`) -> what answers."""


def removed_from(command: str) -> dict[str, Removed]:
    """Return the entries for a command, such as `distill`."""
    name = command.removeprefix("kdtrain ")
    return {key: each for key, each in REMOVED.items() if not each.of or name in each.of}


def answers(command: str, given: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the replacement of each removed option of a command line, whose options are given with their values."""
    known = removed_from(command)
    names = ((f"{name} {value}", name, name.removeprefix("no_")) for name, value in given)
    keys = dict.fromkeys(key for each in names for key in [key for key in each if key in known][:1])
    return [f"{flag(key)} {known[key].answer}" for key in keys]


class Renewed(NamedTuple):
    """A table of options of an earlier version, in today's names."""

    table: dict[str, Any]
    """The options of today."""
    changed: list[str]
    """One line for each option that is fixed or called otherwise today, at a value that changes nothing."""
    refused: list[str]
    """One line for each whose value has no place today."""


def renewed(command: str, table: Mapping[str, Any]) -> Renewed:
    """Return `table`, a section of a file or of a checkpoint, as today's version reads it."""
    known = removed_from(command)
    result = Renewed({}, [], [])
    successors = dict[str, Any]()
    for key, value in table.items():
        name = key.replace("-", "_")
        entry = known.get(f"{name} {value}") or known.get(name)
        if entry is None:
            result.table[key] = value
        elif entry.becomes is not None or (entry.default is not None and value == entry.default):
            successors |= entry.becomes or {}
            result.changed.append(f"{name} = {value}: {flag(name)} {entry.answer}")
        else:
            result.refused.append(f"{flag(f'{name} {value}' if f'{name} {value}' in known else name)} {entry.answer}")
    result.table.update(successors)  # in place of what stands beside them
    return result
