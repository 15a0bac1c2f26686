"""The page as text: nothing from outside, nothing that a log's text could break, and all numbers without a script."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from agentcache.event_log import JsonlEventLog
from agentcache.report import build_report, render_page
from agentcache.report.cli import report as command
from agentcache.report.log import entries_of
from tests.report.logs import events, revised

EVIL = '</script><script>alert("x")</script><b>&amp;'


def page_of(*, text: bool = True, title: str = "run.jsonl") -> str:
    return render_page(build_report(entries_of(events(text=text))), title=title)


class Elements(HTMLParser):
    """Collects the elements of a page, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts[-1] += data


def test_the_page_asks_for_nothing_from_outside() -> None:
    page = Elements(page_of())
    assert not [tag for tag, _ in page.found if tag in ("link", "img", "iframe", "object", "embed")]
    for tag, attributes in page.found:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"@import|url\(|https?://", page_of())
    policy = next(a["content"] for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy


def test_text_of_the_log_is_text_on_the_page() -> None:
    evil = revised(EVIL, None, 12, episode=EVIL, labels=(EVIL,))
    page = Elements(render_page(build_report(entries_of([evil])), title=EVIL))
    assert len(page.scripts) == 2
    (data,) = json.loads(page.scripts[0])
    assert data["v"] == EVIL


def test_the_numbers_need_no_script() -> None:
    page = page_of()
    row = page.split('data-version="v2"')[1].split("</section>")[0]
    numbers = dict(re.findall(r'data-label="(\w)"[^>]*>([\d,]+)<', row))
    assert numbers == {"P": "40", "X": "10", "R": "32", "F": "121", "N": "3", "S": "0"}
    assert 'id="total-saved">181<' in page and 'id="total-versions">6<' in page
    assert "k8v8 <b>64</b>" in row and "exact <b>97</b>" in row
    assert dict(re.findall(r'data-stage="(\w+)" title="\w+ ([^"]+)"', row))["recompute"] == "20 ms"


def test_a_page_with_text_says_so_and_one_without_says_how_to_get_it() -> None:
    assert "holds the text of prompts and replies" in page_of()
    without = page_of(text=False)
    assert "holds the text" not in without and "events_text=True" in without and " w41" not in without


def test_a_log_of_nothing_is_a_page() -> None:
    assert "no version in this log" in render_page(build_report([]), title="empty")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    with JsonlEventLog(path) as out:
        for event in events():
            out(event)
    return path


def run(*arguments: str | Path) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_writes_the_page(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    code, output = run(log, "-o", out)
    assert code == 0, output
    assert "6 versions, 181 tokens reused behind an edit" in output
    assert out.read_text(encoding="utf-8") == page_of()


def test_the_command_takes_the_log_of_a_process_that_is_still_running(log: Path, tmp_path: Path) -> None:
    log.write_bytes(log.read_bytes() + b'{"schema":1,"event":"prompt_rev')
    out = tmp_path / "page.html"
    code, output = run(log, "-o", out)
    assert code == 0, output
    assert out.read_text(encoding="utf-8") == page_of()


def test_the_command_takes_ids_that_are_no_text(tmp_path: Path) -> None:
    with JsonlEventLog(tmp_path / "run.jsonl") as log:
        log(revised("v1", None, 9, episode="thread-\ud83d", labels=("tool:call_\ud83d",)))
    out = tmp_path / "page.html"
    code, output = run(tmp_path / "run.jsonl", "-o", out)
    assert code == 0, output
    assert "thread-?" in out.read_text(encoding="utf-8")


def test_the_command_refuses_a_folder_that_is_not_there(log: Path, tmp_path: Path) -> None:
    code, output = run(log, "-o", tmp_path / "none" / "page.html")
    assert code == 2 and "there is no folder" in output


def test_the_command_refuses_a_log_that_is_not_there(tmp_path: Path) -> None:
    code, output = run(tmp_path / "none.jsonl")
    assert code == 2 and "does not exist" in output
