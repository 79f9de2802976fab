"""The options of training across tokenizers."""

from typing import Any

from kdtrain.config.values import refuse

TERMS = {"auto": None, "cells": (True, False), "chunks": (False, True), "both": (True, True)}
"""Of the loss across tokenizers: whether it has cells, and chunks; None: cells, or chunks where cells disagree."""


def check_terms(name: str) -> None:
    """UsageError: no such terms."""
    refuse(name not in TERMS, f"--cross-tokenizer '{name[:80]}' is unknown; use {', '.join(TERMS)}")


def _check_pairs(pairs: tuple[str, ...]) -> None:
    for number, each in enumerate(pairs):
        refuse(
            each.find("=") < 1,
            f"--special-tokens '{each[:80]}' is not TEACHER'S=STUDENT'S; leave the second out, "
            "as '<pad>=', for a token that is dropped",
        )
        token = each.partition("=")[0]
        refuse(token in partners(pairs[:number]), f"--special-tokens gives '{token[:80]}' twice; give it one partner")


SPECIAL_TOKENS: dict[str, Any] = {
    **{"several": True, "later": True, "needs": "cross_tokenizer"},
    **{"check": _check_pairs, "shown": "A=B"},
}
"""Attributes of the option `special_tokens`."""


def partners(pairs: tuple[str, ...]) -> dict[str, str]:
    """The student's special token for each of the teacher's that `--special-tokens` names; empty: it is left out."""
    return {one: other for one, _, other in (each.partition("=") for each in pairs)}


def refuse_across(terms: str | None, one_text: bool, hidden_loss: str) -> None:
    """UsageError: a run across tokenizers does not read one cache or packed text, or has a loss of hidden states."""
    refuse(
        terms is not None and not one_text,
        "--cross-tokenizer reads one cache; give one --cache (or --teacher with --data), without --source",
    )
    refuse(
        terms is not None and hidden_loss != "none",
        f"--hidden-loss {hidden_loss} compares states token by token, which --cross-tokenizer cannot; leave one "
        "of them out",
    )
