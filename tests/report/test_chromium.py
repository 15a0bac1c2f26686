"""The page in a browser: strips, texts on hover, and both colour schemes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agentcache.report import build_report, render_page
from agentcache.report.log import entries_of
from tests.report.logs import EDIT, events


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(build_report(entries_of(events())), title="run.jsonl"), encoding="utf-8")
    return path


def chromium(page: Path, fragment: str, *arguments: str) -> str:
    """Opens a page without a window; returns what the browser prints."""
    browser = shutil.which("chromium")
    assert browser is not None, "this test needs the browser: apt-get install chromium"
    profile = page.parent / "profile"
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--hide-scrollbars",
    ]
    url = page.as_uri() + fragment
    done = subprocess.run([*command, *arguments, url], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_strips_are_drawn_with_the_numbers_of_the_log(page: Path) -> None:
    dom = chromium(page, "", "--window-size=1500,1200", "--dump-dom")
    drawn = dict(
        re.findall(r'<section[^>]* data-version="(\w+)".*?<canvas[^>]* data-drawn="([^"]*)"', dom, flags=re.DOTALL)
    )
    assert drawn == {
        "v1": "N:200",
        "v2": "P:40 X:10 R:32 F:121 N:3",
        "f1": "P:100 R:20 F:60 N:10",
        "v3": "P:208 N:42",
        "v4": "P:50 X:10 N:10 S:170",
        "a1": "N:64",
    }
    assert drawn["v2"].replace(":", "*") == EDIT["rows"]


# v2 is w0 to w39, w1000 to w1009, w49 to w199 with two tokens of v1's reply behind them, and a new turn w2000 to w2002.
@pytest.mark.parametrize(
    ("token", "label", "text", "told"),
    [
        (39, "P prefix kept", " w39", "message 1, system"),
        (44, "X new in the middle", " w1004", "message 2, tool:call_1"),
        (50, "R repaired", " w49", "moved by +1"),
        (150, "F reused after the edit", " w149", "stored as k8v8"),
        (202, "F reused after the edit", " w901", "one of 121 in a row"),
        (205, "N left to vLLM", " w2002", "token 205 of 206"),
    ],
)
def test_a_link_to_a_token_shows_its_label_and_the_text_that_diffs_lead_to(
    page: Path, token: int, label: str, text: str, told: str
) -> None:
    dom = chromium(page, f"#v1:{token}", "--window-size=1500,1200", "--dump-dom")
    tip = dom.split('id="tip"')[1].split("</div>")[0]
    assert label in tip and told in tip
    assert re.findall(r'class="m-\w here">([^<]*)<', tip) == [text]


def test_details_hold_the_text_in_its_labels(page: Path) -> None:
    dom = chromium(page, "#v1", "--window-size=1500,1200", "--dump-dom")
    row = dom.split('data-version="v2"')[1].split("</section>")[0]
    assert re.search(r'class="m-X">( w100\d){10}<', row)
    assert "41 tokens more" in row  # of F's 121, all but the ends


def brightness(page: Path, tmp_path: Path, *arguments: str) -> tuple[float, int]:
    """Returns the mean grey of a screenshot, and how many colours it has."""
    out = tmp_path / "page.png"
    chromium(page, "", "--window-size=1200,900", f"--screenshot={out}", *arguments)
    pixels = np.asarray(Image.open(out).convert("RGB"))
    assert pixels.shape == (900, 1200, 3)
    return float(pixels.mean()), len(np.unique(pixels.reshape(-1, 3), axis=0))


def test_the_page_follows_the_colour_scheme(page: Path, tmp_path: Path) -> None:
    light, colours = brightness(page, tmp_path, "--blink-settings=preferredColorScheme=1")
    dark, _ = brightness(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert colours > 50
    assert light > 200 and dark < 70
