"""A plan whose text the student writes while it trains, behind the beginnings of the run's text.

A row is written before the step that reads it first, by the weights of that moment, into a file of the run's folder,
and stays as it is: a run that resumes or rolls back reads what was read.
"""

import hashlib
import json
from dataclasses import dataclass, replace

import numpy as np
import torch

from kdtrain.config.values import Options, option, register_section
from kdtrain.files import publish_text
from kdtrain.models.generate import generate
from kdtrain.objective.batch import Batch
from kdtrain.ranks import on_main
from kdtrain.training.sources.mixture import mix
from kdtrain.training.sources.plan import DataPlan, register_plan
from kdtrain.training.sources.source import order_of


@dataclass(frozen=True, kw_only=True)
class SelfwrittenConfig(Options):
    """Train on what the student writes."""

    write_behind: int | None = option(None, least=1)
    """Tokens of a sequence behind which the student writes the rest."""
    write_beside: bool = option(False, needs="write_behind")
    """Mix what it writes with the text as it is."""

    @property
    def data_plan(self):
        return None if self.write_behind is None else "selfwritten"


register_section("selfwritten", {"distill": SelfwrittenConfig})


@register_plan("selfwritten")
class SelfwrittenData(DataPlan):
    """The plan of the other options, with a train split that the student writes."""

    def __init__(self, request):
        self.config, self.given = request.config, request.next()
        self.facts = self.given.facts and written(self.given.facts)

    def masked(self):
        return self.given.masked()

    def refuse_no_rows(self):
        self.given.refuse_no_rows()

    def prepare(self, resumed):
        sources, rows = self.given.prepare(resumed)
        options, folder = self.config.plugins["selfwritten"], self.config.out / "selfwritten"
        on_main(lambda: folder.mkdir(exist_ok=True))
        own = Selfwritten(sources["train"], folder, options.write_behind, self.config.seed)
        if options.write_beside:
            splits = {"train": [own, sources["train"]], "validation": [sources["validation"]] * 2}
            return mix(splits, None), rows
        return {**sources, "train": own}, rows


def written(facts):
    """Describe what a student writes behind a text: it has no teacher but an online one."""
    none = {"targets": "none", "top_k": 0, "num_samples": 0, "teacher": {}}
    return replace(facts, name=f"{facts.name}/selfwritten", identity=f"selfwritten {facts.identity}", **none)


class Selfwritten:
    """The rows of a text, each with its beginning and what the student wrote behind it."""

    overlaps, repeatable = False, True

    def __init__(self, text, folder, behind, seed):
        self.text, self.folder, self.behind, self.seed = text, folder, behind, seed
        self.facts, self.growing = written(text.facts), self

    def __len__(self):
        return len(self.text)

    def meet(self, student, teacher):
        self.student = student

    def path(self, row):
        return self.folder / f"{row}.json"

    def write_collective(self, indices):
        rows = on_main(lambda: [row for row in np.unique(indices).tolist() if not self.path(row).exists()])
        for row in rows:  # one by one, so that its text is a function of the weights, the seed and the row alone
            start = self.text.read(np.array([row])).tokens[:, : self.behind].to(self.student.device)
            with self.student.decoding() as next_logits:
                new = [*generate(next_logits, start, self.facts.seq_len + 1 - self.behind, 1.0, self.seed, row)]
            tokens = torch.cat([start, torch.stack(new, 1)], 1)[0].tolist()
            on_main(lambda: publish_text(self.path(row), json.dumps(tokens), "selfwritten"))  # noqa: B023

    def read(self, indices):
        missing = [row for row in indices if not self.path(row).exists()]
        if missing:  # of a check before the run, which reads the same on all ranks
            self.write_collective(np.array(missing))
        tokens = torch.tensor([json.loads(self.path(row).read_text()) for row in indices])
        segments = torch.zeros_like(tokens[:, 1:])
        return Batch(tokens, segments == 0, segments, None)

    def state_dict(self, sequences):
        rows = order_of(self, self.seed).batch(0, sequences)
        text = "".join(self.path(row).read_text() for row in rows)
        return {"sequences": sequences, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    def load_state_dict(self, state):
        if state != self.state_dict(state["sequences"]):
            raise ValueError("the student wrote something else")
