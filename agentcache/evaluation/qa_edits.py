"""Questions over documents that were edited, seeded: an agent's chat before and after its controller changed what it has read.

One message holds the documents, as a search returned them; the question comes as a new turn, after the edit. The new chat is the
true one, with every document that the answer needs; the old one is what the checkpoint holds. In the LongBench manner the documents
are the question's own and others that do not help, up to a length.

```
replace     a document of another task stood in this one's place                    (tool-result replacement)
update      an older form of the document: another answer in it, or fewer sentences (a page that changed)
refresh     two documents that follow each other were others                        (retrieval refresh)
insert      the document was not there                                              (insertion)
delete      a document stood before it that is gone                                 (deletion)
reorder     two documents stood the other way round                                 (reranking)
summarise   two documents are now their first sentences and what tells the answer   (summarisation)
clear       a document that does not help is now a line that says it was cleared    (cleared tool result)
```

Where the *carrier* lies, the document that holds the answer, decides what stale rows can do:

```
behind      the carrier's rows are reused, and the edited document does not help
bridge      the carrier's rows are reused, and the edited document is another one that the answer needs
inside      the carrier is the edited document
before      the carrier stands before the edit, as all that the answer needs: its rows are exact
```

No text is invented but the frames.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from agentcache.errors import ConfigError
from agentcache.evaluation.qa_data import Passage, Question, answer_places, holds_answer
from agentcache.profiling.edits import Message

__all__ = ["CARRIERS", "QA_EDITS", "Carrier", "QAEdit", "QAItem", "make_items"]

QAEdit = Literal["replace", "update", "refresh", "insert", "delete", "reorder", "summarise", "clear"]
QA_EDITS: Final[tuple[QAEdit, ...]] = get_args(QAEdit)

Carrier = Literal["behind", "bridge", "inside", "before"]
CARRIERS: Final[tuple[Carrier, ...]] = get_args(Carrier)

_TURNS: Final[tuple[Carrier, ...]] = ("behind", "bridge", "inside", "behind", "before")
"""Three items of five have the answer behind the edit, where a policy can spoil it."""

_TAKES_AWAY: Final = ("delete", "clear")  # what they change is no longer there, so it is nothing that the answer needs
_CHARACTERS_A_TOKEN: Final = 4
_GOLD_SHARE: Final = 0.75  # of the length, at most: the rest is for what does not help
_LEAST_OTHERS: Final = 3
_SHORTEST_OTHER: Final = 240  # characters that a document which does not help may have in any case
_SPARE: Final = 2  # documents of other tasks that an edit may take
_NEAR: Final = 12  # other questions whose documents and answers may come in
_SYSTEM: Final = """You answer questions from documents. Give only the answer, in a few words, and nothing else.

Question: Where was the author of Emma born?
Answer: Steventon

Question: Which river is longer, the Rhine or the Elbe?
Answer: the Rhine

