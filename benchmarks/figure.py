"""Draws results of bench.py --json beside peer engines and the hardware limit, as an SVG figure.

Run: python -m benchmarks.figure RESULT.json [RESULT_4B.json] [--out docs/throughput.svg]

A result must come from bench.py's default workload, with two runs or more, on the GPU model that
the peers were measured on. The first run does not count, for the peers either; the light end of a
bar is the spread of the others. The hardware limit is the floor of benchmarks/roofline.py.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

GPU = "H200"
# (layers, hidden size) -> name; lowest and highest output tok/s of second and later runs, measured
# on one NVIDIA H200 with torch 2.11.0+cu130. The lowest are of bench.py's own workload, the highest
# of the job "bench" in docs/benchmarks/2026-12-01.md, whose lengths have the same distribution.
PEERS: dict[tuple[int, int], tuple[str, dict[str, tuple[float, float]]]] = {
    (28, 1024): (
        "Qwen3-0.6B",
        {"nano-vllm": (18_400, 20_080), "vLLM 0.24": (21_300, 23_197)},
    ),
    (36, 2560): (
        "Qwen3-4B shape",
        {"nano-vllm": (10_350, 11_315), "vLLM 0.24": (11_900, 12_608)},
    ),
}
FLOORS = {(28, 1024): 36_200, (36, 2560): 17_700}  # output tok/s, for results without --roofline
WORKLOAD = {
    "num_seqs": 256,
    "min_input_len": 100,
    "max_input_len": 1024,
    "min_output_len": 100,
    "max_output_len": 1024,
    "temperature": 0.6,
    "seed": 0,
}
NOTES = (
    "Second and later runs of a process, lowest to highest; nano-vllm bb823b3, vLLM 0.24.0, torch "
    "2.11.0+cu130.",
    "All were measured on the same GPU model, with lengths of the same distribution; see "
    "docs/benchmarks/.",
    "Hardware limit: K/V and weight reads at the measured rate of a copy, prefill at that of a "
    "large matrix product.",
)

WIDTH, LEFT, SCALE_END = 820, 168, 620  # pixels: the figure's width, start of bars, end of scale
BAR, GAP, HEAD, TOP, FOOT = 26, 12, 40, 84, 100
TICK = 10_000
INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e7ec"
COLOURS = {"nanovllm": "#0b7a75", "nano-vllm": "#a9b4c0", "vLLM 0.24": "#7b8794"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One engine's output tokens per second, lowest and highest."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Panel:
    """One model's bars, and its hardware limit in output tokens per second."""

    title: str
    bars: list[Bar]
    floor: float


def read_panel(result: dict[str, Any]) -> Panel:
    """Returns the panel of a result; raises `ValueError` if the peers' figures do not fit it."""
    if GPU not in result["device_name"]:
        raise ValueError(f"it was measured on {result['device_name']!r}, the peers on an {GPU}")
    options = {name: result["options"][name] for name in WORKLOAD}
    if options != WORKLOAD:
        raise ValueError(f"its workload is {options}, the peers' {WORKLOAD}")
    setting = (result["config"]["tensor_parallel_size"], result["config"]["torch_dtype"])
    if setting != (1, "torch.bfloat16"):
        raise ValueError(f"it has (GPUs, dtype) {setting}, the peers (1, 'torch.bfloat16')")
    key = (result["shape"]["num_layers"], result["shape"]["hidden_size"])
    if key not in PEERS:
        raise ValueError(f"its model has (layers, hidden size) {key}; known: {list(PEERS)}")
    title, peers = PEERS[key]
    rates = [run["output_tokens_per_second"] for run in result["runs"]]
    if len(rates) < 2:
        raise ValueError("it has one run, the peers' figures are of second runs; use --runs 2")
    bars = [Bar(name, *spread) for name, spread in peers.items()]
    bars.append(Bar("nanovllm", min(rates[1:]), max(rates[1:])))
    floor = result.get("roofline", {}).get("floor_output_tokens_per_second", FLOORS[key])
    return Panel(title, bars, floor)


