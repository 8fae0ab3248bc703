"""Records as one HTML page for manager and engineer: English and Chinese in one file, no script, no network.

The page is written once in each language; which one is shown is two radio buttons and a rule of style. Everything that
comes from a record is escaped, and no figure is worked out here that the records do not give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from forebay.bench.bundle import Verification
from forebay.bench.environment import Environment
from forebay.bench.evidence import Validity
from forebay.bench.gates.verdicts import GatesRecord, Outcome
from forebay.bench.markup import document, escaped
from forebay.bench.report import acceptance, restores, texts
from forebay.bench.report.histories import history_pictures
from forebay.bench.report.history import History
from forebay.bench.report.pictures import pictures
from forebay.bench.report.sayings import said_items
from forebay.bench.report.style import REPORT_STYLE
from forebay.bench.report.tables import Row, facts
from forebay.bench.report.texts import Language, Text, Voice
from forebay.bench.report.values import time_text, yes_or_no
from forebay.bench.restore.results import RestoreRecord
from forebay.bench.units import NOTHING, bytes_text
from forebay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What a report tells of: a run of gates, measurements, or both (the measurements that the gates stand on)."""

    gates: GatesRecord | None = None
    restores: tuple[RestoreRecord, ...] = ()
    """The first one is what the reader came for."""
    histories: tuple[History, ...] = ()
    """Of gates that run for long."""
    proofs: tuple[Verification, ...] = ()
    """Of the bundles that the records were read from."""

    @property
    def title(self) -> str:
        return self.gates.title if self.gates is not None else self.restores[0].title

    @property
    def created(self) -> str:
        return self.gates.created if self.gates is not None else self.restores[0].created


def render_report(records: Records, first: Language = Language.ENGLISH) -> str:
    """The whole page, well-formed XML as well as HTML. `first` is the language that it opens in.

    Raises ConfigError if there is nothing to tell of.
    """
    if records.gates is None and not records.restores:
        raise ConfigError("there is no record to report on: give at least one")
    body = [
        *(_choice(language, is_chosen=language is first) for language in Language),
        *(_main(Voice(language), records) for language in Language),
    ]
    return document(records.title, REPORT_STYLE, body, language=first.value)


def _choice(language: Language, *, is_chosen: bool) -> str:
    """Before all that it shows or hides: the rule of style needs them as siblings."""
    checked = ' checked="checked"' if is_chosen else ""
    return (
        f'<input class="choice" type="radio" name="language" id="{language.value}"{checked} />'
        f'<label for="{language.value}" lang="{language.value}">{texts.LANGUAGES[language]}</label>'
    )


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    """Its anchor, without the language."""
    title: Text
    markup: str


def _main(voice: Voice, records: Records) -> str:
    tag = voice.language.value
    kind = texts.GATES_KIND if records.gates is not None else texts.RESTORE_KIND
    sections = [each for each in _sections(voice, records) if each.markup]
    created = voice(texts.CREATED, created=time_text(records.created))
    links = "".join(f'<li><a href="#{tag}-{each.name}">{voice(each.title)}</a></li>' for each in sections)
    return "\n".join(
        (
            f'<main lang="{tag}">',
            f'<p class="over">Forebay · {voice(kind)} · {created}</p>',
            f"<h1>{escaped(records.title)}</h1>",
            _banner(voice, records),
            f'<div class="headline">{_headlines(voice, records)}</div>',
            f'<nav aria-label="{voice(texts.CONTENTS)}"><ul>{links}</ul></nav>',
            *(
                f'<section><h2 id="{tag}-{each.name}">{voice(each.title)}</h2>\n{each.markup}</section>'
                for each in sections
            ),
            "</main>",
        )
    )


def _sections(voice: Voice, records: Records) -> list[_Section]:
    gates, tag = records.gates, voice.language.value
    return [
        _Section("gates", texts.GATES, "" if gates is None else acceptance.summary(voice, gates)),
        _Section("comparison", texts.COMPARISON, _of_each(records, lambda each, _: restores.comparison(voice, each))),
        _Section(
            "pictures",
            texts.PICTURES,
            _of_each(records, lambda each, number: pictures(voice, each, f"{tag}-{number}"))
            + _histories(voice, records),
        ),
        _Section("checks", texts.CHECKS, "" if gates is None else _checks(voice, gates)),
        _Section("figures", texts.ALL_FIGURES, _of_each(records, lambda each, _: restores.all_figures(voice, each))),
        _Section("evidence", texts.EVIDENCE, _of_each(records, lambda each, _: restores.evidence(voice, each))),
        _Section("environment", texts.ENVIRONMENT, _environments(voice, records)),
        _Section("plan", texts.PLAN, _plan(voice, records)),
        _Section("verify", texts.VERIFY, _steps(voice, records)),
        _Section("definitions", texts.READING, _definitions(voice)),
    ]


def _of_each(records: Records, write: Callable[[RestoreRecord, int], str]) -> str:
    """Each measurement's part, under its title if there are several. `write` gets the record and its number."""
    parts = [write(each, number) for number, each in enumerate(records.restores)]
    if len(parts) < 2:
        return "".join(parts)
    return "".join(
        f"<h3>{escaped(record.title)}</h3>{part}" for record, part in zip(records.restores, parts, strict=True)
    )


def _histories(voice: Voice, records: Records) -> str:
    tag = voice.language.value
    return "".join(
        f"<h3>{acceptance.gate_name(voice, each.gate)}</h3>{history_pictures(voice, each, f'{tag}-history-{number}')}"
        for number, each in enumerate(records.histories)
    )


