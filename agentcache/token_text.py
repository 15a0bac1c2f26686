"""The text of single tokens, for people who look at them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["token_texts"]

_BROKEN = "\ufffd"
_MOST_BYTES = 4  # of a character in UTF-8, hence tokens that share one


def token_texts(tokenizer: Any, ids: Iterable[int]) -> tuple[str, ...]:
    """Returns the text of each token; of those that share a character, the last one has it and the others are empty.

    Args:
        tokenizer: A transformers tokenizer.
        ids: Token ids in a row.
    """
    known: dict[int, str] = {}
    texts: list[str] = []
    pending: list[int] = []
    for token in map(int, ids):
        pending.append(token)
        text = known[token] if len(pending) == 1 and token in known else _decode(tokenizer, pending)
        if text.endswith(_BROKEN) and len(pending) < _MOST_BYTES:
            texts.append("")
            continue
        if len(pending) == 1:
            known[token] = text
        texts.append(text)
        pending = []
    if pending:
        texts[-1] = _decode(tokenizer, pending)
    return tuple(texts)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    # SentencePiece takes the space away from what begins a text.
    begins = str(tokenizer.convert_ids_to_tokens(ids[:1])[0])
    return f" {text}" if begins.startswith("▁") and not text.startswith(" ") else text
