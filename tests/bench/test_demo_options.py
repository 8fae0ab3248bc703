"""What is refused before a model is loaded, in one line, and with nothing changed."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.bench.demo.options import DemoOptions, check_options
from forebay.bench.demo.prompts import Chat
from forebay.bench.demo.texts import documents
from forebay.bench.environment import available_memory_bytes, describe_environment
from forebay.errors import ConfigError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(**given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_options(DemoOptions(**given))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sessions": 0}, "--sessions must be 1 or more"),
        ({"answer_tokens": -1}, "--answer-tokens must be 1 or more"),
        ({"block_tokens": 0}, "--block-tokens must be 1 or more"),
        ({"tokens": 63}, "less than one block of 64 tokens"),
        ({"threads": 0}, "--threads must be from 1 to 4096"),
        ({"seed": -1}, "--seed must be 0 or more"),
        ({"model": Path("nowhere")}, "no model at nowhere"),
        ({"model": Path(), "random_weights": True}, "exclude each other"),
        ({"host_memory_bytes": 10**18}, "are free: ask for less"),
        ({"out": Path("no/parent")}, "--out:"),
        ({"pool": Path("no/parent")}, "--pool:"),
        ({"pool": Path(os.fsdecode(b"p\xff"))}, "--pool: 'p\\udcff' is not UTF-8"),
        ({"out": Path(os.fsdecode(b"o\xff"))}, "--out: 'o\\udcff' is not UTF-8"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, object], said: str, tmp_path: Path) -> None:
    assert said in refusal(**given)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_files_is_no_pool(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years")
    assert "'thesis.tex'; name an empty or a new directory" in refusal(pool=tmp_path / "home")
    assert (tmp_path / "home/thesis.tex").read_text() == "years"


def test_a_damaged_marker_is_named(tmp_path: Path) -> None:
    (tmp_path / "forebay-pool.json").write_text("{")
    assert "forebay-pool.json is damaged" in refusal(pool=tmp_path, out=tmp_path)


def test_a_model_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"m\xff")
    odd.mkdir()
    assert "--model: " in refusal(model=odd)


@pytest.mark.parametrize("name", ["demo.json", "demo.html"])
def test_a_directory_in_a_reports_place_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    assert f"out/{name} is a directory where a report has to go" in refusal(out=Path("out"))


class _Odd:
    """A tokenizer whose chat template or ids are out of order."""

    def __init__(self, rendered: Callable[[], str], token: int = 1) -> None:
        self.chat_template, self.eos_token_id = "x", 0
        self._rendered, self._token = rendered, token

    def apply_chat_template(self, turns: list[dict[str, str]], **_: object) -> str:
        return self._rendered()

    def encode(self, text: str, **_: object) -> list[int]:
        return [self._token] * len(text)


def _model(tokenizer: object) -> Any:
    return SimpleNamespace(
        tokenizer=tokenizer, name="odd", facts=SimpleNamespace(vocabulary=300), model=SimpleNamespace()
    )


def test_a_chat_template_that_raises_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"template of odd cannot be rendered \(ZeroDivisionError") as caught:
        Chat(_model(_Odd(lambda: str(1 // 0))))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    chat = Chat(_model(_Odd(lambda: "\0document\0", token=300)))
    with pytest.raises(ConfigError, match="gives token id 300, and the model has 300"):
        chat.prompt(next(iter(documents(1, first=0))), 64)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "not a directory" in refusal(pool=tmp_path / "file")
    assert "not a directory" in refusal(out=tmp_path / "file")


def test_a_place_that_cannot_be_written() -> None:
    assert "cannot be written" in refusal(pool=Path("/proc/self/pool"))


def test_new_and_empty_directories_are_fine(tmp_path: Path) -> None:
    check_options(DemoOptions(pool=tmp_path / "new", out=tmp_path / "out"))
    check_options(DemoOptions(pool=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_documents_differ_and_go_round() -> None:
    found = documents(9, first=0)
    assert len({each.text[:2000] for each in found}) == len({each.question for each in found}) == 9
    assert documents(2, first=1) == found[1:3]
    assert all(len(each.text) > 20_000 for each in found)
    assert [each.title for each in documents(3, first=10**6)] == [each.title for each in documents(3, first=10**6)]


def test_without_the_language_reference_sources_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    (tmp_path / "long.py").write_text("x = 1\n" * 5000)
    (tmp_path / "short.py").write_text("x = 1\n")
    assert [each.title for each in documents(1, first=0, stdlib=tmp_path)] == ["The source of long.py"]
    with pytest.raises(ConfigError, match="1 long texts, and 2 sessions"):
        documents(2, first=0, stdlib=tmp_path)


def test_the_environment_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: A CPU\nflags\t: fpu hypervisor\nmodel name\t: Another\n")
    (tmp_path / "meminfo").write_text("MemTotal:       2048 kB\nMemAvailable:   1024 kB\n")
    here = describe_environment(proc=tmp_path, sys_root=tmp_path)
    assert (here.cpu_model, here.virtual_machine, here.memory_bytes) == ("A CPU", True, 2 * 2**20)
    assert here.transparent_huge_pages == "unknown"
    assert here.packages["forebay"] != "-"
    assert available_memory_bytes(tmp_path, tmp_path / "none") == 2**20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_memory_bytes(tmp_path, tmp_path) == 2**20
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory_bytes(tmp_path, tmp_path) == 4000
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") is None
