"""The options of `kdtrain import`, and the layouts that it knows."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kdtrain.config.values import Printed, option, refuse
from kdtrain.registry import Registry

REQUIRES_COMPRESSOR = "compressor"
"""Of a layout: the coding of its data stands in a file of its own."""
LAYOUTS = Registry(
    "--layout",
    "kdtrain.layouts",
    "kdtrain.plugins.layouts.command",
    {
        "distillkit": "DistillKit's packed parquet; its compressor's YAML is given with --compressor",
        "prompt-logprobs": "an inference server's log-probabilities of prompts: tokens, top_ids, top_logprobs",
        "topk-parquet": "lists of token ids and log-probabilities, in parquet or jsonl; columns by option",
    },
    {"distillkit": {REQUIRES_COMPRESSOR}},
)


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Printed):
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
    compressor: Path | None = option(None, once=True, reads="file", brief=True)
    """The YAML with which DistillKit compressed the source."""
    shift: Literal[-1, 0, 1] = option(0, brief=True)
    """Entry i of a row is about its token i + 1 + SHIFT; what does not fit the text is refused, with the right one."""
    seq_len: int | None = option(None, least=2, most=2**31 - 2)
    """Positions a sequence; rows are cut, the last part filled up. By default what the first row has."""
    top_k: int | None = option(None, least=1)
    """Entries kept a token, the most likely ones; by default as many as each token has."""
    vocab_size: int | None = option(None, least=2)
    """Rows of the teacher's output head; by default the compressor's number, or that of the tokenizer."""
    tokens_column: str = option("input_ids", brief=True)
    """Column of the token ids."""
    ids_column: str = option("target_token_ids", brief=True)
    """topk-parquet: column of the entries' ids, a list for each token."""
    logprobs_column: str = option("target_logprobs", brief=True)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            re.match(r"hf:|https?:", self.source) is not None,
            f"{self.source}: import reads local files; download the data set first, and give its folder",
        )
        coded = LAYOUTS.has(self.layout, REQUIRES_COMPRESSOR)
        refuse(
            coded and self.compressor is None,
            f"--layout {self.layout} needs --compressor FILE.yaml: the data do not state how they are coded",
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
