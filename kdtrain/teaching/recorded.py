"""A teacher whose answers are in a file: the top log-probabilities that an inference server wrote (`data.logprobs`).

It brings its own text. A cache of it is right at T = 1 only, because nothing is known of the entries that the file does
not have; no model is loaded, and the spec gives name, tokenizer and vocabulary alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from kdtrain.cache.format.codec import CodecSpec, keep
from kdtrain.data.logprobs import logprob_rows
from kdtrain.data.packing import PackedRow
from kdtrain.errors import UsageError
from kdtrain.files import file_digest
from kdtrain.models.loading import vocabulary
from kdtrain.models.spec import ModelSpec
from kdtrain.teaching.teacher import Teacher, register_teacher


@register_teacher("recorded")
class RecordedTeacher(Teacher):
    """The log-probabilities in the file `logprobs` of the spec's options, which `--from-logprobs` sets."""

    gives: ClassVar[Literal["hidden", "logits", "top-k"]] = "top-k"

    def __init__(self, spec: ModelSpec, device: torch.device, mode: str) -> None:
        super().__init__(spec, device, mode)
        self.path = Path(str(spec.options.get("logprobs", "")))
        if not self.path.name:
            raise UsageError(f"{spec.name}: leave out kind = 'recorded', which is what --from-logprobs FILE sets")

    @property
    def vocab_size(self) -> int:
        """By the configuration of the spec's model."""
        return vocabulary(self.spec)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return file_digest(self.path)

    def __str__(self) -> str:
        return f"the log-probabilities of {self.name} in {self.path}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """The spec and the file."""
        return {"spec": self.name, "logprobs": self.path.name}

    def load(self, sharded: bool = False) -> None:
        """Read the file once, for its digest."""
        if not self.path.is_file():
            raise UsageError(f"--from-logprobs {self.path} does not exist")
        self.text = {"logprobs": self.path.name, "sha256": self.digest}

    def rows(self, split: str, seq_len: int, codec: CodecSpec) -> Iterator[PackedRow]:
        """The rows of a split with what a cache keeps of them.

        UsageError: the file cannot be read, or does not fit the vocabulary.
        """
        for row in logprob_rows(self.path, split, seq_len, codec.top_k):
            if (token := int(row.tokens.max())) >= codec.vocab_size:
                raise UsageError(
                    f"--from-logprobs {self.path} has the token {token}, the teacher's vocabulary only "
                    f"{codec.vocab_size}; name the teacher that made the file"
                )
            lists = row.kept
            yield replace(row, kept=keep(lists["top_ids"], lists["top_logprobs"], lists["label_logprob"], codec))
