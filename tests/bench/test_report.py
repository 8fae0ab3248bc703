"""The report: the record's figures in two languages, well-formed, self-contained, and safe whatever a record says."""

import pkgutil
import random
import re
import string
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_kit import ENVIRONMENT, PLAN, gates_record, restore_record

import forebay.bench.gates
from forebay.bench.bundle import write_bundle
from forebay.bench.environment import Environment
from forebay.bench.evidence import Validity
from forebay.bench.gates.report import encode_json
from forebay.bench.gates.stability.log import Line, Look, Report, Resumed, Sample, Strike
from forebay.bench.gates.stability.options import FaultKind
from forebay.bench.gates.verdicts import Bound, Check, GatesRecord, Outcome, check
from forebay.bench.report import texts
from forebay.bench.report.charts import MOST_POINTS, Scale, staircase, thinned
from forebay.bench.report.history import MOST_INTERVALS, History, history_of
from forebay.bench.report.page import Records, render_report
from forebay.bench.report.texts import Language, Text
from forebay.bench.restore import targets
from forebay.bench.restore.results import BandwidthSample, RestoreRecord, Role
from forebay.cli import run
from forebay.errors import ConfigError

HOSTILE = "</main><script>alert(1)</script><img src=x onerror='a' alt=\"b\">&amp;\x1b[31m\x00\u202eevil {0} {evil} %s"
SAME = {
    "TTFT p50",
    "TTFT p90",
    "TTFT p99",
    "TPOT p50",
    "CPU",
    "Python",
    "TTFT",
    "TPOT",
    "p50, p90, p99",
    "{role} ({name})",
    "{group}: {values}.",
    "{name}: {measured}, limit {limit}",
    "{at}, with forebay {version}",
    "Of “{title}”",
}
"""Texts that need no Chinese character, since they are names or punctuation."""


def both(extra: tuple[Check, ...] = ()) -> Records:
    return Records(gates=gates_record(*extra), restores=(restore_record(),))


def parsed(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page)


def mains(page: str) -> dict[Language, str]:
    """The text of the page in each language."""
    found = {main.attrib["lang"]: "".join(main.itertext()) for main in parsed(page).iter("main")}
    return {language: found[language.value] for language in Language}


def all_texts() -> Iterator[Text]:
    def within(value: object) -> Iterator[Text]:
        match value:
            case Text():
                yield value
            case dict():
                for each in value.values():
                    yield from within(each)
            case tuple():
                for each in value:
                    yield from within(each)

    for value in vars(texts).values():
        yield from within(value)


# ---- both languages


def test_every_text_is_there_in_both_languages_with_the_same_places() -> None:
    found = list(all_texts())
    assert len(found) > 120
    for text in found:
        assert text.en.strip() == text.en != ""
        assert text.zh.strip() == text.zh != ""
        assert not re.search(r"[\u3000-\u9fff\uff00-\uffef]", text.en), text
        assert text.en in SAME or re.search(r"[\u4e00-\u9fff]", text.zh), text
        places = [
            sorted(name for _, name, _, _ in string.Formatter().parse(each) if name) for each in (text.en, text.zh)
        ]
        assert set(places[0]) == set(places[1]), text


def test_every_value_that_a_record_can_have_is_translated() -> None:
    for kinds, found in (
        (Outcome, texts.OUTCOMES), (Bound, texts.BOUNDS), (Validity, texts.VALIDITIES), (Role, texts.ROLES),
        (Role, texts.ROLES_SAID), (FaultKind, texts.FAULTS),
    ):  # fmt: skip
        assert set(found) == set(kinds)
    assert set(texts.ENVIRONMENT_FIELDS) == set(Environment.__struct_fields__)
    assert set(texts.TARGETS) == {each.name for each in pkgutil.iter_modules(targets.__path__)}
    found = {each.name for each in pkgutil.iter_modules(forebay.bench.gates.__path__)}
    assert set(texts.GATE_NAMES) == {name.partition("_")[0] for name in found if re.match(r"g\d", name)}