Question: Are both films comedies?
Answer: no"""
"""Three examples: small models answer in sentences without them."""
_TASK: Final = "Read these documents. I will ask you about them."
_READY: Final = "I have read the documents."
_QUESTION: Final = (
    "Answer with a few words from the documents. Give only the answer, no sentence.\nQuestion: {}\nAnswer:"
)
_CLEARED: Final = "[Old tool result content cleared]"
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")


@dataclass(frozen=True, slots=True)
class QAItem:
    """One question with an edit before it.

    Attributes:
        id: Unique, and the same for the same seed.
        dataset: Its data set.
        task: The question's id.
        kind: What the controller did.
        carrier: Where the document that holds the answer lies.
        answers: Accepted answers.
        old: Chat messages before the edit, without the question.
        new: Chat messages after it, the question last.
    """

    id: str
    dataset: str
    task: str
    kind: QAEdit
    carrier: Carrier
    answers: tuple[str, ...]
    old: tuple[Message, ...]
    new: tuple[Message, ...]


def make_items(
    questions: Sequence[Question],
    count: int,
    *,
    seed: int,
    context: int,
    kinds: Sequence[QAEdit] = QA_EDITS,
) -> list[QAItem]:
    """Returns `count` items, each of another question; data sets, kinds and places take turns.

    Args:
        questions: Of any data sets.
        count: Items.
        seed: Of all choices.
        context: Length of the documents in tokens, about: 4 characters are reckoned for one. A question whose needed documents
            take more than three quarters of it is left out.
        kinds: That are made.

    Raises:
        ConfigError: A kind is unknown, or there are fewer questions.
    """
    unknown = [kind for kind in kinds if kind not in QA_EDITS]
    if unknown or not kinds:
        raise ConfigError(f"edit kinds {list(kinds)} are not allowed; take some of {', '.join(QA_EDITS)}")
    characters = context * _CHARACTERS_A_TOKEN
    fitting = [q for q in questions if sum(len(p.text) for p in q.gold) <= _GOLD_SHARE * characters]
    chosen = _in_turns(fitting, count, seed)
    if len(chosen) < count:
        raise ConfigError(
            f"{len(chosen)} questions can be asked, {count} are wanted ({len(questions) - len(fitting)} have longer documents "
            f"than --context {context} allows); give more --data, or take fewer --items"
        )
    names = sorted({question.dataset for question in chosen})
    made = dict.fromkeys(names, 0)
    items = []
    for question in chosen:
        turn, at = divmod(made[question.dataset], len(kinds))
        made[question.dataset] += 1
        places = [place for place in _TURNS if _possible(place, kinds[at], question)]
        # Kinds, data sets and seeds begin at different places, so that few items of each have every place too.
        carrier = places[(turn + at + names.index(question.dataset) + seed) % len(places)]
        rng = random.Random(f"{seed}/qa/{question.id}")
        items.append(_item(question, fitting, kinds[at], carrier, characters, rng))
    return items


def _possible(carrier: Carrier, kind: QAEdit, question: Question) -> bool:
    if carrier == "bridge" and len(question.gold) < 2:
        return False
    return carrier in ("behind", "before") or kind not in _TAKES_AWAY


def _in_turns(questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """Returns questions in a random order in which data sets take turns while they last."""
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        by_dataset.setdefault(question.dataset, []).append(question)
    for name, own in by_dataset.items():
        random.Random(f"{seed}/order/{name}").shuffle(own)
    turns = [(at, name, q) for name, own in by_dataset.items() for at, q in enumerate(own)]
    return [question for _, _, question in sorted(turns, key=lambda turn: turn[:2])][:count]


def _item(
    question: Question,
    pool: Sequence[Question],
    kind: QAEdit,
    carrier: Carrier,
    characters: int,
    rng: random.Random,
) -> QAItem:
    others = [q for q in pool if q.id != question.id]
    near = [q for q in others if q.dataset == question.dataset] or others
    near = rng.sample(near, min(len(near), _NEAR))
    foreign = _foreign(question, near, rng)
    documents, at = _ordered(question, foreign, carrier, characters, rng)
    wrong = [q.answers[0] for q in near if not holds_answer(q.answers[0], question.answers)]
    old, new = _MAKERS[kind](documents, at, _Edit(question, foreign, wrong, characters // 3))
    ask = ({"role": "assistant", "content": _READY}, {"role": "user", "content": _QUESTION.format(question.text)})
    return QAItem(
        id=f"{question.id}/{kind}/{carrier}",
        dataset=question.dataset,
        task=question.id,
        kind=kind,
        carrier=carrier,
        answers=question.answers,
        old=_chat(old),
        new=(*_chat(new), *ask),
    )


def _foreign(question: Question, others: Sequence[Question], rng: random.Random) -> list[Passage]:
    """Returns the documents of other tasks that hold no accepted answer and are none of this one's, in a random order."""
    own = {p.text for p in question.passages}
    found = [p for q in others for p in q.passages]
    rng.shuffle(found)
    return [p for p in found if p.text not in own and not holds_answer(p.text, question.answers)]


