"""Sequences: where text comes from (`corpus`), rows of fixed length (`packing`), which row when (`order`)."""