def test_every_check_that_a_gate_makes_is_translated() -> None:
    """Names of checks are literals in the gates' modules, up to their `@`."""
    modules = Path(forebay.bench.gates.__file__).parent.rglob("*.py")
    found = {
        name for each in modules for name in re.findall(r'(?:check|_none|judged)\(\s*f?"(\w+)[@"]', each.read_text())
    }
    assert found >= {"wrong_bytes", "rss_growth", "fault_seen", "repeat_drift", "tokens_equal", "requests"}
    for verb in ("read", "write"):  # these are put together
        found |= {f"{verb}_bandwidth", f"{verb}_latency_p99", f"{verb}_latency_worst"}
    found |= {"pcie_width", "pcie_gt_per_s", "numa_node", "speed_mbit_per_s", "mtu_bytes", "pause_rx", "pause_tx"}
    assert found - set(texts.CHECK_NAMES) == set()


def test_no_language_shows_the_other_ones_sentences() -> None:
    failed = check("tokens_equal@4", 0, Bound.EQUAL, 1, "count")
    page = render_report(Records(gates=gates_record(failed), restores=(restore_record(reasons=("x",)),)))
    shown = mains(page)
    for text in all_texts():
        if "{" not in text.en and len(text.en) > 12:
            assert text.en not in shown[Language.CHINESE], text
        if "{" not in text.zh and text.zh != text.en:
            assert not re.search(rf"(?<!\w){re.escape(text.zh)}(?!\w)", shown[Language.ENGLISH]), text


@pytest.mark.parametrize("first", list(Language))
def test_it_opens_in_the_language_that_was_asked_for(first: Language) -> None:
    root = parsed(render_report(both(), first))
    assert root.attrib["lang"] == first.value
    checked = {each.attrib["id"] for each in root.iter("input") if "checked" in each.attrib}
    assert checked == {first.value}
    labels = {each.attrib["for"]: each.attrib["lang"] for each in root.iter("label")}
    assert labels == {each.value: each.value for each in Language}


# ---- safe and self-contained


def test_the_page_stands_alone_and_its_names_are_unique() -> None:
    page = render_report(both())
    root = parsed(page)
    assert not {each.tag for each in root.iter()} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "form",
        "image",
        "use",
    }
    assert not {name for each in root.iter() for name in each.attrib} & {"src", "srcset", "data", "action", "style"}
    assert all(each.attrib["href"].startswith("#") for each in root.iter("a"))
    assert not re.search(r"https?:|url\(|@import", page)
    assert "default-src 'none'" in page
    identities = [each.attrib["id"] for each in root.iter() if "id" in each.attrib]
    assert len(identities) == len(set(identities))
    assert page == render_report(both())  # it depends on nothing else


def haunted(value: Any) -> Any:
    """The same, with the hostile text at the end of every string."""
    match value:
        case Enum():
            return value
        case str():
            return value + HOSTILE
        case msgspec.Struct():
            return type(value)(**{name: haunted(getattr(value, name)) for name in value.__struct_fields__})
        case dict():
            return {haunted(name): haunted(each) for name, each in value.items()}
        case tuple() | list():
            return type(value)(haunted(each) for each in value)
        case _:
            return value


def test_hostile_text_stays_text_wherever_it_stands() -> None:
    failed = check("odd@8", 2.0, Bound.AT_MOST, 1.0, "furlongs", invalid="it is not to be believed")
    gates = haunted(gates_record(failed, stopped_early="since it is late"))
    record = restore_record(concurrencies=(2, 4), rounds=1, reasons=("a reason",))
    page = render_report(Records(gates=gates, restores=(haunted(record),)))
    root = parsed(page)
    assert not {each.tag for each in root.iter()} & {"script", "img"}
    assert not {name for each in root.iter() for name in each.attrib if name.startswith("on")}
    assert not set(page) & {"\x1b", "\x00", "\u202e"}
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)") > 100
    assert len(list(root.iter("main"))) == 2


