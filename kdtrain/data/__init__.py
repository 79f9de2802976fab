"""Sequences: documents (`corpus`), rows of fixed length (`packing`, `logprobs`), the order of the rows (`order`)."""
