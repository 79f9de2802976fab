"""The tables of docs/tokenizers.md, from the records of `tokenizers` and `tokenizer_pairs`."""

from collections.abc import Mapping
from typing import Any

from benchmarks.science.quality_tables import markdown

Record = Mapping[str, Any]
MOST_LEFT_OUT = 0.01
"""Share of documents that the student's tokenizer may rewrite; above it a run is refused."""


def blocks(study: Record | None, pairs: Record | None) -> dict[str, str]:
    """The tables by their markers, of the records that there are."""
    found = {} if study is None else {"tokenizers-study": students(study), "tokenizers-rows": rows(study)}
    return found | ({} if pairs is None else {"tokenizers-pairs": between(pairs)})


def students(record: Record) -> str:
    """Bits per byte of each student, and what of the teacher's gain with its own tokenizer it has."""
    shown = []
    for kind, methods in record["kinds"].items():
        for method, row in methods.items():
            if row["bits_per_byte"] is not None:
                spread = "" if row["deviation"] is None else f" ± {row['deviation']:.3f}"
                gain = "" if method == "cross-entropy" or row["gain"] is None else f"{row['gain']:+.3f}"
                share = "" if not gain or row["share"] is None else f"{row['share']:.0%}"
                shown.append([kind, method, f"{row['bits_per_byte']:.3f}{spread}", gain, share, f"{row['seeds']}"])
    of, settings = record["environment"], record["settings"]
    left = f" {record['left']} runs are left." if record["left"] else ""
    teacher = record["teacher"]["bits_per_byte"]
    own = "" if teacher is None else f" The teacher has {teacher:.3f}."
    return "\n".join(
        [
            markdown(["tokenizer", "loss", "bits per byte", "gain", "of the ceiling", "seeds"], shown, left=2),
            "",
            f"{settings['steps']:,} steps of {settings['batch']} x {settings['seq_len']} tokens, rate "
            f"{settings['lr']:g}, mean ± standard deviation over seeds.{own}{left} {of['precision']} on {of['cpu']}, "
            f"torch {of['torch']}, {of['date']}: [benchmarks/results/tokenizers.json]"
            "(../benchmarks/results/tokenizers.json).",
        ]
    )


def rows(record: Record) -> str:
    """What the views of the study's students have in common with the cache."""
    names = ("boundaries", "inside", "in_chunks", "disagreement", "entropy_kept")
    shown = [
        [kind, f"{facts['cells']:,}", *(f"{facts[name]:.1%}" if name in facts else "-" for name in names)]
        for kind, facts in record["alignment"].items()
    ]
    head = [
        "tokenizer",
        "cells",
        "labels at common boundaries",
        "within tokens",
        "in chunks",
        "disagreement",
        "entropy kept",
    ]
    return markdown(head, shown)


def between(record: Record) -> str:
    """Pairs of published tokenizers by text: labels at common boundaries, disagreement, entropy kept, in per cent."""
    texts, shown, refused = list(record["texts"]), [], dict[str, list[str]]()
    for pair in record["pairs"]:
        name = f"{pair['teacher']} → {pair['student']}"
        if "refused" in pair:
            refused.setdefault(_line(pair["refused"]), []).append(name)
            continue
        shown.append([name, f"{pair['cells']:,}", *(_cell(pair["texts"][text]) for text in texts)])
        reasons = {_line(each["refused"]) for each in pair["texts"].values() if "refused" in each}
        for reason in sorted(reasons)[:1]:
            refused.setdefault(reason, []).append(f"{name} ({', '.join(_refused(pair))})")
    lines = [markdown(["teacher → student", "cells", *texts], shown)] if shown else []
    listed = [f"- {', '.join(names)}: {reason}" for reason, names in refused.items()]
    return "\n".join([*lines, *(["", "Refused:", "", *listed] if listed else [])])


def _refused(pair: Record) -> list[str]:
    return [name for name, each in pair["texts"].items() if "refused" in each]


def _cell(figures: Record) -> str:
    if "refused" in figures:
        return "refused"
    if figures["left_out"] > MOST_LEFT_OUT:
        return f"{figures['left_out']:.0%} rewritten"
    return f"{figures['boundaries']:.0%}, {figures['disagreement']:.1%}, {figures['entropy_kept']:.0%}".replace("%", "")


def _line(reason: str) -> str:
    """A reason without the place of the tokenizer, and without what markdown reads."""
    words = " ".join(word for word in reason.split() if "/" not in word)
    return words.replace("|", "\\|").replace("<", "&lt;").replace("`", "")
