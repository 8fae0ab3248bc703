"""`forebay explain`: why so much of a prefix was loaded, and the rest computed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
from rich.table import Table

from forebay.bench.choice.picture import decisions_svg
from forebay.bench.units import seconds_text
from forebay.cli.output import foreign, print_json, tables
from forebay.errors import ConfigError
from forebay.events import Alternative, ChoiceReason, Chosen
from forebay.journal import read_choices

_REASONS = {
    ChoiceReason.FASTEST: "this brings first tokens soonest, over all requests under way",
    ChoiceReason.WITHIN_MARGIN: "something else looks sooner, but not by enough to trust",
    ChoiceReason.UNKNOWN_PREFILL: "no prefill was reported yet",
    ChoiceReason.UNKNOWN_SOURCE: "nothing was read yet from one of its sources",
    ChoiceReason.TRIAL: "a few blocks are read of a source that was passed over for long, to see what it gives now",
}


@click.command()
@click.argument("events", type=click.Path(path_type=Path))
@click.option("--request", metavar="ID", help="Only the decisions about this request.")
@click.option("--svg", type=click.Path(path_type=Path), help="Draw what was expected of each decision into this file.")
@click.option("--json", "as_json", is_flag=True, help="The decisions as JSON on standard output.")
def explain(events: Path, request: str | None, svg: Path | None, as_json: bool) -> int:
    """Explain the decisions in EVENTS, a file that a store writes when its configuration names one (`events.path`).

    Exit code: 0; 1 if there is no decision (about that request); 2 for a file that is no such file.
    """
    chosen = [each for each in read_choices(events) if request in (None, each.request_id)]
    if svg is not None:
        try:
            svg.write_text(decisions_svg(chosen))
        except OSError as error:
            raise ConfigError(f"cannot write {svg}: {error.strerror}") from None
    if as_json:
        print_json(chosen)
        return 0 if chosen else 1
    for each in chosen:
        click.echo(in_words(each))
    tables().print(_summary(chosen))
    return 0 if chosen else 1


def in_words(chosen: Chosen) -> str:
    """One decision with its figures."""
    lines = [
        f"{foreign(chosen.request_id)}: {chosen.stored_blocks} of {chosen.wanted_blocks} blocks are stored, "
        f"{chosen.chosen_blocks} are loaded: {_REASONS[chosen.reason]}."
    ]
    lines += [f"  {_alternative(each, chosen)}" for each in chosen.alternatives if _is_telling(each, chosen)]
    if chosen.alternatives:
        lines.append(f"  ahead of it: {_time(chosen.queue_ns)} of reads, {_time(chosen.accelerator_ns)} of prefills")
    return "\n".join(lines)


def _is_telling(each: Alternative, chosen: Chosen) -> bool:
    return each.blocks in (0, chosen.chosen_blocks, chosen.stored_blocks)


def _alternative(each: Alternative, chosen: Chosen) -> str:
    mark = "->" if each.blocks == chosen.chosen_blocks else "  "
    return (
        f"{mark} load {each.blocks}: here in {_time(each.load_ns)}, prefill {_time(each.prefill_ns)}, "
        f"first token in {_time(each.first_token_ns)}, others later by {_time(each.delay_ns)} in all"
    )


def _summary(chosen: list[Chosen]) -> Table:
    table = Table(title=f"{len(chosen)} decisions")
    for name in ("reason", "decisions", "stored blocks", "loaded blocks"):
        table.add_column(name, justify="left" if name == "reason" else "right")
    stored: Counter[ChoiceReason] = Counter()
    loaded: Counter[ChoiceReason] = Counter()
    for each in chosen:
        stored[each.reason] += each.stored_blocks
        loaded[each.reason] += each.chosen_blocks
    for reason, count in Counter(each.reason for each in chosen).most_common():
        table.add_row(reason.value, str(count), str(stored[reason]), str(loaded[reason]))
    return table


def _time(quantity_ns: int) -> str:
    return seconds_text(quantity_ns / 1e9)