@settings(max_examples=25)
@given(st.text(), st.floats(), st.integers(0, 2**70))
def test_anything_in_a_record_leaves_the_page_well_formed(name: str, figure: float, count: int) -> None:
    record = restore_record(concurrencies=(2,), rounds=1)
    odd = msgspec.structs.replace(record.cells[0].ttft_p50_s, value=figure, low=-figure)
    cell = msgspec.structs.replace(record.cells[0], ttft_p50_s=odd, hit_tokens=count, peak_bytes_per_s=figure)
    request = msgspec.structs.replace(record.requests[0], ttft_s=figure, error=name)
    wave = msgspec.structs.replace(record.waves[-1], bandwidth=(BandwidthSample(figure, figure),), clock_step_s=figure)
    record = msgspec.structs.replace(
        record,
        title=name,
        workload=name,
        cells=(cell, *record.cells[1:]),
        requests=(request, *record.requests[1:]),
        waves=(*record.waves[:-1], wave),
        options={name: [figure, None, {"x": name}]},
    )
    gates = gates_record(check(name, figure, Bound.AT_LEAST, figure, name))
    assert parsed(render_report(Records(gates=gates, restores=(record,)))) is not None


# ---- what it says


def test_the_figures_are_the_records() -> None:
    record = restore_record()
    shown = mains(render_report(Records(restores=(record,))))
    for cell in record.cells:
        assert cell.ttft_p99_s is not None
        for text in shown.values():
            for value in (cell.ttft_p99_s.value, cell.ttft_p99_s.low, *cell.ttft_p50_of_rounds_s):
                assert f"{value:.3f} s" in text or f"{value:.1f} s" in text
            assert f"{cell.hit_tokens:,}" in text


def test_the_headline_is_at_the_highest_concurrency_and_says_which_way() -> None:
    shown = mains(render_report(Records(restores=(restore_record(),))))
    english = shown[Language.ENGLISH].replace("\xa0", " ")
    assert "With 32 sessions at once, the candidate gives the first token 33.3 % sooner than the baseline" in english
    assert "more tokens a second" in english
    assert "Recomputing takes" in english
    slow = restore_record(roles=(Role.CANDIDATE, Role.RECOMPUTE))
    turned = tuple(
        msgspec.structs.replace(each, ttft_p50_change=msgspec.structs.replace(each.ttft_p50_change, value=0.5))
        for each in slow.comparisons
    )
    english = mains(render_report(Records(restores=(msgspec.structs.replace(slow, comparisons=turned),))))[
        Language.ENGLISH
    ].replace("\xa0", " ")
    assert "50.0 % later than recomputing" in english


def test_an_invalid_run_has_no_headline_and_says_why_at_the_top() -> None:
    record = restore_record(reasons=("the page cache was warm",))
    for records in (Records(restores=(record,)), Records(gates=gates_record(), restores=(record,))):
        page = render_report(records)
        for main in parsed(page).iter("main"):
            headline = next(each for each in main.iter("div") if each.attrib.get("class") == "headline")
            assert not re.search(r"\d", "".join(headline.itertext()))
            banner = next(each for each in main.iter("div") if each.attrib.get("class", "").startswith("verdict"))
            assert "the page cache was warm" in "".join(banner.itertext())


def test_outputs_that_differ_are_said() -> None:
    record = restore_record()
    broken = tuple(
        msgspec.structs.replace(each, tokens_equal=(each.group, each.concurrency) != ("candidate", 32))
        for each in record.comparisons
    )
    english = mains(render_report(Records(restores=(msgspec.structs.replace(record, comparisons=broken),))))[
        Language.ENGLISH
    ]
    assert "The outputs were NOT the same in both." in english
    assert "outputs differ from those with the baseline at these concurrencies: 32." in english