def draw(panels: Sequence[Panel]) -> str:
    """Returns the SVG figure, with the panels below each other on one scale."""
    longest = max(max(panel.floor, *(bar.high for bar in panel.bars)) for panel in panels)
    num_ticks = -(-int(longest) // TICK)
    pixels = (SCALE_END - LEFT) / (num_ticks * TICK)  # per tok/s
    heights = [HEAD + (len(panel.bars) + 1) * (BAR + GAP) for panel in panels]
    bottom = TOP + sum(heights)
    parts = [_text(24, 36, "Output tokens per second, one NVIDIA H200", size=19, weight=600)]
    subtitle = (
        "256 requests of 100 to 1024 random prompt tokens and 100 to 1024 output tokens, bfloat16"
    )
    parts.append(_text(24, 58, subtitle, size=13, fill=MUTED))
    for tick in range(num_ticks + 1):
        x = LEFT + tick * TICK * pixels
        parts.append(_line(x, TOP + 4, x, bottom))
        parts.append(
            _text(
                x,
                bottom + 18,
                f"{tick * TICK // 1000}k" if tick else "0",
                12,
                MUTED,
                anchor="middle",
            )
        )
    y = TOP
    for panel, height in zip(panels, heights, strict=True):
        parts += _draw_panel(panel, y, pixels)
        y += height
    for index, line in enumerate(NOTES):
        parts.append(_text(24, bottom + 46 + 17 * index, line, size=12, fill=MUTED))
    total = bottom + FOOT
    title = (
        "Throughput of "
        + ", ".join(bar.name for bar in panels[0].bars)
        + ", and the hardware limit"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" '
            f'width="{WIDTH}" height="{total}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{total}" rx="10" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _draw_panel(panel: Panel, y: float, pixels: float) -> list[str]:
    """Returns the SVG elements of a panel from `y` down, with `pixels` per token/s."""
    parts = [_text(24, y + 24, panel.title, size=15, weight=600)]
    y += HEAD
    for bar in panel.bars:
        is_ours = bar.name == "nanovllm"
        colour, weight = COLOURS[bar.name], 600 if is_ours else 400
        parts.append(_text(LEFT - 12, y + 18, bar.name, 14, INK, weight, anchor="end"))
        parts.append(_rect(y, bar.high * pixels, f'fill="{colour}" fill-opacity="0.55"'))
        parts.append(_rect(y, bar.low * pixels, f'fill="{colour}"'))
        share = f"{bar.high / panel.floor:.0%} of the limit"
        label = (_rounded(bar.low, bar.high), share)
        parts += _label(LEFT + bar.high * pixels, y, label, weight)
        y += BAR + GAP
    style = f'fill="#f5f7f9" stroke="{MUTED}" stroke-dasharray="5 4"'
    parts.append(_text(LEFT - 12, y + 18, "hardware limit", 14, MUTED, anchor="end"))
    parts.append(_rect(y, panel.floor * pixels, style))
    parts += _label(LEFT + panel.floor * pixels, y, (_rounded(panel.floor, panel.floor), ""), 400)
    return parts


def _label(x: float, y: float, label: tuple[str, str], weight: int) -> list[str]:
    """Returns a label right of a bar's end at `x`: a value, and a muted remark if it is not ''."""
    value, more = label
    tail = f'<tspan dx="8" fill="{MUTED}" font-weight="400" font-size="12">{more}</tspan>'
    return [_text(x + 8, y + 18, value, 14, INK, weight, tail=tail if more else "")]


def _rounded(low: float, high: float) -> str:
    """Returns e.g. "18.4k to 18.8k", or one figure if both round to the same."""
    names = [f"{int(value / 100 + 0.5) / 10:.1f}k" for value in (low, high)]
    return " to ".join(dict.fromkeys(names))


def _rect(y: float, width: float, style: str) -> str:
    return f'<rect x="{LEFT}" y="{y:g}" width="{width:.1f}" height="{BAR}" rx="3" {style}/>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{GRID}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    size: int = 14,
    fill: str = INK,
    weight: int = 400,
    *,
    anchor: str = "start",
    tail: str = "",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" font-weight="{weight}" '
        f'text-anchor="{anchor}" paint-order="stroke" stroke="#ffffff" stroke-width="4">'
        f"{escape(text)}{tail}</text>"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of bench.py --json")
    parser.add_argument("--out", type=Path, default=Path("docs/throughput.svg"), help="the figure")
    args = parser.parse_args(argv)
    panels = []
    for path in args.results:
        try:
            panels.append(read_panel(json.loads(path.read_text())))
        except ValueError as error:
            sys.exit(f"error: {path}: {error}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(draw(panels))
    print(f"Wrote {args.out}")


if __name__ == "__main__":
    main()
