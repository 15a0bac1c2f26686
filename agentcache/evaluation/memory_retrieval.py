"""Which memories a question is asked with: those nearest to it in words, the same every time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from agentcache.errors import ConfigError
from agentcache.evaluation.memory_data import MemoryQuestion, Unit

__all__ = ["recall", "retrieve"]

_MISSING: Final = "memories are retrieved with scikit-learn and NLTK: pip install 'agentcache-kv[eval]'"


def retrieve(question: str, units: Sequence[Unit], count: int) -> list[int]:
    """Returns the numbers of the `count` units nearest to a question, nearest first; all units where there are fewer.

    Cosine of TF-IDF over stems and pairs of stems of this memory (**choice**: no model, so that retrieval is the same for every
    model that is measured); of equally near ones the earlier comes first.

    Raises:
        ConfigError: scikit-learn or NLTK is not installed.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    vectorizer = TfidfVectorizer(
        ngram_range=(1, 2), sublinear_tf=True, stop_words="english", token_pattern=r"(?u)\b\w+\b"
    )
    stored = vectorizer.fit_transform([_stems(unit.text) for unit in units])
    near = np.asarray((stored @ vectorizer.transform([_stems(question)]).T).todense()).ravel()
    return [int(at) for at in np.argsort(-near, kind="stable")[:count]]


@cache
def _stems(text: str) -> str:
    stem = _stemmer().stem
    return " ".join(stem(word) for word in re.findall(r"\w+", text.lower()))


@cache
def _stemmer() -> Any:
    try:
        from nltk.stem.snowball import SnowballStemmer
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    return SnowballStemmer("english")


def recall(question: MemoryQuestion, units: Sequence[Unit]) -> float | None:
    """Returns the share of a question's evidence that lies in the units, or None where no evidence is known."""
    if not question.evidence:
        return None
    held = frozenset[str]().union(*(unit.holds for unit in units))
    return len(question.evidence & held) / len(question.evidence)
