"""The tables of docs/quality.md, from the records of `benchmarks.science.quality` alone."""

import json
from typing import Any

MEASURES = ("loss", "ece", "kl", "agreement", "acceptance", "accuracy", "teacher_loss", "tokens")
"""What a record keeps of `kdtrain evaluate` on the test split."""


def compact(result: dict[str, Any]) -> str:
    """The record as JSON, a line a student."""
    lists = {name: ",\n  ".join(json.dumps(each) for each in result[name]) for name in ("runs",)}
    rest = {name: value for name, value in result.items() if name not in lists}
    return json.dumps(rest, indent=1)[:-2] + f',\n "runs": [\n  {lists["runs"]}\n ]\n}}\n'
