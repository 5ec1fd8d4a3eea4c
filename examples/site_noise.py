"""Accuracy of the recipe `sites` by epsilon, number of sites and share of the noise, with a figure.

One site with the whole noise is the pooled run: the same training with all records at one place.
Arguments are settings for every run, such as data.name=digits rounds=20. Writes site-noise.png.
"""

import sys
import tempfile
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

import fedveil as fv

EPSILONS, SITES, SEEDS = (0.5, 1.0, 3.0), (3, 30, 300), (1, 2, 3)
POOLED = ("whole", 1)
COLUMNS = [POOLED, *(("part", n) for n in SITES), *(("whole", n) for n in SITES)]
FASHION_MNIST = (
    *("data.name=fashion-mnist", "client.unit=record", "sample.rate=0.01", "rounds=500"),
    *("clip.value=1", "server.lr=0.3", "server.momentum=0.9", "budget.delta=1e-5"),
    "evaluate.every=1000",
)


def accuracy(share, sites, epsilon, seed):
    cell = (f"noise.share={share}", f"data.sites={sites}", f"budget.epsilon={epsilon}")
    settings = (*FASHION_MNIST, *cell, f"seed={seed}", *sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        run = fv.run("sites", out=Path(folder) / "run", set=settings, quiet=True)
        return run.result["metrics"]["accuracy"]


def name(share, sites):
    return "pooled" if (share, sites) == POOLED else f"{share}, {sites} sites"


def figure(table):
    drawing = Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawing.add_subplot()
    styles = {"part": ("o", "-"), "whole": ("s", "--")}
    for number, column in enumerate(COLUMNS):
        marker, dashes = styles[column[0]]
        pooled = column == POOLED
        colour = "black" if pooled else f"C{(number - 1) % len(SITES)}"
        line = "-" if pooled else dashes
        heights = [table[column, epsilon] for epsilon in EPSILONS]
        axes.plot(EPSILONS, heights, line, marker=marker, color=colour, label=name(*column))
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("epsilon per record, of the first line of the claim")
    axes.set_ylabel(f"test accuracy, mean of {len(SEEDS)} seeds")
    axes.grid(alpha=0.3)
    axes.legend(title="share of the noise", loc="center left", bbox_to_anchor=(1, 0.5))
    return drawing


if __name__ == "__main__":
    table = {}
    print("| epsilon | " + " | ".join(name(*column) for column in COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for epsilon in EPSILONS:
        for column in COLUMNS:
            found = [accuracy(*column, epsilon, seed) for seed in SEEDS]
            table[column, epsilon] = mean(found)
        cells = (f"{table[column, epsilon]:.3f}" for column in COLUMNS)
        print(f"| {epsilon:g} | " + " | ".join(cells) + " |", flush=True)
    figure(table).savefig("site-noise.png", dpi=110)
