"""The palette: the same names in both themes, distinguishable for colour-blind readers too."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from benchmarks.pictures import read_palette

PALETTE = Path(__file__).parents[2] / "src/viewer/palette.css"
TOGETHER = (
    ("waiting", "prefill", "decode", "preempted", "paused", "finished", "hit", "bg"),
    ("owned", "cached", "free"),
    ("owned", "decode", "prefill", "hit", "bg"),
    ("hit", "evicted", "bg"),
)
# What is seen without one kind of cone (Machado, Oliveira and Fernandes 2009), in linear RGB.
SEEN_BY = {
    "everybody": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopes": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopes": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopes": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# Distance in CIELAB; 2.3 is a just noticeable difference.
LEAST_DISTANCE = 13


def lab(colour: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    seen = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in matrix]
    r, g, b = (max(0.0, min(1.0, c)) for c in seen)
    white = (0.95047, 1.0, 1.08883)
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (
        (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116)
        for t in ((p * r + q * g + s * b) / w for (p, q, s), w in zip(rows, white, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("reader", SEEN_BY)
def test_adjacent_colours_are_distinguishable(theme: str, reader: str) -> None:
    palette = read_palette(theme)
    for names in TOGETHER:
        for a, b in itertools.combinations(names, 2):
            places = (lab(palette[name], SEEN_BY[reader]) for name in (a, b))
            distance = sum((p - q) ** 2 for p, q in zip(*places, strict=True)) ** 0.5
            assert distance > LEAST_DISTANCE, (a, b, distance)


def test_dark_is_one_whether_the_system_or_the_page_asks_for_it() -> None:
    blocks = re.findall(r"\{([^{}]*--waiting[^{}]*)\}", PALETTE.read_text())
    light, by_system, by_page = (dict(re.findall(r"--(\w+): (\S+);", block)) for block in blocks)
    assert by_system == by_page
    assert by_page.keys() == light.keys()