# ---- the top


def _banner(voice: Voice, records: Records) -> str:
    gates = records.gates
    invalid = [each for each in records.restores if each.verdict.validity is Validity.INVALID]
    doubts = "".join(
        f"<div><p>{voice(texts.RESTORE_IS_INVALID, title=each.title)}</p>"
        f"{said_items(voice, each.verdict.reasons)}</div>"
        for each in invalid
    )
    if gates is not None:
        kind, word = gates.outcome.value, voice(texts.OUTCOMES[gates.outcome])
        said, below = _outcome_words(voice, gates), acceptance.troubles(voice, gates)
    else:
        validity = Validity.INVALID if invalid else Validity.VALID
        kind, word = validity.value, voice(texts.VALIDITIES[validity])
        said, below = voice(texts.RUN_IS_INVALID if invalid else texts.RUN_IS_VALID), ""
    return f'<div class="verdict {kind}"><p><span class="word">{word}</span>{said}</p>{below}{doubts}</div>'


def _outcome_words(voice: Voice, gates: GatesRecord) -> str:
    outcomes = Counter(each.outcome for each in gates.results)
    count = len(gates.results)
    match gates.outcome:
        case Outcome.PASS:
            return voice(texts.ALL_GATES_PASS, gates=count, checks=sum(len(each.checks) for each in gates.results))
        case Outcome.FAIL:
            return voice(texts.SOME_GATES_FAIL, failed=outcomes[Outcome.FAIL], gates=count)
        case Outcome.INVALID if count:
            return voice(texts.SOME_GATES_INVALID, invalid=outcomes[Outcome.INVALID], gates=count)
        case Outcome.INVALID:
            return voice(texts.NOTHING_MEASURED)


def _headlines(voice: Voice, records: Records) -> str:
    return _of_each(records, lambda each, _: restores.headline(voice, each))


# ---- the bottom


def _checks(voice: Voice, gates: GatesRecord) -> str:
    return f'<p class="small">{voice(texts.CHECKS_NOTE)}</p>{acceptance.checks(voice, gates)}'


def _environments(voice: Voice, records: Records) -> str:
    """Each environment once: those of one run are mostly the same."""
    titles: dict[bytes, list[str]] = {}
    found: dict[bytes, Environment] = {}
    for record in (records.gates, *records.restores):
        if record is not None:
            encoded = msgspec.msgpack.encode(record.environment)
            found[encoded] = record.environment
            titles.setdefault(encoded, []).append(record.title)
    return "".join(
        (f"<p>{voice(texts.ENVIRONMENT_OF, title=', '.join(titles[encoded]))}</p>" if len(found) > 1 else "")
        + facts(_environment(voice, environment))
        for encoded, environment in found.items()
    )


def _environment(voice: Voice, environment: Environment) -> Iterator[Row]:
    for name, fact in msgspec.to_builtins(environment).items():
        known = texts.ENVIRONMENT_FIELDS.get(name)
        yield Row(escaped(name) if known is None else voice(known), (_fact(voice, name, fact),))


def _fact(voice: Voice, name: str, fact: object) -> str:
    """Anything that a record may hold, as markup."""
    match fact:
        case bool():
            return escaped(yes_or_no(voice, fact))
        case int() | float() if name.endswith("_bytes"):
            return escaped(bytes_text(fact))
        case None:
            return voice(texts.UNKNOWN)
        case dict():
            return ", ".join(f"{escaped(key)} {_fact(voice, str(key), inner)}" for key, inner in fact.items())
        case list() | tuple():
            return "<br />".join(_fact(voice, name, inner) for inner in fact) or NOTHING
        case _:
            return escaped(fact) or NOTHING


def _plan(voice: Voice, records: Records) -> str:
    """The plan's text, each measurement's options, and the command lines."""
    parts = []
    if records.gates is not None:
        parts.append(f"<pre>{escaped(records.gates.plan_text)}</pre>")
        digest = voice(texts.PLAN_DIGEST, digest=records.gates.plan_sha256)
        parts.append(f'<p class="small"><code>{digest}</code></p>')
    for record in records.restores:
        rows = [Row(voice(texts.WORKLOAD), (escaped(record.workload),))]
        rows += [
            Row(escaped(name), (_fact(voice, name, fact),)) for name, fact in record.options.items() if fact is not None
        ]
        parts.append(f"<h3>{voice(texts.OPTIONS, title=record.title)}</h3>{facts(rows)}")
    commands = {escaped(" ".join(each.command)) for each in (records.gates, *records.restores) if each is not None}
    parts.append(f"<h3>{voice(texts.COMMAND)}</h3>")
    parts += [f"<pre>{command}</pre>" for command in sorted(commands)]
    return "".join(parts)


def _steps(voice: Voice, records: Records) -> str:
    steps = f"<ol>{''.join(f'<li>{voice(step)}</li>' for step in texts.VERIFY_STEPS)}</ol>"
    return steps + "".join(_proof(voice, proof) for proof in records.proofs)


def _proof(voice: Voice, proof: Verification) -> str:
    signers = ", ".join(proof.signed_by)
    signed = voice(texts.SIGNED, signers=signers) if signers else voice(texts.NOT_SIGNED)
    return f"<p>{voice(texts.MADE_FROM_BUNDLE, digest=proof.manifest_sha256)} {signed}</p>"


def _definitions(voice: Voice) -> str:
    return f"<dl>{''.join(f'<dt>{voice(term)}</dt><dd>{voice(means)}</dd>' for term, means in texts.DEFINITIONS)}</dl>"
