"""What a record says in English is said in Chinese on the Chinese page: whatever its sources can say."""

from __future__ import annotations

import ast
import inspect
import re
import string
from collections.abc import Iterator
from types import ModuleType

import msgspec
import pytest
import report_kit
import restore_kit

from forebay.bench import evidence
from forebay.bench.report.page import Records, render_report
from forebay.bench.report.sayings import SAYINGS, in_chinese
from forebay.bench.restore import audit
from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.pools import throttled_fact
from forebay.bench.restore.results import Role

WITHIN = {
    "complaint": "nothing was read from cold disk",
    "reasons[0]": "nothing was read from cold disk",
    "self.medium.doubt": "the block device ram0 is memory",
    "group.facts['throttled']": throttled_fact(GroupOptions(name="g", role=Role.BASELINE, limit="8MB/s"))["throttled"],
    "name": "prompt tokens",
    "who": "this process",
}
"""For expressions in braces that are no plain values."""


def sentences(module: ModuleType) -> Iterator[str]:
    """Every text of several words in a module's code that is no documentation, with `X` for values."""
    tree = ast.parse(inspect.getsource(module))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in documentation | parts:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(_filled(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(text.split()) >= 4:
            yield text


def _filled(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return WITHIN.get(ast.unparse(part.value), "X")
    assert isinstance(part, ast.Constant)
    return str(part.value)


@pytest.mark.parametrize("module", [audit, evidence])
def test_every_sentence_has_its_chinese(module: ModuleType) -> None:
    found = list(sentences(module))
    assert len(found) > 8
    assert [text for text in found if in_chinese(text) is None] == []


def test_each_saying_is_reached_by_its_own_words_with_its_values() -> None:
    for saying in SAYINGS:
        places = {name for _, name, _, _ in string.Formatter().parse(saying.en) if name}
        assert places == {name for _, name, _, _ in string.Formatter().parse(saying.zh) if name}
        values = {name: "there is no sample" if name == "said" else f"<{name}>" for name in places}
        chinese = {name: "没有样本" if name == "said" else value for name, value in values.items()}
        assert in_chinese(saying.en.format(**values)) == saying.zh.format(**chinese)
        assert re.search(r"[一-鿿]", saying.zh) or saying.en == "{group}: {said}"


def test_values_stay_as_they_are_and_strangers_stay_english() -> None:
    assert in_chinese("{pool}: 1 of 12 requests failed, the first with: HTTP 500: {busy}") == (
        "{pool}：12 个请求中有 1 个失败，首个错误：HTTP 500: {busy}"
    )
    assert in_chinese("something else: went wrong") is None
    spoilt = [restore_kit.request(hit_source="host"), *restore_kit.requests()]
    for reason in audit.broken_claims(restore_kit.groups(), spoilt, [], (4, 8), audit.Limits()):
        assert in_chinese(reason) is not None, reason


def test_the_chinese_page_says_why_a_run_is_invalid_in_chinese() -> None:
    reasons = ("local ssd: 3 waves took no time", "a reason of tomorrow")
    page = render_report(Records(restores=(report_kit.restore_record(reasons=reasons),)))
    english, chinese = page.split('<main lang="zh-Hans">')
    assert "local ssd: 3 waves took no time" in english
    assert "local ssd：有 3 波没有用时" in chinese
    assert '<span lang="en">a reason of tomorrow</span>' in chinese
    assert "took no time" not in chinese


def test_every_root_of_a_group_is_shown_with_its_device() -> None:
    record = report_kit.restore_record()
    [first] = record.groups[1].media
    media = (first, msgspec.structs.replace(first, path="/mnt/other", doubt="the block device ram0 is memory"))
    groups = tuple(msgspec.structs.replace(each, media=media) if each.media else each for each in record.groups)
    page = render_report(Records(restores=(msgspec.structs.replace(record, groups=groups),)))
    assert "/mnt/baseline: ext4 on /dev/md0" in page
    assert "/mnt/other: ext4 on /dev/md0" in page
    assert "块设备 ram0 是内存" in page
