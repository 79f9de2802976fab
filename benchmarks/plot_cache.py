"""Draw bytes a token against fidelity from benchmarks/results/cache.json: `python benchmarks/plot_cache.py`.

One point a codec and temperature: bytes a token, and KL(full || cache) with the tail spread evenly. Published sizes
of other formats, whose fidelity was not published in this measure, stand as vertical lines and are marked as such.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PUBLISHED = {
    "DistillKit, budget (published: 108-127)": 117,
    "DistillKit, recommended (published: 296-344)": 320,
    "RS-KD, 12 unique (published: 36, without labels)": 36,
    "Megatron, top-12 before zstd (published: 5 K)": 60,
}


def main(source: Path = HERE / "results" / "cache.json", target: Path = HERE / "figures" / "cache.png") -> int:
    """Write the figure."""
    caches = json.loads(source.read_text())["caches"]
    figure, axes = plt.subplots(1, len(caches), figsize=(5 * len(caches), 4.2), squeeze=False)
    for axis, (name, codecs) in zip(axes[0], caches.items(), strict=True):
        for temperature, marker in (("T=1", "o"), ("T=2", "s"), ("T=4", "^")):
            points = [
                (each["bytes_per_token"]["total"], each["fidelity"][temperature]["kl_spread"])
                for each in codecs.values()
            ]
            axis.scatter(*zip(*points, strict=True), marker=marker, label=temperature)
        for codec, each in codecs.items():
            axis.annotate(codec, (each["bytes_per_token"]["total"], each["fidelity"]["T=1"]["kl_spread"]), fontsize=7)
        for number, (label, size) in enumerate(PUBLISHED.items()):
            axis.axvline(size, color="grey", linestyle=("-", "--", ":", "-.")[number], linewidth=0.8, label=label)
        axis.set(xscale="log", yscale="log", title=name, xlabel="bytes a token, everything included")
    axes[0][0].set_ylabel("KL(full || cache), tail spread evenly, nats")
    axes[0][-1].legend(fontsize=6)
    figure.tight_layout()
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main(*(Path(word) for word in sys.argv[1:])))
