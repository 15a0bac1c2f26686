"""The text of tokens: together they are the text, and a character that several tokens share is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentcache.token_text import token_texts


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.mark.parametrize("text", ["a plain line.\n  indented", "naïve Grüße", "日本語 🦙🦙 ok", ""])
def test_the_texts_of_tokens_are_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == text


def test_special_tokens_are_shown(tokenizer: Any) -> None:
    assert token_texts(tokenizer, tokenizer.encode("<|im_start|>user")) == ("<|im_start|>", "user")


def test_a_character_that_is_cut_off_is_marked(tokenizer: Any) -> None:
    ids = tokenizer.encode("🦙")
    assert len(ids) > 1
    assert token_texts(tokenizer, ids[:1]) == ("\ufffd",)


def test_a_sentencepiece_token_keeps_its_space() -> None:
    class Pieces:
        words = ("▁the", "▁l", "lama")

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.words[i] for i in ids]

    assert token_texts(Pieces(), [0, 1, 2]) == (" the", " l", "lama")
