"""The configuration of the commands that make caches of caches: merge, subset, push and import."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from kdtrain.config.choices import LAYOUTS, REQUIRES_COMPRESSOR
from kdtrain.config.values import LOCAL_LIMIT, Options, flag, option, refuse
from kdtrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Options):
    """Add up caches of samples of the same rows, or append caches of other rows; the order does not matter.

    The same command resumes an interrupted one.
    """

    caches: tuple[str, ...] = option((), positional=True, reads="cache")
    """Two or more finished caches: folders, or addresses (hf:datasets/ORG/NAME, https://...)."""
    out: Path
    """The folder of the merged cache."""
    weights: str | None = None
    """Several teachers over the same rows: the weight of each, such as 0.7,0.3; by default their numbers of samples."""
    local_limit: float = option(LOCAL_LIMIT, above=0)
    """GB of caches from elsewhere that are kept here."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""

    EXAMPLES = ("kdtrain merge cache/a cache/b --out cache/both",)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(len(self.caches) < 2, "nothing to merge; give two or more caches")
        refuse_own(self.out, self.caches)
        given = len(self.shares or self.caches)
        refuse(given != len(self.caches), f"--weights has {given} numbers for {len(self.caches)} caches; give one each")

    @property
    def shares(self) -> tuple[Fraction, ...] | None:
        """The weights as they are written."""
        return None if self.weights is None else tuple(_decimal("--weights", each) for each in self.weights.split(","))


@dataclass(frozen=True, kw_only=True)
class SubsetConfig(Options):
    """Cut a cache to some of its rows.

    The same command resumes an interrupted one.
    """

    cache: str = option(positional=True, reads="cache")
    """A finished cache: a folder, or an address (hf:datasets/ORG/NAME, https://...)."""
    out: Path
    """The folder of the cut cache."""
    rows: str | None = None
    """The rows to take, START:STOP, counted from 0; STOP is not taken."""
    fraction: str | None = None
    """The share of the rows to take, above 0 and at most 1, by the hash of their tokens."""
    split: Literal["train", "validation", "test", "all"] = "train"
    """The split to cut, or all; the others stay whole."""
    local_limit: float = option(LOCAL_LIMIT, above=0)
    """GB of caches from elsewhere that are kept here."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""

    EXAMPLES = ("kdtrain subset cache/t --fraction 0.01 --out cache/small",)

    def __post_init__(self) -> None:
        super().__post_init__()
        one = (self.rows is None) != (self.fraction is None)
        refuse(not one, "give --rows START:STOP or --fraction SHARE, one of them")
        refuse(self.share is not None and self.share > 1, f"--fraction {self.fraction} is above 1")
        _ = self.range
        refuse_own(self.out, [self.cache])

    @property
    def share(self) -> Fraction | None:
        """The fraction as it is written."""
        return None if self.fraction is None else _decimal("--fraction", self.fraction)

    @property
    def range(self) -> tuple[int, int | None] | None:
        """Start and stop, None: the end."""
        if self.rows is None:
            return None
        found = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", self.rows)
        if found is None:
            raise UsageError(f"--rows {self.rows[:80]} is not START:STOP; give whole numbers, such as 0:10000")
        return int(found[1] or 0), int(found[2]) if found[2] else None


def refuse_own(out: Path, caches: Sequence[str]) -> None:
    """UsageError: a cache would be written into a folder that it is made from."""
    own = any(os.path.realpath(out) == os.path.realpath(each) for each in caches)
    which = "one of the caches" if len(caches) > 1 else "the cache itself"
    refuse(own, f"--out {out} is {which}; choose another")


def _decimal(name: str, text: str) -> Fraction:
    """A number above 0, exactly as it is written."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?|\.[0-9]{1,9}", text.strip()) or not Fraction(text.strip()):
        raise UsageError(f"{name}: '{text[:80]}' is not a number above 0, such as 0.3")
    return Fraction(text.strip())


@dataclass(frozen=True, kw_only=True)
class PushConfig(Options):
    """Publish a cache as a data set on the hub, with a card and a preview.

    The same command resumes an interrupted one: files that are there already are not sent again.
    """

    cache: Path = option(positional=True, reads="cache")
    """The folder of a finished cache."""
    to: str = option(positional=True, reads="data set")
    """Where to: hf:ORG/NAME, which is made if it is not there."""
    private: bool = False
    """Make the data set private, if it is made; a public one is refused."""
    license_text: str | None = None
    """Licence of the text: a name such as apache-2.0, unknown, or declined."""
    license_teacher: str | None = None
    """Licence of the teacher's weights: a name, unknown, or declined."""
    license_outputs: str | None = None
    """Licence of what the teacher said, which is that of the data set: a name, unknown, or declined."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [
            flag(name) for name in ("license_text", "license_teacher", "license_outputs") if not getattr(self, name)
        ]
        refuse(
            bool(missing),
            f"{', '.join(missing)} missing: whoever reads the cache must know what it may be used for; give each a "
            "name such as apache-2.0, or unknown, or declined",
        )

    EXAMPLES = (
        "kdtrain push cache/t hf:ORG/NAME --license-text mit --license-teacher apache-2.0 --license-outputs unknown",
    )


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Options):
    """Make a cache of teacher outputs that others published: their layout, checked and aligned.

    The same command resumes an interrupted one.
    """

    source: str = option(positional=True)
    """A parquet or jsonl file, or a folder of them."""
    layout: str = option(check=LAYOUTS.check)
    """How the source is laid out."""
    teacher: str = option(text=True)
    """The name of the teacher that made it, for the manifest; it is not loaded."""
    tokenizer: str = option(once=True, reads="teacher spec")
    """The teacher's tokenizer: a spec, a folder or a hub id."""
    out: Path
    """The folder of the cache."""
    compressor: Path | None = option(None, once=True, reads="file", brief="The YAML that DistillKit compressed with.")
    """The YAML with which DistillKit compressed the source."""
    shift: Literal[-1, 0, 1] = option(0, brief="Entry i of a row is about its token i + 1 + SHIFT.")
    """Entry i of a row is about its token i + 1 + SHIFT; what does not fit the text is refused, with the right one."""
    seq_len: int | None = option(None, least=2, most=2**31 - 2)
    """Positions a sequence; rows are cut, the last part filled up. By default what the first row has."""
    top_k: int | None = option(None, least=1)
    """Entries kept a token, the most likely ones; by default as many as each token has."""
    vocab_size: int | None = option(None, least=2)
    """Rows of the teacher's output head; by default the compressor's number, or that of the tokenizer."""
    tokens_column: str = option("input_ids", brief="Column of the token ids.")
    """Column of the token ids."""
    ids_column: str = option("target_token_ids", brief="topk-parquet: column of the entries' ids.")
    """topk-parquet: column of the entries' ids, a list for each token."""
    logprobs_column: str = option("target_logprobs", brief="topk-parquet: column of their log-probabilities.")
    """topk-parquet: column of their natural log-probabilities, a list for each token."""
    mask_column: str | None = None
    """Column with 0 for each token that is no label of the loss."""
    segments_column: str | None = None
    """Column with the number of each token's document, from 1, 0 for padding; no document then sees another."""
    dtype: str | None = None
    """In which the teacher ran, if you know it: the source does not say it."""
    revision: str | None = None
    """Of the teacher's weights, if you know it."""
    attention: str | None = None
    """The teacher's attention code, or its server, if you know it."""
    temperature: float | None = option(None, above=0)
    """At which the log-probabilities were taken, if you know it; only those at 1 can be a cache."""
    sequences_per_shard: int | None = option(None, least=1)
    """Sequences in one file of the cache; by default 262,144 tokens, at most 512 sequences."""
    json: bool = False
    """Print one JSON object on stdout, logs on stderr."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            re.match(r"hf:|https?:", self.source) is not None,
            f"{self.source}: import reads local files; download the data set first, and give its folder",
        )
        coded = LAYOUTS.has(self.layout, REQUIRES_COMPRESSOR)
        refuse(
            coded and self.compressor is None,
            f"--layout {self.layout} needs --compressor FILE.yaml: the data do not say how they are coded",
        )
        refuse(
            self.temperature not in (None, 1.0),
            f"--temperature {self.temperature}: log-probabilities at another temperature than 1 cannot be a cache, "
            "because the rest of the vocabulary is not known",
        )

    EXAMPLES = (
        "kdtrain import downloads/logits --layout distillkit --compressor compression_config.yaml "
        "--teacher Qwen3-235B --tokenizer Qwen/Qwen3-235B-A22B --out cache/qwen",
    )
