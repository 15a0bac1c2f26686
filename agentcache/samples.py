"""The text that ships with the package: HotpotQA questions with their documents (CC BY-SA 4.0, data/README.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

__all__ = ["HotpotItem", "Paragraph", "load_hotpot_sample"]


class Paragraph(NamedTuple):
    """One retrieved document."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class HotpotItem:
    """One question of HotpotQA's distractor setting.

    Attributes:
        id: HotpotQA's own id.
        kind: `bridge` (the second document is found through the first) or `comparison`.
        level: HotpotQA's difficulty.
        question: One sentence.
        answer: A short span, or yes or no.
        paragraphs: The supporting documents among distractors, in the dataset's order.
        supporting_titles: Titles of the paragraphs that the answer needs.
    """

    id: str
    kind: str
    level: str
    question: str
    answer: str
    paragraphs: tuple[Paragraph, ...]
    supporting_titles: tuple[str, ...]

    @property
    def supporting(self) -> tuple[Paragraph, ...]:
        """The paragraphs that the answer needs, in their order among the others."""
        return tuple(p for p in self.paragraphs if p.title in self.supporting_titles)


def load_hotpot_sample() -> list[HotpotItem]:
    """Returns the 12 shipped questions, in the file's order."""
    text = files("agentcache").joinpath("data", "hotpot_sample.jsonl").read_text(encoding="utf-8")
    return [_item(json.loads(line)) for line in text.strip().split("\n")]


def _item(row: dict[str, Any]) -> HotpotItem:
    paragraphs = tuple(Paragraph(**paragraph) for paragraph in row.pop("paragraphs"))
    return HotpotItem(paragraphs=paragraphs, supporting_titles=tuple(row.pop("supporting_titles")), **row)
