from __future__ import annotations

from agentcache.samples import load_hotpot_sample


def test_every_item_holds_its_supporting_documents_among_distractors() -> None:
    items = load_hotpot_sample()
    assert len({item.id for item in items}) == 12
    for item in items:
        assert len(item.paragraphs) == 10
        assert {p.title for p in item.supporting} == set(item.supporting_titles)
        assert len(item.supporting) == 2


def test_a_short_answer_stands_in_a_supporting_document() -> None:
    # HotpotQA's answers are spans of the supporting text.
    for item in load_hotpot_sample():
        assert any(item.answer in f"{p.title} {p.text}" for p in item.supporting), item.question