def test_each_check_stands_beside_its_limit() -> None:
    failed = check("throughput_change@16", 0.12, Bound.AT_LEAST, 0.29, "ratio")
    invalid = check("ttft_p50_change@16", None, Bound.AT_MOST, -0.25, "ratio")
    page = render_report(both(extra=(failed, invalid)))
    said = "change of output tokens a second against the baseline @ 16 at once: +12.0 %, limit at least +29.0 %"
    assert said in mains(page)[Language.ENGLISH]
    for main in parsed(page).iter("main"):
        rows = {
            row.findtext("th/code"): ["".join(cell.itertext()) for cell in row.iter("td")] for row in main.iter("tr")
        }
        assert rows["throughput_change@16"][0] == "+12.0 %"
        assert rows["throughput_change@16"][2] in ("FAIL", "不通过")
        assert rows["ttft_p50_change@16"][0] == "–"
        assert rows["read_bandwidth@8 MiB, 16 in flight, /mnt/pool"][0] == "13.40 GB/s"
        word = next(each for each in main.iter("span") if each.attrib.get("class") == "word")
        assert word.text in ("FAIL", "不通过")
        assert PLAN in "".join(main.itertext())
    assert "故障作用到产品的次数 @ 磁盘写满" in mains(page)[Language.CHINESE]


def test_checks_that_lack_the_same_are_one_line_at_the_top() -> None:
    lost = [
        check(f"{name}@{at}", None, Bound.AT_MOST, -0.25, "ratio", invalid="the disk was busy")
        for name in ("ttft_p50_change", "throughput_change") for at in (4, 8)
    ]  # fmt: skip
    for main in parsed(render_report(both(extra=tuple(lost)))).iter("main"):
        banner = next(each for each in main.iter("div") if each.attrib.get("class", "").startswith("verdict"))
        assert "".join(banner.itertext()).count("the disk was busy") == 1
        assert "".join(main.itertext()).count("the disk was busy") == 1 + len(lost)


def test_a_run_that_is_not_through_is_not_passed() -> None:
    gates = gates_record()
    part = msgspec.structs.replace(gates, results=gates.results[:2])
    shown = mains(render_report(Records(gates=part)))
    assert shown[Language.ENGLISH].count("not run yet") == 2
    assert "INVALID" in shown[Language.ENGLISH]
    assert "All gates passed" not in shown[Language.ENGLISH]
    assert "after a reboot" in shown[Language.ENGLISH]


def test_interruptions_are_told_with_what_changed_and_what_was_begun_again() -> None:
    gates = gates_record()
    kernels = [msgspec.structs.replace(gates.environment, kernel=f"Linux 6.{number}") for number in (1, 2)]
    starts = tuple(
        msgspec.structs.replace(start, environment=environment)
        for start, environment in zip(gates.starts, kernels, strict=True)
    )
    again = msgspec.structs.replace(
        gates.results[2], attempts=("2026-01-01T05:00:00+00:00", "2026-01-02T03:00:00+00:00")
    )
    results = (*gates.results[:2], again, *gates.results[3:])
    shown = mains(render_report(Records(gates=msgspec.structs.replace(gates, starts=starts, results=results))))
    assert "since then kernel is Linux 6.2, and no longer Linux 6.1" in shown[Language.ENGLISH]
    assert shown[Language.ENGLISH].count("It was begun 2 times") == 1
    assert "共开始 2 次" in shown[Language.CHINESE]


def test_a_run_without_any_sample_is_a_page_too() -> None:
    record = restore_record(reasons=("there is no sample",))
    empty = msgspec.structs.replace(record, cells=(), comparisons=(), waves=(), requests=(), groups=())
    nothing = msgspec.structs.replace(gates_record(), results=(), planned=())
    shown = mains(render_report(Records(gates=nothing, restores=(empty,))))
    assert shown[Language.ENGLISH].count("Nothing was measured.") >= 3
    with pytest.raises(ConfigError, match="no record"):
        render_report(Records())


def test_a_new_field_of_the_environment_is_shown_by_its_own_name() -> None:
    class Larger(Environment, frozen=True, kw_only=True):
        racks: tuple[dict[str, object], ...]

    known = {name: getattr(ENVIRONMENT, name) for name in ENVIRONMENT.__struct_fields__}
    larger = Larger(**known, racks=({"name": "R7", "memory_bytes": 141 * 10**9},))
    page = render_report(Records(gates=msgspec.structs.replace(gates_record(), environment=larger)))
    for shown in mains(page).values():
        assert "racks" in shown
        assert "R7, memory_bytes 141.00 GB" in shown


