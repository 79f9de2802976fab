"""Caches that others made: what a layout is, and one file for each."""

from kdtrain.cache.layouts import distillkit, topk

__all__ = ["distillkit", "topk"]
