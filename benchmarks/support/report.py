"""Table, JSON and plot of a benchmark's rows."""

import datetime
import json
import math
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from html import escape
from statistics import median


def _processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _first_line(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return "not installed"
    return (done.stdout or done.stderr).strip().splitlines()[0]


def _origin(notes):
    import torch

    return [
        f"machine: {_processor()}, {os.cpu_count()} cores, "
        f"Linux {platform.release()}",
        f"versions: torch {torch.__version__}, "
        f"Python {platform.python_version()}, {_first_line(['mpirun', '--version'])}",
        f"date: {datetime.date.today()}",
        f"command: {shlex.join(sys.argv)}",
        *(f"note: {note}" for note in notes),
    ]


def _spread(values):
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def _table(rows):
    lines = [
        ["case", "unit", "ours (range)", "peer", "its value (range)",
         "ratio", "95 %"]
    ]
    for row in rows:
        low, high = row.interval
        lines.append(
            [row.case, row.unit, _spread(row.ours), row.peer_name,
             _spread(row.peer), f"{row.ratio:.2f}", f"{low:.2f} to {high:.2f}"]
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    return [
        "  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip()
        for line in lines
    ]


def _json(rows):
    return [
        {
            "case": row.case,
            "metric": row.metric,
            "unit": row.unit,
            "ours": median(row.ours),
            "peer": median(row.peer),
            "peer_name": row.peer_name,
            "ratio": row.ratio,
            "ratio_interval": row.interval,
        }
        for row in rows
    ]


def _plot(name, rows):
    """Ratios as bars from 1, on a logarithmic axis, with their intervals."""
    left, width, height = 330, 480, 26
    largest = max([2.0] + [row.interval[1] for row in rows])
    smallest = min([1.0] + [row.interval[0] for row in rows])
    low = math.floor(math.log10(smallest))
    high = math.ceil(math.log10(largest))

    def x(ratio):
        return left + width * (math.log10(ratio) - low) / (high - low)

    bottom = 40 + height * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" '
        f'height="{bottom + 30}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(name)}: '
        "times better than the peer (log scale)</text>",
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(
            f'<line x1="{at:.1f}" y1="32" x2="{at:.1f}" y2="{bottom}" '
            'stroke="#ddd"/>'
            f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{10.0**power:g}</text>"
        )
    for i, row in enumerate(rows):
        top = 36 + height * i
        middle = top + height / 2 - 3
        start, end = sorted([x(1.0), x(row.ratio)])
        least, most = map(x, row.interval)
        label = escape(f"{row.case} vs {row.peer_name}")
        parts.append(
            f'<text x="{left - 8}" y="{middle + 4}" text-anchor="end">{label}</text>'
            f'<rect x="{start:.1f}" y="{top}" width="{end - start:.1f}" '
            f'height="{height - 6}" fill="{"#4878a8" if row.ratio >= 1 else "#b0584a"}"/>'
            f'<line x1="{least:.1f}" y1="{middle}" x2="{most:.1f}" '
            f'y2="{middle}" stroke="black"/>'
            f'<text x="{max(end, most) + 6:.1f}" y="{middle + 4}">'
            f"{row.ratio:.2f}</text>"
        )
    return "\n".join(parts + ["</svg>", ""])


def write(folder, name, rows, notes):
    """Prints the table and writes NAME.json, NAME.txt and NAME.svg."""
    text = "\n".join(_origin(notes) + [""] + _table(rows)) + "\n"
    print(f"\n{text}")
    (folder / f"{name}.txt").write_text(text)
    (folder / f"{name}.json").write_text(json.dumps(_json(rows), indent=2) + "\n")
    (folder / f"{name}.svg").write_text(_plot(name, rows))