def _ordered(
    question: Question, foreign: list[Passage], carrier: Carrier, characters: int, rng: random.Random
) -> tuple[list[Passage], int]:
    """Returns the documents in the order that puts the carrier in its place, and the number of the edited one.

    Takes what fills up from `foreign` where the question's own documents do not suffice. A long document that does not help is cut
    to its first sentences, so that at least three have room.
    """
    gold = list(question.gold)
    own = [p for p in question.passages if not p.gold]
    rng.shuffle(own)
    room = characters - sum(len(p.text) for p in gold)
    longest = max(room // _LEAST_OTHERS, _SHORTEST_OTHER)
    others: list[Passage] = []
    while len(others) < _LEAST_OTHERS or (room > 0 and (own or len(foreign) > _SPARE)):
        source = own or foreign
        if not source:
            raise ConfigError(
                f"the data are too few: question {question.id!r} has {len(others)} documents beside those that it needs, and "
                f"other questions give no more; at least {_LEAST_OTHERS} are needed"
            )
        others.append(_cut(source.pop(), longest))
        room -= len(others[-1].text)
    if carrier == "before":
        rng.shuffle(gold)
        return [*gold, *others], len(gold)
    at = rng.randrange(min(2, len(others) - 1))
    head, edited = others[:at], others[at]
    rest = others[at + 1 :]
    if carrier in ("inside", "bridge"):
        edited = question.carrier if carrier == "inside" else next(p for p in gold if p is not question.carrier)
        rest = others[at:]
        gold = [p for p in gold if p is not edited]
    # The document beside the edited one may be a part of the edit; a needed one that is to be reused is not.
    beside, rest = rest[:1], [*rest[1:], *gold]
    rng.shuffle(rest)
    return [*head, edited, *beside, *rest], at


def _cut(passage: Passage, longest: int) -> Passage:
    """Returns a document without its last sentences where it has more characters than are allowed; one sentence stays."""
    kept, *rest = _sentences(passage.text)
    for sentence in rest:
        if len(kept) + 1 + len(sentence) > longest:
            break
        kept = f"{kept} {sentence}"
    return replace(passage, text=kept)


@dataclass(frozen=True, slots=True)
class _Edit:
    """What a maker may take: documents of other tasks, cut to so many characters, and their answers."""

    question: Question
    foreign: list[Passage]
    wrong: list[str]
    longest: int

    def other(self) -> Passage:
        """Returns a document of another task, each once."""
        if not self.foreign:
            raise ConfigError(
                f"the data are too few: no document of another question is left to stand beside {self.question.id!r}"
            )
        return _cut(self.foreign.pop(), self.longest)


_Pair = tuple[list[str], list[str]]
"""Documents as texts, before and after."""


def _replace(documents: list[Passage], at: int, edit: _Edit) -> _Pair:
    return _texts([*documents[:at], edit.other(), *documents[at + 1 :]]), _texts(documents)


def _update(documents: list[Passage], at: int, edit: _Edit) -> _Pair:
    older = replace(documents[at], text=_older(documents[at].text, edit))
    return _texts([*documents[:at], older, *documents[at + 1 :]]), _texts(documents)


def _older(text: str, edit: _Edit) -> str:
    """Returns a text with another task's answer where it has an accepted one, else without the second half of its sentences.

    A text of one sentence that tells no answer was another document.
    """
    for answer in edit.question.answers:
        places = answer_places(answer)
        wrong = [other for other in edit.wrong if _alike(other, answer)]
        if wrong and places.search(text):
            return places.sub(wrong[0].replace("\\", "\\\\"), text)
    found = _sentences(text)
    if len(found) > 1:
        return " ".join(found[: len(found) // 2])
    return edit.other().text


def _alike(one: str, other: str) -> bool:
    """Whether both are numbers or both are not, and neither is yes or no."""
    closed = {"yes", "no"} & {one.lower(), other.lower()}
    return not closed and one.lower() != other.lower() and _has_digit(one) == _has_digit(other)


def _has_digit(text: str) -> bool:
    return any(letter.isdigit() for letter in text)


def _sentences(text: str) -> list[str]:
    return _SENTENCE_END.split(text.strip())


def _refresh(documents: list[Passage], at: int, edit: _Edit) -> _Pair:
    return _texts([*documents[:at], edit.other(), edit.other(), *documents[at + 2 :]]), _texts(documents)


def _insert(documents: list[Passage], at: int, edit: _Edit) -> _Pair:  # noqa: ARG001
    return _texts([*documents[:at], *documents[at + 1 :]]), _texts(documents)


def _delete(documents: list[Passage], at: int, edit: _Edit) -> _Pair:
    return _texts([*documents[:at], edit.other(), *documents[at:]]), _texts(documents)


def _reorder(documents: list[Passage], at: int, edit: _Edit) -> _Pair:  # noqa: ARG001
    swapped = [documents[at + 1], documents[at]]
    return _texts([*documents[:at], *swapped, *documents[at + 2 :]]), _texts(documents)


def _summarise(documents: list[Passage], at: int, edit: _Edit) -> _Pair:
    lines = [f"- {p.title}: {_summary(p, edit.question)}" for p in documents[at : at + 2]]
    summary = "\n".join(["Summary of documents that were read:", *lines])
    return _texts(documents), [*_texts(documents[:at]), summary, *_texts(documents[at + 2 :])]


def _summary(passage: Passage, question: Question) -> str:
    """Returns the first sentence and those that hold an answer or the title of another needed document."""
    titles = [p.title.partition(" (")[0] for p in question.gold if p is not passage]
    told = [*question.answers, *titles]
    return " ".join(s for number, s in enumerate(_sentences(passage.text)) if not number or holds_answer(s, told))


def _clear(documents: list[Passage], at: int, edit: _Edit) -> _Pair:  # noqa: ARG001
    texts = _texts(documents)
    return texts, [*texts[:at], _CLEARED, *texts[at + 1 :]]


_MAKERS: Final[dict[QAEdit, Callable[[list[Passage], int, _Edit], _Pair]]] = {
    "replace": _replace,
    "update": _update,
    "refresh": _refresh,
    "insert": _insert,
    "delete": _delete,
    "reorder": _reorder,
    "summarise": _summarise,
    "clear": _clear,
}


def _texts(documents: Sequence[Passage]) -> list[str]:
    return [f"{document.title}\n{document.text}" for document in documents]


def _chat(documents: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Returns the messages that give the documents."""
    told = "\n\n".join([_TASK, *documents])
    return ({"role": "system", "content": _SYSTEM}, {"role": "user", "content": told})
