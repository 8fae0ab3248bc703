"""Pictures of decisions: what was expected of each, and the regret over a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forebay.bench.choice.grid import Judged
from forebay.events import Chosen

_COLOURS = {"load all": "#1f6f8b", "compute all": "#b5502b", "chosen": "#1d2730"}


def _page(width: int, height: int, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join((head, '<rect width="100%" height="100%" fill="#fff"/>', *body, "</svg>", ""))


def decisions_svg(chosen: Sequence[Chosen]) -> str:
    """Expected seconds to the first token, decision by decision, on a logarithmic axis; the last 400."""
    weighed = [each for each in chosen if each.alternatives][-400:]
    width, height = 80 + 8 * max(40, len(weighed)), 320
    times = [alternative.first_token_ns for each in weighed for alternative in each.alternatives]
    low, high = math.log10(max(1, min(times, default=1))), math.log10(max(10, max(times, default=10)))
    body = []
    for row, (name, colour) in enumerate(_COLOURS.items()):
        body.append(f'<text x="{60 + 110 * row}" y="20" font-size="13" fill="{colour}">&#9679; {name}</text>')
    for power in range(math.floor(low), math.ceil(high) + 1):
        y = 290 - 250 * (power - low) / max(0.1, high - low)
        if 35 <= y <= 295:
            body.append(f'<text x="2" y="{y + 4:.1f}" font-size="11" fill="#55636f">{10.0 ** (power - 9):g} s</text>')
            body.append(f'<line x1="56" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e8ec"/>')
    for number, each in enumerate(weighed):
        blocks = {"load all": each.stored_blocks, "compute all": 0, "chosen": each.chosen_blocks}
        for name, length in blocks.items():
            for alternative in each.alternatives:
                if alternative.blocks == length:
                    y = 290 - 250 * (math.log10(max(1, alternative.first_token_ns)) - low) / max(0.1, high - low)
                    radius = 2 if name == "chosen" else 3.5
                    body.append(f'<circle cx="{64 + 8 * number}" cy="{y:.1f}" r="{radius}" fill="{_COLOURS[name]}"/>')
    return _page(width, height, body)


def regret_svg(judged: Sequence[Judged]) -> str:
    """A heat map: prefill rate and sessions down, bandwidth and context across; percent above the best."""
    rows = sorted({(each.cell.prefill_tokens_per_s, each.cell.sessions) for each in judged})
    columns = sorted({(each.cell.bytes_per_s, each.cell.context_tokens) for each in judged})
    width, height = 170 + 58 * len(columns), 90 + 24 * len(rows)
    body = ['<text x="8" y="20" font-size="14">Mean time to the first token, percent above the best choice</text>']
    for at, (bandwidth, context) in enumerate(columns):
        x = 172 + 58 * at
        body.append(f'<text x="{x}" y="46" font-size="10">{bandwidth / 1e9:g} GB/s</text>')
        body.append(f'<text x="{x}" y="60" font-size="10">{context // 1024}k</text>')
    for at, (rate, sessions) in enumerate(rows):
        label = f"{rate / 1e3:g}k tok/s, {sessions} sessions"
        body.append(f'<text x="8" y="{84 + 24 * at}" font-size="11">{label}</text>')
    for each in judged:
        cell = each.cell
        row = rows.index((cell.prefill_tokens_per_s, cell.sessions))
        column = columns.index((cell.bytes_per_s, cell.context_tokens))
        body.append(
            f'<rect x="{168 + 58 * column}" y="{68 + 24 * row}" width="56" height="22" fill="{_colour(each.regret)}"/>'
            f'<text x="{174 + 58 * column}" y="{84 + 24 * row}" font-size="11">{100 * each.regret:+.1f}</text>'
        )
    return _page(width, height, body)


def _colour(regret: float) -> str:
    """Green where splits beat all that was tried, white at the best, red from 5 % above it."""
    share = max(-1.0, min(1.0, regret / 0.05))
    other = round(255 - 110 * abs(share))
    return f"rgb(255,{other},{other})" if share > 0 else f"rgb({other},255,{other})"