# ---- pictures


@given(st.lists(st.floats(0, 1e15), min_size=1))
def test_a_scale_has_room_for_every_value(values: list[float]) -> None:
    scale = Scale.of(values)
    assert all(0 <= scale.place(value) <= 1 + 1e-9 for value in values)
    places = [scale.place(tick) for tick in scale.ticks]
    assert places == sorted(set(places))
    assert all(-1e-3 <= place <= 1 + 1e-3 for place in places)
    assert len(places) >= 2


def test_far_apart_values_get_a_logarithmic_scale_and_it_is_said() -> None:
    assert not Scale.of([1.0, 7.0]).is_logarithmic
    assert Scale.of([1.0, 9.0]).ticks == [1.0, 2.0, 5.0, 10.0]
    near = restore_record(roles=(Role.BASELINE, Role.CANDIDATE), concurrencies=(8, 16))
    english = {roles: mains(render_report(Records(restores=(record,))))[Language.ENGLISH] for roles, record in
               (("all", restore_record()), ("near", near))}  # fmt: skip
    assert "logarithmic" in english["all"]
    captions = re.findall(r"Time to the first token \(p50\) by concurrency (.*?)\n", english["near"])
    assert captions
    assert not any("logarithmic" in each for each in captions)


@given(st.integers(MOST_POINTS + 1, 5 * MOST_POINTS), st.integers())
def test_a_line_that_is_drawn_in_part_keeps_its_peak_and_its_end(length: int, seed: int) -> None:
    chance = random.Random(seed)
    heights = [chance.random() for _ in range(length)]
    points = [(float(number), height) for number, height in enumerate(heights)]
    drawn = thinned(points)
    assert len(drawn) == MOST_POINTS
    assert max(drawn, key=lambda point: point[1])[1] == max(heights)
    rising = thinned([(float(number), float(number)) for number in range(len(heights))])
    assert rising[-1] == (len(heights) - 1.0, len(heights) - 1.0)


def test_requests_without_a_first_token_hold_the_line_down() -> None:
    assert staircase([(0.1, 0.5), (0.4, 1.0)]) == ((0.1, 0.0), (0.1, 0.5), (0.4, 0.5), (0.4, 1.0))
    record = restore_record(roles=(Role.CANDIDATE,), concurrencies=(4,), rounds=1)
    failed = msgspec.structs.replace(record.requests[0], ttft_s=None, error="refused")
    record = msgspec.structs.replace(record, requests=(failed, *record.requests[1:]))
    english = mains(render_report(Records(restores=(record,))))[Language.ENGLISH]
    assert "4 requests. 1 of them without a first token." in english


def test_a_shared_pool_tells_of_the_sessions_of_others() -> None:
    english = mains(render_report(Records(restores=(restore_record(),))))[Language.ENGLISH]
    assert english.count("of them read another instance's session") == 8  # once in a picture, once below it


# ---- the stability gate over time


def sample(elapsed_s: float, *loads_s: float, rss_bytes: int = 10**9) -> Sample:
    report = Report(
        age_s=1.0, covers_s=1.0, loads=len(loads_s), disk_loads=len(loads_s), loaded_blocks=0, disk_blocks=0,
        offered_blocks=0, wrong_blocks=0, wrong_bytes=0, unsound=(), rss_bytes=rss_bytes, descriptors=9, threads=3,
        shm_segments=(), errors={}, disk_load_s=loads_s,
    )  # fmt: skip
    return Sample(elapsed_s=elapsed_s, worker=0, incarnation=0, report=report)


def history(*lines: Line, end: bytes = b"") -> History:
    return history_of("g4", [*(msgspec.json.encode(line) + b"\n" for line in lines), end])


