"""The parts of the report that tell of a plan's gates: each gate's verdict, and each check beside its limit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise

from forebay.bench.environment import Environment
from forebay.bench.gates.verdicts import Check, GateResult, GatesRecord, Outcome
from forebay.bench.markup import escaped
from forebay.bench.report import texts
from forebay.bench.report.sayings import said, said_items
from forebay.bench.report.tables import Row, table
from forebay.bench.report.texts import Voice
from forebay.bench.report.values import check_title, limit_text, measured_text, time_text
from forebay.bench.units import NOTHING


def gate_name(voice: Voice, gate: str) -> str:
    known = texts.GATE_NAMES.get(gate)
    return escaped(gate) if known is None else voice(known)


def badge(voice: Voice, outcome: Outcome) -> str:
    return f'<span class="badge {outcome.value}">{voice(texts.OUTCOMES[outcome])}</span>'


def summary(voice: Voice, record: GatesRecord) -> str:
    """A row a gate."""
    heads = [voice(each) for each in (texts.GATE, texts.VERDICT, texts.CHECKS_PASSED, texts.BEGAN, texts.TOOK)]
    rows = []
    for result in record.results:
        passed = sum(each.outcome is Outcome.PASS for each in result.checks)
        rows.append(
            Row(
                gate_name(voice, result.gate),
                (
                    badge(voice, result.outcome),
                    f"{passed} / {len(result.checks)}",
                    escaped(time_text(result.began)),
                    f'<span class="whole">{_duration(result)}</span>',
                ),
            )
        )
    done = {result.gate for result in record.results}
    rows += [
        Row(gate_name(voice, gate), (voice(texts.NOT_RUN), "", "", "")) for gate in record.planned if gate not in done
    ]
    return table(heads, rows, "left") + _interruptions(voice, record)


def _interruptions(voice: Voice, record: GatesRecord) -> str:
    """When an interrupted run went on."""
    found = ""
    for before, start in pairwise(record.starts):
        text = texts.AFTER_REBOOT if start.boot != before.boot else texts.WENT_ON_AT
        line = voice(text, at=time_text(start.at), version=start.forebay)
        for what, one, other in _changes(before.environment, start.environment):
            line += f"<br />{voice(texts.CHANGED, what=what, before=one, after=other)}"
        found += f"<li>{line}</li>"
    return f"<p>{voice(texts.WENT_ON)}</p><ul>{found}</ul>" if found else ""


def _changes(before: Environment | None, after: Environment | None) -> Iterator[tuple[str, str, str]]:
    """What is another one since the run was interrupted: its name, and both values."""
    if before is None or after is None:
        return
    for what in before.__struct_fields__:
        one, other = getattr(before, what), getattr(after, what)
        if one != other:
            yield what, str(one), str(other)


def _duration(result: GateResult) -> str:
    """`72:00:05`, in hours; nothing if the record's times cannot be read."""
    try:
        took_s = (datetime.fromisoformat(result.ended) - datetime.fromisoformat(result.began)).total_seconds()
    except (ValueError, TypeError):
        return NOTHING
    if took_s < 0:
        return NOTHING
    hours, rest_s = divmod(round(took_s), 3600)
    return f"{hours}:{rest_s // 60:02}:{rest_s % 60:02}"


def troubles(voice: Voice, record: GatesRecord) -> str:
    """What did not pass, a line each, as items."""
    found = []
    for result in record.results:
        if result.outcome is Outcome.PASS:
            continue
        name = gate_name(voice, result.gate)
        lines = [_trouble(voice, each) for each in result.checks if each.outcome is Outcome.FAIL]
        lines += _not_judged(voice, result)
        if not lines:
            lines = [said(voice, reason) for reason in result.reasons]
        if result.stopped_early:
            lines.append(f"{voice(texts.STOPPED_EARLY)} {said(voice, result.stopped_early)}")
        if not lines:
            lines.append(voice(texts.NO_CHECKS))
        inner = "".join(f"<li>{line}</li>" for line in lines)
        found.append(f"<li>{name}: {badge(voice, result.outcome)}<ul>{inner}</ul></li>")
    return f"<ul>{''.join(found)}</ul>" if found else ""


def _not_judged(voice: Voice, result: GateResult) -> list[str]:
    """One line for all checks that lack the same: a measurement that is not valid spoils many."""
    reasons: dict[str, list[Check]] = {}
    for each in result.checks:
        if each.outcome is Outcome.INVALID:
            reasons.setdefault(each.why, []).append(each)
    found = []
    for checks in reasons.values():
        if len(checks) == 1:
            found.append(_trouble(voice, checks[0]))
        else:
            many = voice(texts.NOT_JUDGED, count=len(checks))
            found.append(f"{many} {badge(voice, Outcome.INVALID)}{_why(voice, checks[0])}")
    return found


def _trouble(voice: Voice, check: Check) -> str:
    text = texts.CHECK_WITHOUT_SAMPLE if check.measured is None else texts.CHECK_FOUND
    line = voice(
        text,
        name=check_title(voice, check),
        measured=measured_text(check, check.measured),
        limit=limit_text(voice, check),
    )
    return f"{line} {badge(voice, check.outcome)}{_why(voice, check)}"


def _why(voice: Voice, check: Check) -> str:
    return f'<br /><span class="why">{said(voice, check.why)}</span>' if check.why else ""


def checks(voice: Voice, record: GatesRecord) -> str:
    """A table for each gate, with every check, and the files that it stands on."""
    return "".join(_gate(voice, result) for result in record.results)


def _gate(voice: Voice, result: GateResult) -> str:
    parts = [f"<h3>{gate_name(voice, result.gate)} {badge(voice, result.outcome)}</h3>"]
    if result.stopped_early:
        parts.append(f"<p>{voice(texts.STOPPED_EARLY)} {said(voice, result.stopped_early)}</p>")
    if result.checks:
        heads = [voice(each) for each in (texts.CHECK, texts.MEASURED, texts.LIMIT, texts.VERDICT)]
        parts.append(table(heads, (_check(voice, each) for each in result.checks), "left"))
    else:
        parts.append(f"<p>{voice(texts.NO_CHECKS)}</p>")
    if result.reasons:
        parts.append(f"<p>{voice(texts.REMARKS)}</p>{said_items(voice, result.reasons)}")
    if len(result.attempts) > 1:
        times = ", ".join(time_text(at) for at in result.attempts)
        parts.append(f"<p>{voice(texts.ATTEMPTS, count=len(result.attempts), times=times)}</p>")
    if result.files:
        named = ", ".join(f"<code>{escaped(file)}</code>" for file in result.files)
        parts.append(f'<p class="small">{voice(texts.FILES)} {named}</p>')
    return "".join(parts)


def _check(voice: Voice, check: Check) -> Row:
    """By its words and by its name; by its name alone where there are no words for it."""
    name, title = f'<code class="small">{escaped(check.name)}</code>', check_title(voice, check)
    named = name if title == check.name else f"{escaped(title)}<br />{name}"
    measured = f'<span class="whole">{escaped(measured_text(check, check.measured))}</span>'
    return Row(
        f"{named}{_why(voice, check)}", (measured, escaped(limit_text(voice, check)), badge(voice, check.outcome))
    )
