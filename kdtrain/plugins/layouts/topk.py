"""Lists of ids with log-probabilities, one pair a position, as trainers keep them beside a text."""

from dataclasses import replace

import numpy as np

from kdtrain.errors import UsageError
from kdtrain.plugins.layouts.layout import MOST_ENTRIES, Layout, Record, register_layout
from kdtrain.plugins.layouts.options import ImportConfig


@register_layout("topk-parquet")
class TopK(Layout):
    """lists of token ids and natural log-probabilities, in parquet or jsonl; columns by option"""

    def __init__(self, options: ImportConfig) -> None:
        super().__init__(options)
        self.refuse_given("compressor")
        self.entries = {options.ids_column: 2, options.logprobs_column: 2}

    def decode(self, record: Record, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Decode the entries as `Layout.decode` promises; pad shorter lists with entries of probability 0."""
        ids, logprobs = record[self.options.ids_column], record[self.options.logprobs_column]
        lengths_m = ids.lengths
        if len(ids.values) and ids.values.dtype.kind != "i":
            raise UsageError(f"{where}: {self.options.ids_column} does not hold whole numbers")
        if not np.array_equal(lengths_m, logprobs.lengths):
            raise UsageError(
                f"{where}: {self.options.ids_column} and {self.options.logprobs_column} differ in the number of entries"
            )
        width = int(lengths_m.max(initial=0))
        if width * len(lengths_m) > MOST_ENTRIES:
            raise UsageError(f"{where}: a position has {width:,} entries, too many for a row of {len(lengths_m):,}")
        present_mK = np.arange(width) < lengths_m[:, None]
        ids_mK = np.full(present_mK.shape, -1, np.int64)
        logprobs_mK = np.full(present_mK.shape, -np.inf)
        ids_mK[present_mK], logprobs_mK[present_mK] = ids.values, logprobs.values
        logprobs_mK[lengths_m == 0] = np.nan
        return ids_mK, logprobs_mK


@register_layout("prompt-logprobs")
class PromptLogprobs(TopK):
    """the prompt log-probabilities of an inference server: tokens, top_ids and top_logprobs, in jsonl or parquet"""

    def __init__(self, options: ImportConfig) -> None:
        self.options = options
        self.refuse_given("tokens_column", "ids_column", "logprobs_column")
        names = {"tokens_column": "tokens", "ids_column": "top_ids", "logprobs_column": "top_logprobs"}
        super().__init__(replace(options, **names))  # type: ignore[arg-type]

    def decode(self, record: Record, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Decode the entries as `Layout.decode` promises, of which the first is dropped.

        Entry i of a server is about token i itself, given the tokens before it.
        """
        ids_mK, logprobs_mK = super().decode(record, where)
        return ids_mK[1:], logprobs_mK[1:]
