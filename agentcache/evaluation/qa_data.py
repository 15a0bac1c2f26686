"""Questions with their accepted answers and passages, from the same files as `profiling.datasets`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from agentcache.errors import ConfigError
from agentcache.profiling.datasets import SAMPLE, load_dataset, read_rows, read_texts
from agentcache.profiling.profile import Profile

__all__ = [
    "Passage",
    "Question",
    "QuestionSet",
    "answer_places",
    "holds_answer",
    "load_questions",
    "tasks_of",
    "without_calibration",
]

_KNOWN: Final = (
    "paragraphs with answer (MuSiQue, the sample), context with answer (HotpotQA), ctx with answer (2Wiki), "
    'or your own: {"task": id, "question": …, "answers": […], "documents": [text, …], "gold": [numbers of the documents that it needs]}'
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Passage:
    """One document.

    Attributes:
        title: Its title; of your own documents, `document 1` and so on.
        text: Without line breaks.
        gold: Whether the answer needs it.
    """

    title: str
    text: str
    gold: bool


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        id: That `profiling.datasets` gives its task.
        dataset: Its data set.
        text: What is asked.
        answers: Accepted answers, at least one.
        passages: In the data set's order.
    """

    id: str
    dataset: str
    text: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]

    @property
    def gold(self) -> tuple[Passage, ...]:
        """The passages that the answer needs."""
        return tuple(passage for passage in self.passages if passage.gold)

    @property
    def carrier(self) -> Passage:
        """The passage that holds the answer: the last needed one that has an accepted answer's words, else the last needed one."""
        holding = [p for p in self.gold if holds_answer(p.text, self.answers)]
        return (holding or self.gold)[-1]


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions of one source.

    Attributes:
        name: Of the data set.
        hash: xxh3-128 of the bytes that were read, in hex, as in `Dataset`.
        questions: In the order of the files.
    """

    name: str
    hash: str
    questions: tuple[Question, ...]


def answer_places(answer: str) -> re.Pattern[str]:
    """Returns what finds an answer in a text, whole words in any case."""
    return re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE)


def holds_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether a text has the words of one of the answers; yes and no are no words to look for."""
    return any(answer.lower() not in ("yes", "no") and answer_places(answer).search(text) for answer in answers)


def load_questions(source: str | Path = SAMPLE) -> QuestionSet:
    """Returns the questions of a file of JSON or JSON lines, of a folder of such files, or of the shipped sample.

    A question none of whose passages is marked as needed cannot be asked with an edit beside the answer, and is left out.

    Args:
        source: A path, or `sample`.

    Raises:
        ConfigError: It cannot be read, has rows without answers, of no known form or of several, or names two tasks alike.
    """
    digest = xxhash.xxh3_128()
    questions: dict[str, Question] = {}
    for where, raw in read_texts(source):
        digest.update(raw)
        for number, row in enumerate(read_rows(where, raw)):
            try:
                question = _read(where, row)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise ConfigError(
                    f"{where}, row {number}: no question with answers: {type(error).__name__}: {error}; known: {_KNOWN}"
                ) from error
            if question.id in questions:
                raise ConfigError(f"{where}, row {number}: task {question.id!r} is there twice; give each its own id")
            questions[question.id] = question
    names = {question.dataset for question in questions.values()}
    if len(names) != 1:
        raise ConfigError(
            f"{str(source)!r} holds {' and '.join(sorted(names)) or 'no questions'}; give those of one data set"
        )
    return QuestionSet(names.pop(), digest.hexdigest(), tuple(q for q in questions.values() if q.gold))


def tasks_of(sources: Iterable[str]) -> dict[str, frozenset[str]]:
    """Returns the ids of the tasks of each source, by its hash."""
    datasets = [load_dataset(source) for source in sources]
    return {dataset.hash: frozenset(task.id for task in dataset.tasks) for dataset in datasets}


def without_calibration(
    sets: Sequence[QuestionSet], profile: Profile | None, calibrated_on: Collection[str]
) -> tuple[list[QuestionSet], int]:
    """Returns the sets without the tasks that the profile may have been fitted to, and how many those were.

    A profile names its files by their hashes and not its tasks, so all tasks of its files are left out, also where another
    file has them: the shipped sample is a part of HotpotQA.

    Args:
        sets: That are measured.
        profile: That the cache takes, or None.
        calibrated_on: Files that it was made of, beside the sample and those that are measured, which are known.

    Raises:
        ConfigError: It was made of questions of a measured data set that no file here has.
    """
    used = {source.hash: source.dataset for source in profile.data} if profile is not None else {}
    known = {each.hash: frozenset(q.id for q in each.questions) for each in sets} | tasks_of([SAMPLE, *calibrated_on])
    names = {each.name for each in sets}
    for hash_, name in used.items():
        if name in names and hash_ not in known:
            raise ConfigError(
                f"the profile was made of {name} data with the hash {hash_}, and which tasks that are is not known here: "
                f"name its file with --calibrated-on, so that they are left out, or measure other data"
            )
    taken = frozenset[str]().union(*(ids for hash_, ids in known.items() if hash_ in used))
    kept = [QuestionSet(s.name, s.hash, tuple(q for q in s.questions if q.id not in taken)) for s in sets]
    return kept, sum(len(s.questions) for s in sets) - sum(len(s.questions) for s in kept)


def _read(where: str, row: Row) -> Question:
    """Returns the question of a row of any known form."""
    if "documents" in row:
        return _own(where, row)
    if "paragraphs" in row:
        ours = all("text" in paragraph for paragraph in row["paragraphs"])
        return _sample(row) if ours else _musique(row)
    for key, read in (("context", _hotpotqa), ("ctx", _wiki)):
        if key in row:
            return read(row)
    raise ValueError(f"the row has the fields {', '.join(row)}")


def _question(dataset: str, task: Any, row: Row, passages: Iterable[tuple[str, str, bool]]) -> Question:
    answers = row["answers"] if "answers" in row else [row["answer"], *row.get("answer_aliases", ())]
    texts = tuple(dict.fromkeys(str(answer).strip() for answer in answers))
    if not all(texts):
        raise ValueError("an answer is empty")
    if not texts:
        raise ValueError("it has no answers")
    documents = tuple(Passage(title, " ".join(text.split()), bool(gold)) for title, text, gold in passages)
    return Question(f"{dataset}-{task}", dataset, row["question"].strip(), texts, documents)


def _own(where: str, row: Row) -> Question:
    gold = set(row.get("gold", range(1, len(row["documents"]) + 1)))
    passages = ((f"document {n}", text, n in gold) for n, text in enumerate(row["documents"], 1))
    return _question(Path(where).stem, row["task"], row, passages)


def _sample(row: Row) -> Question:
    gold = row["supporting_titles"]
    return _question(
        "hotpotqa", row["id"], row, ((p["title"], p["text"], p["title"] in gold) for p in row["paragraphs"])
    )


def _hotpotqa(row: Row) -> Question:
    gold = {title for title, _ in row["supporting_facts"]}
    passages = ((title, "".join(sentences), title in gold) for title, sentences in row["context"])
    return _question("hotpotqa", row["_id"] if "_id" in row else row["id"], row, passages)


def _musique(row: Row) -> Question:
    passages = ((p["title"], p["paragraph_text"], p["is_supporting"]) for p in row["paragraphs"])
    return _question("musique", row["id"], row, passages)


def _wiki(row: Row) -> Question:
    return _question("2wiki", row["i"], row, ((p["title"], p["text"], p["gold"]) for p in row["ctx"]))
