"""The plans in the documentation are plans: every option in them exists, and their limits make sense."""

import re
from pathlib import Path

import pytest

from forebay.bench.gates.plan import read_plan
from forebay.bench.restore.options import check_options, parse_options

DOCS = Path(__file__).parents[2] / "docs"


def plans(page: str) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def written(text: str, tmp_path: Path) -> Path:
    """With directories that are there in place of those of another machine."""
    for number, root in enumerate(sorted(set(re.findall(r'"(/mnt/[^"]*)"', text)))):
        (tmp_path / f"root-{number}").mkdir()
        text = text.replace(f'"{root}"', f'"{tmp_path}/root-{number}"')
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", plans("benchmark.md"))
def test_a_restore_benchmark_is_one(text: str, tmp_path: Path) -> None:
    options = parse_options(tmp_path / "plan.toml", written(text, tmp_path).read_bytes())
    check_options(options)
    assert options.group


@pytest.mark.parametrize("text", plans("gates.md"))
def test_a_plan_of_gates_is_one(text: str, tmp_path: Path) -> None:
    plan = read_plan(written(text, tmp_path))
    assert plan.gates
    assert plan.text == (tmp_path / "plan.toml").read_text()
