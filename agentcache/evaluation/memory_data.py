"""Memories and questions about them: LoCoMo's dialogues, AMA-Bench's trajectories, and the documents of question sets.

| rows with | data set | a memory unit is |
|---|---|---|
| `conversation` and `qa` | LoCoMo | consecutive turns of one session, with its date |
| `trajectory` and `qa_pairs` | AMA-Bench | consecutive steps, as `Step i:`, `Action:`, `Observation:` |
| what `qa_data` reads | HotpotQA, MuSiQue, 2Wiki, the sample, your own | one document of the question |

Nothing of a text leaves this module but in prompts: results name questions by their ids.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from agentcache.errors import ConfigError
from agentcache.evaluation.qa_data import load_questions
from agentcache.profiling.datasets import SAMPLE, read_rows, read_texts

__all__ = ["CATEGORIES", "MemoryQuestion", "MemorySet", "Unit", "choose", "load_memories"]

CATEGORIES: Final = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
"""LoCoMo's, as its paper numbers them. 5, adversarial, has no answer to be compared with and is left out."""

RECALL: Final = "A"
"""AMA-Bench's type of questions that ask what happened; the others ask for reasons, counterfactuals and summaries."""

LONGEST_ANSWER: Final = 64
"""Words of an AMA-Bench answer that is asked for (**choice**): longer ones are essays that no short reply can match."""

_STEPS = re.compile(r"\bsteps?\s+(\d+)(?:\s*(?:and|to|through|[-–])\s*(?:step\s+)?(\d+))?", re.IGNORECASE)
_TURN_ID = re.compile(r"D\d+:\d+")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unit:
    """One memory.

    Attributes:
        text: As it is encoded.
        holds: What it holds of its source: ids of dialogue turns, numbers of steps, or a title.
    """

    text: str
    holds: frozenset[str]


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """A question about a memory.

    Attributes:
        id: Unique in its data set.
        memory: Id of the memory.
        category: Kind of question, or nothing.
        text: What is asked.
        answers: Accepted answers, at least one.
        evidence: What the answer needs, as in `Unit.holds`; empty where it is not known.
    """

    id: str
    memory: str
    category: str
    text: str
    answers: tuple[str, ...]
    evidence: frozenset[str]


@dataclass(frozen=True, slots=True)
class MemorySet:
    """Memories and questions of one source.

    Attributes:
        name: Of the data set.
        hash: xxh3-128 of the bytes that were read, in hex.
        memories: Units by the memory's id.
        questions: In the order of the files.
        evidence: What the evidence of its questions rests on, for a result's readers.
        max_tokens: Longest answer that its questions need.
        instruction: What the model is told.
    """

    name: str
    hash: str
    memories: Mapping[str, tuple[Unit, ...]]
    questions: tuple[MemoryQuestion, ...]
    evidence: str
    max_tokens: int
    instruction: str


def load_memories(source: str | Path = SAMPLE, *, characters: int = 800) -> MemorySet:
    """Returns the memories of a file of JSON or JSON lines, of a folder of such files, or of the shipped sample.

    Args:
        source: A path, or `sample`.
        characters: Most of a unit of a dialogue or a trajectory; one turn may be longer, one step is cut.

    Raises:
        ConfigError: It cannot be read, has rows of no known form or of several, or no question that can be asked.
    """
    if characters < 1:
        raise ConfigError(f"a memory unit of {characters} characters is not allowed; take 1 or more")
    digest = xxhash.xxh3_128()
    rows: list[tuple[str, Row]] = []
    for where, raw in read_texts(source):
        digest.update(raw)
        rows += ((where, row) for row in read_rows(where, raw))
    made = _MAKERS.get(_form(rows[0][1]) if rows else "")
    if made is None:
        return _documents(source)
    try:
        found = made([row for _, row in rows], characters)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{str(source)!r} is not as its first row says: {type(error).__name__}: {error}") from error
    if not found.questions:
        raise ConfigError(f"{str(source)!r} holds no question of {found.name} that can be asked")
    return replace(found, hash=digest.hexdigest())


def choose(data: MemorySet, count: int, seed: int) -> list[MemoryQuestion]:
    """Returns `count` questions, drawn evenly over categories, those of one memory in a row.

    Args:
        data: Where from.
        count: How many.
        seed: Of the draw.

    Raises:
        ConfigError: There are fewer.
    """
    if len(data.questions) < count:
        raise ConfigError(
            f"{data.name} has {len(data.questions)} questions, {count} are wanted; give --items or more data"
        )
    order = {question.id: random.Random(f"{seed}/memory/{question.id}").random() for question in data.questions}
    ranked = sorted(data.questions, key=lambda question: order[question.id])
    by_category: dict[str, list[MemoryQuestion]] = {}
    for question in ranked:
        by_category.setdefault(question.category, []).append(question)
    places = {q.id: at for group in by_category.values() for at, q in enumerate(group)}
    drawn = {q.id for q in sorted(ranked, key=lambda q: (places[q.id], q.category))[:count]}
    memories = list(data.memories)
    chosen = [question for question in data.questions if question.id in drawn]
    return sorted(chosen, key=lambda question: memories.index(question.memory))


def _form(row: Row) -> str:
    return (
        "locomo" if {"conversation", "qa"} <= row.keys() else "ama" if {"trajectory", "qa_pairs"} <= row.keys() else ""
    )


# -- LoCoMo ------------------------------------------------------------------------------------------------------------


