"""How well a reply answers a question: task F1, exact match, ROUGE-1 and BLEU-1, each the best over the accepted answers.

| score | convention |
|---|---|
| `task_f1`, `exact_match` | the official scripts of SQuAD and, for yes and no, of HotpotQA |
| `rouge1` | the F-measure of `rouge-score`, with stems |
| `bleu1` | NLTK's sentence BLEU of unigrams with its brevity penalty, over the tokens of F1 (**choice**) |
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

__all__ = ["SCORES", "bleu1", "exact_match", "normalise", "rouge1", "score_reply", "task_f1"]

SCORES: Final = ("f1", "em", "rouge1", "bleu1")
"""What `score_reply` gives, in the order of tables."""

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_CLOSED: Final = ("yes", "no", "noanswer")


def normalise(text: str) -> str:
    """Returns a text in lower case without ASCII punctuation and articles, words one space apart (SQuAD's `normalize_answer`)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def task_f1(reply: str, answers: Sequence[str]) -> float:
    """Returns the F1 of common words, from 0 to 1 (SQuAD; HotpotQA: yes, no and noanswer count whole or not at all).

    Args:
        reply: What the model said.
        answers: Accepted ones, at least one.

    Raises:
        ValueError: There is no accepted answer.
    """
    return _best(_f1, reply, answers)


def exact_match(reply: str, answers: Sequence[str]) -> float:
    """Returns 1 where the reply is an accepted answer after `normalise`, else 0; raises as `task_f1`."""
    return _best(lambda said, wanted: float(normalise(said) == normalise(wanted)), reply, answers)


def rouge1(reply: str, answers: Sequence[str]) -> float:
    """Returns the F-measure of ROUGE-1 with stems, from 0 to 1 (Lin 2004); raises as `task_f1`.

    Its tokens are runs of a-z and 0-9, so letters of other alphabets do not count.
    """
    return _best(lambda said, wanted: float(_rouge().score(wanted, said)["rouge1"].fmeasure), reply, answers)


def bleu1(reply: str, answers: Sequence[str]) -> float:
    """Returns the clipped precision of unigrams times the brevity penalty, from 0 to 1 (Papineni et al. 2002).

    **choice**: of one answer at a time, the best counts; BLEU's own clipping over all references would mix their words. Raises as
    `task_f1`.
    """
    return _best(_bleu1, reply, answers)


def score_reply(reply: str, answers: Sequence[str]) -> dict[str, float]:
    """Returns `f1`, `em`, `rouge1` and `bleu1` of a reply, each from 0 to 1; raises as `task_f1`."""
    scores = (task_f1, exact_match, rouge1, bleu1)
    return {name: round(score(reply, answers), 6) for name, score in zip(SCORES, scores, strict=True)}


def _best(score: Callable[[str, str], float], reply: str, answers: Sequence[str]) -> float:
    if not answers:
        raise ValueError(f"the reply {reply!r} has no accepted answer to be compared with")
    return max(score(reply, answer) for answer in answers)


def _f1(reply: str, answer: str) -> float:
    said, wanted = normalise(reply), normalise(answer)
    if said != wanted and (said in _CLOSED or wanted in _CLOSED):
        return 0.0
    words, truth = said.split(), wanted.split()
    if not words or not truth:
        return float(words == truth)
    common = sum((Counter(words) & Counter(truth)).values())
    return 2 * common / (len(words) + len(truth))  # = 2PR / (P + R)


def _bleu1(reply: str, answer: str) -> float:
    from nltk.translate.bleu_score import sentence_bleu

    words, truth = normalise(reply).split(), normalise(answer).split()
    if not words or not truth:
        return float(words == truth)
    return float(sentence_bleu([truth], words, weights=(1.0,)))


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1"], use_stemmer=True)
