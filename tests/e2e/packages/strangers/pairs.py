"""A stranger's layout: the entries of a token as one list, id and log p in turn."""

import numpy as np

from kdtrain.plugins.layouts.layout import Layout, register_layout


@register_layout("pairs")
class Pairs(Layout):
    """one list a token: id, log p, id, log p, ..."""

    def __init__(self, options):
        super().__init__(options)
        self.entries = {"pairs": 2}

    def decode(self, record, where):
        values, lengths = record["pairs"]
        both = np.reshape(values, (len(lengths), -1, 2))
        return both[..., 0].astype(np.int64), both[..., 1]