def _locomo(rows: Sequence[Row], characters: int) -> MemorySet:
    memories: dict[str, tuple[Unit, ...]] = {}
    questions = []
    for row in rows:
        memory = row["sample_id"]
        memories[memory] = tuple(_dialogue(row["conversation"], characters))
        known = frozenset[str]().union(*(unit.holds for unit in memories[memory]))
        for number, qa in enumerate(row["qa"]):
            if qa["category"] not in CATEGORIES or qa.get("answer") is None:
                continue
            answer = str(qa["answer"])
            if qa["category"] == 3:  # as LoCoMo's own script: what follows is an explanation
                answer = answer.split(";")[0].strip()
            evidence = frozenset(turn for text in qa["evidence"] for turn in _TURN_ID.findall(text)) & known
            category = CATEGORIES[qa["category"]]
            questions.append(
                MemoryQuestion(f"{memory}/{number}", memory, category, qa["question"], (answer,), evidence)
            )
    return MemorySet(
        "locomo",
        "",
        memories,
        tuple(questions),
        evidence="dialogue turns that LoCoMo names",
        max_tokens=24,
        instruction=(
            "You answer questions about a long conversation from what is remembered of it. Answer with a short phrase, in the "
            "words of the conversation; give dates as day, month and year."
        ),
    )


def _dialogue(conversation: Row, characters: int) -> Iterator[Unit]:
    """Yields the turns of each session, so many in a unit as fit."""
    number = 1
    while f"session_{number}_date_time" in conversation or f"session_{number}" in conversation:
        date = conversation.get(f"session_{number}_date_time", "")
        head = f"Conversation at {date}:\n" if date else "Conversation:\n"
        turns = [(str(turn["dia_id"]), _turn(turn)) for turn in conversation.get(f"session_{number}") or ()]
        for group in _grouped(turns, characters - len(head)):
            yield Unit(head + "".join(text for _, text in group), frozenset(name for name, _ in group))
        number += 1


def _turn(turn: Row) -> str:
    shown = f" [shares {turn['blip_caption']}]" if turn.get("blip_caption") else ""
    return f"{turn['speaker']}: {' '.join(turn['text'].split())}{shown}\n"


# -- AMA-Bench ---------------------------------------------------------------------------------------------------------


def _ama_bench(rows: Sequence[Row], characters: int) -> MemorySet:
    memories: dict[str, tuple[Unit, ...]] = {}
    questions = []
    for row in rows:
        memory = f"{row['domain']}/{row['episode_id']}"
        steps = [(str(step["turn_idx"]), part) for step in row["trajectory"] for part in _step(step, characters)]
        memories[memory] = tuple(
            Unit("".join(text for _, text in group), frozenset(name for name, _ in group))
            for group in _grouped(steps, characters)
        )
        known = {name for name, _ in steps}
        for number, qa in enumerate(row["qa_pairs"]):
            if qa["type"] != RECALL or not 0 < len(str(qa["answer"]).split()) <= LONGEST_ANSWER:
                continue
            evidence = frozenset(_named_steps(qa["question"])) & known
            answers = (str(qa["answer"]),)
            questions.append(
                MemoryQuestion(f"{memory}/{number}", memory, row["domain"], qa["question"], answers, evidence)
            )
    return MemorySet(
        "ama_bench_recall",
        "",
        memories,
        tuple(questions),
        evidence="steps that the question names",
        max_tokens=32,
        instruction=(
            "You answer questions about what an agent did from what is remembered of it: steps, each with its action and what was "
            "observed. Answer in one short sentence with steps, actions and values as they are remembered."
        ),
    )


def _step(step: Row, characters: int) -> Iterator[str]:
    """Yields a step in AMA-Bench's own form, in several parts where it is long; nothing for a step without content."""
    action, observation = str(step["action"]).strip(), str(step["observation"]).strip()
    if not observation and action in ("", "—"):
        return
    text = f"Action: {action}\nObservation: {observation}\n"
    room = max(characters - len("Step 1000 (continued):\n"), 1)
    for start in range(0, len(text), room):
        yield f"Step {step['turn_idx']}{' (continued)' if start else ''}:\n{text[start : start + room].rstrip()}\n"


def _named_steps(question: str) -> Iterator[str]:
    for first, last in _STEPS.findall(question):
        yield from map(str, range(int(first), int(last or first) + 1))


# -- documents ---------------------------------------------------------------------------------------------------------


def _documents(source: str | Path) -> MemorySet:
    found = load_questions(source)
    memories: dict[str, tuple[Unit, ...]] = {}
    questions = []
    for question in found.questions:
        memories[question.id] = tuple(
            Unit(f"{passage.title}: {passage.text}\n", frozenset({passage.title})) for passage in question.passages
        )
        evidence = frozenset(passage.title for passage in question.gold)
        questions.append(MemoryQuestion(question.id, question.id, "", question.text, question.answers, evidence))
    return MemorySet(
        found.name,
        found.hash,
        memories,
        tuple(questions),
        evidence="documents that are marked as needed",
        max_tokens=16,
        instruction="You answer questions from documents. Answer with a name, a date, or yes or no, in as few words as possible.",
    )


def _grouped(parts: Iterable[tuple[str, str]], characters: int) -> Iterator[list[tuple[str, str]]]:
    """Yields consecutive parts, so many together as fit; a longer one alone."""
    group: list[tuple[str, str]] = []
    for part in parts:
        if group and sum(len(text) for _, text in [*group, part]) > characters:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


_MAKERS: Final = {"locomo": _locomo, "ama": _ama_bench}
