"""Draw the README's speed chart from RESULTS.md, light and dark: python benchmarks/chart.py"""

import math
import re
from pathlib import Path

HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs" / "pictures"

# (row of RESULTS.md, peer there, label of the bar)
BARS = (
    ("a-1", "flower", "regression, 500 of 5,000 clients: Flower"),
    ("a-1", "pfl", "the same: pfl-research"),
    ("c-5", "pfl", "MLP, 100 of 1,000 clients: pfl-research"),
    ("b", "flower", "CNN, 20 of 100 clients: Flower"),
    ("b", "pfl", "the same: pfl-research"),
    ("h-dp", "opacus", "DP-SGD on an LSTM: Opacus"),
    ("f-dp", "opacus", "DP-SGD on ResNet-18: Opacus"),
    ("d", "opacus", "DP-SGD on a CNN: Opacus"),
)
COLOURS = {"speed.svg": ("#1f2937", "#0f766e"), "speed-dark.svg": ("#e5e7eb", "#2dd4bf")}
LEFT, WIDTH, ROW = 330, 760, 30


def ratios() -> dict[tuple[str, str], float]:
    """Return {(row, peer): how many times faster fedveil is} as RESULTS.md has it."""
    row = re.compile(r"^\| \(([\w-]+)\) \| ([\w ]+) \|.*\*\*([\d.,]+) x\*\*", re.M)
    text = (HERE / "RESULTS.md").read_text()
    return {(m[1], m[2]): float(m[3].replace(",", "")) for m in row.finditer(text)}


def chart(text: str, bar: str) -> str:
    """Return the chart as SVG: one bar for each of `BARS`, on a logarithmic scale."""
    measured = ratios()
    scale = (WIDTH - LEFT - 90) / math.log10(max(measured[key[:2]] for key in BARS))
    lines = []
    for place, (work, peer, label) in enumerate(BARS):
        ratio, y = measured[work, peer], 44 + ROW * place
        length = max(2.0, scale * math.log10(ratio))
        shown = f"{ratio:,.0f} x" if ratio >= 10 else f"{ratio:.1f} x"
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{label}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="20" rx="3" fill="{bar}"/>',
            f'<text x="{LEFT + length + 8:.1f}" y="{y + 15}">{shown}</text>',
        ]
    height = 44 + ROW * len(BARS) + 8
    title = "How many times faster a round of fedveil is (logarithmic scale)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="14" fill="{text}">',
            f"<title>{title}</title>",
            f'<text x="{LEFT}" y="22" font-weight="600" text-anchor="middle">{title}</text>',
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    for name, colours in COLOURS.items():
        (PICTURES / name).write_text(chart(*colours), encoding="utf-8")
