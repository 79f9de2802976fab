"""A stranger's source, teacher, temperature, divergence and logger."""

import json
from dataclasses import replace

import torch

import kdtrain as kd
from kdtrain.training.sources.cache import open_cache


@kd.register_source("backwards")
class Backwards:
    """The packed text of --data, last token first."""

    overlaps, repeatable = True, True

    def __init__(self, request):
        self.text = open_cache(request)
        self.facts = replace(self.text.facts, identity=f"backwards {self.text.facts.identity}")

    def __len__(self):
        return len(self.text)

    def read(self, indices):
        batch = self.text.read(indices)
        return replace(batch, tokens=batch.tokens.flip(1), loss_mask=batch.loss_mask.flip(1))


@kd.register_teacher("table")
class Table(kd.Teacher):
    """Fixed logits of the next token, by the last one."""

    vocab_size = property(lambda self: self.spec.options["size"])
    digest = property(lambda self: f"table {self.vocab_size}")

    def logits(self, tokens_BT, segments_BT):
        size = self.vocab_size
        return torch.randn(size, size, generator=torch.Generator().manual_seed(0))[tokens_BT.cpu()]


@kd.register_temperature("halving", learns=False, scheduled=True, help="from T to its end, halving the way")
class Halving(kd.Temperature):
    def __init__(self, options):
        super().__init__(options.start)
        self.start, self.end = options.start, options.end
        self.reach = tuple(sorted((self.start, self.end)))

    def value(self):
        return torch.tensor(self.end + (self.start - self.end) / 2**self.step)


@kd.register_divergence("squares", depends_on_temperature=False)
def squares(events, number):
    """Half the squared distance of the probabilities."""
    return (events.teacher.exp() - events.student.exp()).square().sum(-1) / 2


@kd.register_logger("file")
class File(kd.Logger):
    """A file of the run with its losses and its events."""

    def __init__(self, folder, text, resume_step):
        self.path, self.found = folder / text, {"losses": {}, "events": []}

    def scalars(self, step, numbers):
        if "train/loss" in numbers:
            self.found["losses"][step] = numbers["train/loss"]

    def event(self, step, kind, details):
        self.found["events"].append([step, kind])

    def close(self):
        self.path.write_text(json.dumps(self.found))
