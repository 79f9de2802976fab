"""The card of a cache: a README.md that describes it to people.

A card ends in a check sum of itself: one that somebody has changed, or written, is never replaced.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from kdtrain.cache.format.manifest import Manifest
from kdtrain.cache.tools.facts import cache_facts, contents, fidelity, parent_lines
from kdtrain.errors import log
from kdtrain.files import LARGE, publish_text, read_text
from kdtrain.tables import facts_table, markdown, markdown_text

CARD = "README.md"
_PARENTS = 20  # that a card lists


def write_card(folder: Path, manifest: Manifest) -> None:
    """Write the card of a cache, unless a README.md is there that kdtrain did not write. RunError: a full disk, ..."""
    path = folder / CARD
    if os.path.lexists(path) and not is_own(path):
        log.info("%s is not kdtrain's, and stays", path)
        return
    publish_text(path, make_card(manifest), "cache.card")


def is_own(path: Path) -> bool:
    """Return True if kdtrain wrote this card, and nobody has changed it."""
    try:
        return not path.is_symlink() and is_card(read_text(path, LARGE))
    except (OSError, ValueError):
        return False


def is_card(text: str) -> bool:
    """Return True if a text is a card as kdtrain writes it."""
    found = re.fullmatch(r"(?s)(.*)<!-- kdtrain card ([0-9a-f]{64}) -->\n", text)
    return found is not None and _check_sum(found[1]) == found[2]


def _check_sum(text: str) -> str:
    return hashlib.sha256(f"kdtrain card {text}".encode()).hexdigest()


def make_card(
    manifest: Manifest, where: str = "THIS-FOLDER", head: Iterable[str] = (), more: Iterable[str] = ()
) -> str:
    """Make the text of a card.

    where: the address at which it is published. head: lines that the hub reads. more: lines behind the facts.
    """
    above = ["---", *head, "---", ""] if head else []
    text = "\n".join([*above, *_body(manifest, where, more), ""])
    return f"{text}<!-- kdtrain card {_check_sum(text)} -->\n"


def _body(manifest: Manifest, where: str, more: Iterable[str]) -> Iterator[str]:
    teacher = markdown_text((manifest.settings.teacher or {}).get("spec")) or "a teacher"
    made = not manifest.codec.taught
    yield f"# {'Packed tokens' if made else f'What {teacher} predicts'}: a cache for distillation"
    yield ""
    kept = "no distribution: its tokens are packed without a teacher" if made else contents(manifest)
    yield f"For every token of a text this data set holds {kept}, in HDF5. kdtrain made it, and any tool can read it."
    yield ""
    yield from markdown(facts_table(cache_facts(manifest)))
    yield from more
    if manifest.parents:
        yield from ("", "## Made of", "")
        yield from (f"- {markdown_text(line)}" for line in parent_lines(manifest, _PARENTS))
    if found := fidelity(manifest):
        yield from ("", "## Fidelity", "")
        for part in found:
            yield from [markdown_text(part)] if isinstance(part, str) else ("", *markdown(part), "")
    yield _USE.replace("PLACE", where).replace("SPLIT", next(iter(manifest.splits)))


_USE = """
## Use

```bash
kdtrain distill --cache PLACE --student SPEC --out runs/NAME
kdtrain verify PLACE
```

```python
import kdtrain as kd

row = kd.Cache("PLACE")["SPLIT"][0]  # a dict of tensors
```

With h5py, once the files are here (index.h5 shows all shards as one):

```python
import h5py, hdf5plugin

with h5py.File("index.h5") as cache:
    split = cache["SPLIT"]
    print({name: each.attrs["about"] for name, each in split.items() if name != "dictionary"})
    tokens = split["tokens"][0]  # position t reads tokens[0..t], its label is tokens[t + 1]
```

The numbers are stored as codes; cache/README.md of kdtrain specifies them, with a reader of thirty lines.
`test_vector` in manifest.json holds some of them decoded, by which a reader can be proved. The manifest has
the SHA-256 of every shard, and `kdtrain verify` compares them."""
