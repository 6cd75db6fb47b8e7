"""Draw the charts of README and docs from measured JSON: SVG files, light and dark.

    python -m benchmarks.pictures

``results/loads.json`` has pagespec, vLLM and the roofline (``roofline.py``) per workload, with the
source of the figures. ``policies.py`` writes ``results/policies.json``. The colours are those of
the viewer (``src/viewer/palette.css``). ``shots.py`` makes the screenshots of the viewer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_WIDTH, _LEFT, _RIGHT = 760, 190, 90
_BAR, _GAP = 15, 4

Colours = dict[str, str]


def read_palette(theme: str) -> Colours:
    """The custom properties of the palette, by name without dashes."""
    text = (ROOT / "src/viewer/palette.css").read_text()
    begin = text.index(":root {" if theme == "light" else ':root[data-theme="dark"] {')
    block = text[begin : text.index("}", begin)]
    return dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", block))


class Drawing:
    """An SVG in progress."""

    def __init__(self, colours: Colours) -> None:
        self.colours = colours
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, colour: str = "fg", **style: Any) -> None:
        attributes = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{self.colours[colour]}"{attributes}>'
            f"{escape(text)}</text>"
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
            f'fill="{self.colours[colour]}"/>'
        )

    def line(self, x: float, y: float, end: float, colour: str = "fg", dashed: bool = True) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="M{x:.1f} {y:.1f}V{end:.1f}" stroke="{self.colours[colour]}" '
            f'stroke-width="2"{dash}/>'
        )

    def finish(self, height: float, title: str) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
            f'width="{_WIDTH}" height="{height:.0f}" font-family="{_FONT}" font-size="13">\n'
            f"<title>{escape(title)}</title>\n"
            f'<rect width="100%" height="100%" rx="6" fill="{self.colours["bg"]}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def _legend(drawing: Drawing, y: float, entries: Sequence[tuple[str, str, str]]) -> None:
    x: float = _LEFT
    for colour, name, shape in entries:
        if shape == "line":
            drawing.line(x + 5, y - 11, y + 2, colour)
        else:
            drawing.bar(x, y - 10, 11, 11, colour)
        drawing.text(x + 17, y, name, "muted", font_size=12)
        x += 35 + 6.8 * len(name)


def _number(value: float) -> str:
    return f"{value:,}" if value >= 100 else f"{value:.2f}"


# Key in the JSON, colour of the bar, name in the legend.
_ENGINES = (
    ("pagespec", "decode", "pagespec"),
    ("vLLM", "waiting", "vLLM"),
    ("invariant", "prefill", "vLLM, batch-invariant"),
)


def draw_beside_vllm(measured: dict[str, Any], part: str, title: str, colours: Colours) -> str:
    """A bar per engine and a line at the roofline per load. Each load has its own scale, up to its
    largest value."""
    drawing = Drawing(colours)
    drawing.text(20, 32, title, font_size=16, font_weight=600)
    unit = measured[part]["unit"]
    drawing.text(20, 51, f"{unit}; {measured['card']}", "muted", font_size=12)
    legend = [(colour, name, "") for _, colour, name in _ENGINES]
    _legend(drawing, 75, [*legend, ("fg", "roofline", "line")])
    is_dark = colours["bg"] < colours["fg"]
    y = 94.0
    for row in measured[part]["rows"]:
        values = [row[key] for key, _, _ in _ENGINES]
        scale = (_WIDTH - _LEFT - _RIGHT) / max(*values, row["roofline"])
        drawing.text(_LEFT - 12, y + 1.5 * (_BAR + _GAP) + 3, row["name"], text_anchor="end")
        top = y
        for value, (key, colour, _) in zip(values, _ENGINES, strict=True):
            width = value * scale
            drawing.bar(_LEFT, y, width, _BAR, colour)
            # Orange is light in both themes.
            on_bar = "bg" if key == "pagespec" or (key == "invariant" and is_dark) else "fg"
            is_wide = width > (_WIDTH - _LEFT - _RIGHT) / 2
            drawing.text(
                _LEFT + width + (-8 if is_wide else 6),
                y + _BAR - 3.5,
                _number(value),
                on_bar if is_wide else "fg",
                font_size=12,
                font_weight=600 if key == "pagespec" else 400,
                text_anchor="end" if is_wide else "start",
            )
            y += _BAR + _GAP
        x = _LEFT + row["roofline"] * scale
        drawing.line(x, top - 2, y - _GAP + 2)
        roofline = _number(row["roofline"])
        drawing.text(_WIDTH - _RIGHT + 10, top + 2 * _BAR + 2, roofline, "muted", font_size=12)
        y += 14
    for line in measured["setting"]:
        drawing.text(20, y + 6, line, "muted", font_size=10.5)
        y += 14
    return drawing.finish(y + 8, title)


def draw_policies(measured: dict[str, Any], colours: Colours) -> str:
    """Mean latency as a bar and the 99th percentile as a tick, for short and long requests."""
    drawing = Drawing(colours)
    drawing.text(20, 32, "Four policies, one arrival trace", font_size=16, font_weight=600)
    rate = measured["requests_per_second"]
    says = f"latency in seconds, mean and 99th percentile; {measured['requests']:,} requests, "
    drawing.text(20, 51, f"{says}{rate:g} per second", "muted", font_size=12)
    _legend(
        drawing,
        75,
        [
            ("decode", "short questions, mean", ""),
            ("prefill", "long documents, mean", ""),
            ("fg", "99th percentile", "line"),
        ],
    )
    y = 92.0
    kinds = (("short_latency_s", "decode"), ("long_latency_s", "prefill"))
    longest = max(
        numbers[kind]["p99"]
        for policies in measured["arrivals"].values()
        for numbers in policies.values()
        for kind, _ in kinds
    )
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    for arrivals, policies in measured["arrivals"].items():
        y += 12
        drawing.text(20, y + 8, f"Arrivals: {arrivals}", font_weight=600)
        y += 20
        for policy, numbers in policies.items():
            drawing.text(_LEFT - 12, y + _BAR + 6, policy.replace("_", " "), text_anchor="end")
            for kind, colour in kinds:
                mean, p99 = numbers[kind]["mean"], numbers[kind]["p99"]
                drawing.bar(_LEFT, y, p99 * scale, _BAR, "panel")
                drawing.bar(_LEFT, y, mean * scale, _BAR, colour)
                drawing.line(_LEFT + p99 * scale, y, y + _BAR, dashed=False)
                says = f"{mean:.2f} / {p99:.2f}"
                drawing.text(_LEFT + p99 * scale + 7, y + _BAR - 3.5, says, font_size=12)
                y += _BAR + _GAP
            y += 8
    drawing.text(20, y + 14, f"Time is {measured['time']}.", "muted", font_size=10.5)
    return drawing.finish(y + 28, "Latency under four policies")


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    loads = json.loads((RESULTS / "loads.json").read_text())
    policies = json.loads((RESULTS / "policies.json").read_text())
    pictures: dict[str, Callable[[Colours], str]] = {
        "loads": lambda c: draw_beside_vllm(loads, "throughput", "Throughput, Qwen3", c),
        "latency": lambda c: draw_beside_vllm(loads, "latency", "Latency of one request", c),
        "policies": lambda c: draw_policies(policies, c),
    }
    for name, draw in pictures.items():
        for theme in ("light", "dark"):
            path = IMAGES / f"{name}-{theme}.svg"
            path.write_text(draw(read_palette(theme)))
            print(path.relative_to(ROOT), f"{path.stat().st_size / 1024:.1f} KiB")


if __name__ == "__main__":
    main()
