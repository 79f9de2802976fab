"""Draw bytes a token against fidelity from benchmarks/results/cache.json: `python benchmarks/plot_cache.py`.

One panel a vocabulary, one point a codec and temperature: bytes a token, and KL(full || cache) with the tail spread
evenly, both on log axes; `dense` errs by rounding alone and is drawn at the foot. Published sizes of other formats,
whose fidelity was not published in this measure, stand as vertical lines and are marked as published.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from plotting import paths

HERE = Path(__file__).parent
PUBLISHED = {
    "RS-KD, 12 unique: 36 without labels, moments, tokens (published)": 36,
    "Megatron, top-12: 5 K before zstd (published)": 60,
    "DistillKit, budget: 108 to 127 (published)": 117,
    "DistillKit, recommended: 296 to 344 (published)": 320,
}
FOOT = 1e-4
"""KL below which a point is drawn at the foot, nats."""


def main(source: Path = HERE / "results" / "cache.json", target: Path = HERE / "figures" / "cache.png") -> int:
    """Write the figure."""
    caches = json.loads(source.read_text())["caches"]
    figure, axes = plt.subplots(1, len(caches), figsize=(5.5 * len(caches), 5.2), squeeze=False, sharey=True)
    for axis, (name, codecs) in zip(axes[0], caches.items(), strict=True):
        _panel(axis, codecs)
        axis.set(xscale="log", yscale="log", title=name, xlabel="bytes a token, everything included")
    axes[0][0].set_ylabel("KL(full || cache), tail spread evenly, nats")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=130)
    return 0


def _panel(axis: plt.Axes, codecs: dict[str, dict]) -> None:
    sizes = [each["bytes_per_token"]["total"] for each in codecs.values()]
    for temperature, marker in (("T=1", "o"), ("T=2", "s"), ("T=4", "^")):
        errors = [max(FOOT, each["fidelity"][temperature]["kl_spread"]) for each in codecs.values()]
        axis.scatter(sizes, errors, marker=marker, label=f"this cache, {temperature}", zorder=3)
    for height, codec, size in zip((2e-2, 2e-2, 4e-2, 6e-4, 6e-3), codecs, sizes, strict=False):
        axis.text(size, height, f"{codec}: {size:,.1f} B", fontsize=7, rotation=90, ha="right", va="center")
        axis.axvline(size, color="lightblue", linewidth=0.6, zorder=0)
    for number, (label, size) in enumerate(PUBLISHED.items()):
        axis.axvline(size, color="grey", linestyle=("-", "--", ":", "-.")[number], linewidth=0.9, label=label)
    axis.set_ylim(FOOT / 2, 30)


if __name__ == "__main__":
    sys.exit(main(*paths(__doc__, "cache.json", "cache.png")))
