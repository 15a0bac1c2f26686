"""Documents inside a message: the units that retrieval adds, drops and reorders."""

from __future__ import annotations

import re

__all__ = ["MIN_DOCUMENT_TOKENS", "document_ranges"]

MIN_DOCUMENT_TOKENS = 32
"""A paragraph counts as a document from this length on; a headed unit always does."""

_HEADING = re.compile(
    r"^[ \t]*(?:[#>*-]+[ \t]*)?\[?(?:document|doc|passage|chunk|source|paragraph|memory|result|session)[ \t]*#?\d+\b",
    re.IGNORECASE | re.MULTILINE,
)
_BLANK = re.compile(r"\n[ \t]*\n\s*")


def document_ranges(content: str) -> list[tuple[int, int, bool]]:
    """Returns the documents of a message as (start, stop, headed) in characters, ascending and disjoint.

    The rule: where two or more lines begin like `Document 3:`, `[Passage 2]` or `Chunk 1:`, each such unit reaches to
    the next one, the last to the first blank line after it. Everywhere else documents are the paragraphs between blank
    lines, when there are two or more; the caller drops those below `MIN_DOCUMENT_TOKENS`.
    """
    if "\n" not in content:
        return []
    heads = [m.start() for m in _HEADING.finditer(content)]
    if len(heads) < 2:
        return _paragraphs(content, 0, len(content)) if _BLANK.search(content.strip()) else []
    blank = _BLANK.search(content, heads[-1])
    stop = blank.start() if blank else len(content)
    units = [(a, b, True) for a, b in zip(heads, [*heads[1:], stop], strict=True)]
    return [*_paragraphs(content, 0, heads[0]), *units, *_paragraphs(content, stop, len(content))]


def _paragraphs(content: str, start: int, stop: int) -> list[tuple[int, int, bool]]:
    cuts = [m.span() for m in _BLANK.finditer(content, start, stop)]
    edges = [start, *(edge for cut in cuts for edge in cut), stop]
    return [(a, b, False) for a, b in zip(edges[::2], edges[1::2], strict=True) if content[a:b].strip()]