def test_three_days_become_a_few_hundred_intervals_that_lose_no_peak() -> None:
    chance = random.Random(1)
    samples = [sample(10.0 * number, chance.random(), chance.random() / 2) for number in range(26_000)]
    samples[777] = sample(7770.0, *[99.0] * 10, rss_bytes=7 * 10**9)
    strike = Strike(elapsed_s=7770.0, number=0, kind=FaultKind.SLOW, target=0)
    found = history(*samples[:5000], strike, Look(elapsed_s=50_001.0, pool_bytes=5), *samples[5000:], end=b'{"type')
    assert MOST_INTERVALS / 2 < len(found.intervals) <= MOST_INTERVALS
    assert max(each.rss_bytes or 0 for each in found.intervals) == 7 * 10**9
    assert [each.pool_bytes for each in found.intervals if each.pool_bytes is not None] == [5]
    worst = max(found.intervals, key=lambda each: each.p99_s or 0.0)
    assert worst.ends_s - 1024 <= 7770.0 <= worst.ends_s
    assert found.strikes == {FaultKind.SLOW: 1}
    shown = mains(render_report(Records(gates=gates_record(), histories=(found,))))
    assert "Upright lines are faults: slow device 1." in shown[Language.ENGLISH]
    assert "竖线是故障：设备变慢 1。" in shown[Language.CHINESE]
    assert "hours of load" in shown[Language.ENGLISH]


@pytest.mark.parametrize(
    "text", [b"{}\n", b"\xff\n", b'{"type":"look","elapsed_s":-1,"pool_bytes":0}\n', b"[" * 9999 + b"\n"]
)
def test_a_log_that_cannot_be_read_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        history_of("g4", [text])


def test_a_log_without_a_load_has_no_picture() -> None:
    found = history(Resumed(elapsed_s=0.0, at="now"))
    assert "Memory of the largest worker" not in render_report(Records(gates=gates_record(), histories=(found,)))


# ---- the command


def write(path: Path, record: GatesRecord | RestoreRecord) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_json(record) if isinstance(record, GatesRecord) else msgspec.json.encode(record))
    return path


def test_records_and_bundles_become_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gates = write(tmp_path / "gates.json", gates_record())
    restore = write(tmp_path / "g3/restore.json", restore_record())
    out = tmp_path / "report.html"
    assert run(["report", str(gates), str(restore), "--out", str(out)]) == 0
    plain = out.read_text()
    assert plain == render_report(Records(gates=gates_record(), restores=(restore_record(),)))
    bundle = tmp_path / "gates.zip"
    log = tmp_path / "log.jsonl"
    log.write_bytes(msgspec.json.encode(sample(1.0, 0.5)) + b"\n")
    files = {"gates.json": gates, "g3/restore.json": restore, "g4/log.jsonl": log}
    manifest = write_bundle(bundle, files, title="t", created="2026-01-01T00:00:00+00:00")
    assert len(manifest.files) == 3
    assert run(["report", str(bundle), "--out", str(out), "--language", "zh"]) == 0
    shown = mains(out.read_text())
    assert "p99 (solid): from 0.500 s to 0.500 s." in shown[Language.ENGLISH]
    assert "G3: Cold restore, 60,000 tokens" in shown[Language.ENGLISH]
    assert "本页由核实无误的证据包生成" in shown[Language.CHINESE]
    assert "It was not signed." in shown[Language.ENGLISH]
    content = bytearray(bundle.read_bytes())
    content[len(content) // 2] ^= 1
    bundle.write_bytes(content)
    out.unlink()
    assert run(["report", str(bundle), "--out", str(out)]) == 1
    assert "does not verify" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"plan_text": 1}', b'{"cells": []}', b"\xff", b"P"])
def test_what_is_no_record_is_one_clear_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert run(["report", str(tmp_path / "x.json"), "--out", str(tmp_path / "out.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "x.json is no record" in said
    assert not (tmp_path / "out.html").exists()


def test_two_runs_of_gates_or_no_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gates = write(tmp_path / "gates.json", gates_record())
    assert run(["report", str(gates), str(gates), "--out", str(tmp_path / "x.html")]) == 2
    assert "one run of gates" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "absent.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
