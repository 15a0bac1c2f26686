"""Real edits from real text, seeded: what an agent's controller does to its prompt, made from tasks of public data sets.

A task is a question and turns; each turn is an action and what came back, one tool result or several retrieved documents. A
prompt is filled up with turns of other tasks of the same split until it has its length. Then it is edited, again and again:

```
replace     the results of one turn become those of another one                      (tool-result replacement)
refresh     some documents of one turn are replaced, and perhaps reordered           (retrieval refresh)
summarise   the first turns become a summary of the lead sentences of their results  (summarisation)
delete      one turn, or one document of a turn, goes                                (deletion)
```

No text is invented but the frames around it. The edits of one task form a chain: each begins where the last one ended, so
that a chain of n edits needs n + 1 prefills.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from agentcache.errors import ConfigError

__all__ = ["EDIT_KINDS", "Edit", "EditKind", "Message", "Task", "Turn", "lead_sentences", "make_edits", "split"]

EditKind = Literal["replace", "refresh", "summarise", "delete"]
EDIT_KINDS: tuple[EditKind, ...] = get_args(EditKind)

Message = dict[str, Any]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of an agent.

    Attributes:
        action: What the agent said or called.
        results: What came back: one text, or several retrieved documents.
    """

    action: str
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a data set. Its revisions stay in one split.

    Attributes:
        id: Unique among the tasks of all data sets.
        dataset: Its data set.
        question: What the agent is asked.
        turns: At least one.
        system: System prompt, or nothing.
    """

    id: str
    dataset: str
    question: str
    turns: tuple[Turn, ...]
    system: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """A pair of adjacent revisions of one prompt.

    Attributes:
        id: Unique, and the same for the same seed.
        kind: What the controller did.
        task: Id of the task.
        dataset: Its data set.
        old: Chat messages before.
        new: Chat messages after.
    """

    id: str
    kind: EditKind
    task: str
    dataset: str
    old: tuple[Message, ...]
    new: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt while it is edited; `summary` stands for the turns that are gone."""

    task: Task
    turns: tuple[Turn, ...]
    summary: str = ""

    def messages(self) -> tuple[Message, ...]:
        head = self.task.question
        if self.summary:
            head += f"\n\nSummary of the earlier steps:\n{self.summary}"
        chat = [("system", self.task.system)] if self.task.system else []
        chat.append(("user", head))
        for turn in self.turns:
            chat += [("assistant", turn.action), ("user", "\n\n".join(turn.results))]
        return tuple({"role": role, "content": content} for role, content in chat)

    def with_turn(self, at: int, turn: Turn) -> _Prompt:
        return replace(self, turns=(*self.turns[:at], turn, *self.turns[at + 1 :]))


def split(tasks: Sequence[Task], *, seed: int, share: float) -> tuple[list[Task], list[Task]]:
    """Returns the tasks in two parts, in their order; which part a task is in depends on its id and the seed alone.

    So tasks that are added later move no other one, and all revisions of a task are in one part.

    Args:
        tasks: Any.
        seed: Of the split.
        share: Of the first part, from 0 to 1; met on average.

    Raises:
        ConfigError: The share is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"split: share={share} is not allowed; take a share from 0 to 1")
    first = {task.id for task in tasks if random.Random(f"{seed}/split/{task.id}").random() < share}
    return [task for task in tasks if task.id in first], [task for task in tasks if task.id not in first]


def make_edits(
    tasks: Sequence[Task],
    *,
    seed: int,
    per_task: int = 2,
    characters: tuple[int, int] = (2_000, 16_000),
    kinds: Sequence[EditKind] = EDIT_KINDS,
) -> Iterator[Edit]:
    """Yields `per_task` chained edits of each task, fewer where a prompt has nothing left that can be edited.

    An edit is always one: old and new messages differ. The same arguments give the same edits.

    Args:
        tasks: Of one split. They also give the text that prompts are filled up with and that comes in new.
        seed: Of all choices.
        per_task: Edits of each task.
        characters: Least and most characters of the turns of a chain's first prompt, spread evenly over the logarithm. What
            would go beyond is left out; few tasks with little text give shorter prompts.
        kinds: That are drawn from; each is as likely as another where the prompt allows it.

    Raises:
        ConfigError: An argument is not allowed.
    """
    unknown = [kind for kind in kinds if kind not in EDIT_KINDS]
    if unknown or not kinds:
        raise ConfigError(f"edit kinds {list(kinds)} are not allowed; take some of {', '.join(EDIT_KINDS)}")
    low, high = characters
    if not 0 < low <= high:
        raise ConfigError(f"characters={characters} is not allowed; take two numbers above 0, the smaller one first")
    if per_task < 1:
        raise ConfigError(f"per_task={per_task} is not allowed; take 1 or more")
    for task in tasks:
        rng = random.Random(f"{seed}/edits/{task.id}")
        prompt = _filled(task, tasks, low * (high / low) ** rng.random(), rng)
        for index in range(per_task):
            edited = _edited(prompt, tasks, kinds, rng)
            if edited is None:
                break
            kind, after = edited
            yield Edit(
                f"{task.dataset}/{task.id}/{index}", kind, task.id, task.dataset, prompt.messages(), after.messages()
            )
            prompt = after


def lead_sentences(text: str, count: int = 1) -> str:
    """Returns the first sentences of a text."""
    return " ".join(_SENTENCE_END.split(text.strip(), maxsplit=count)[:count])


def _filled(task: Task, tasks: Sequence[Task], characters: float, rng: random.Random) -> _Prompt:
    """Returns a prompt of about so many characters: the task's first turns, and before them turns of other tasks."""
    own: list[Turn] = []
    before: list[Turn] = []
    for kept, source in ((own, (task,)), (before, _others(task, tasks, rng))):
        for turn in (turn for other in source for turn in other.turns):
            fitting = _fitting(turn, characters)
            if fitting is None:
                break
            kept.append(fitting)
            characters -= _length(fitting)
    return _Prompt(task, (*before, *(own or task.turns[:1])))


def _fitting(turn: Turn, characters: float) -> Turn | None:
    """Returns the turn with as many of its first documents as fit, or None when not one does."""
    while turn.results and _length(turn) > characters:
        turn = replace(turn, results=turn.results[:-1])
    return turn if turn.results else None


def _length(turn: Turn) -> int:
    return len(turn.action) + sum(map(len, turn.results))


def _others(task: Task, tasks: Sequence[Task], rng: random.Random) -> list[Task]:
    """Returns the other tasks in a random order, those of the task's data set first."""
    others = [other for other in tasks if other.id != task.id]
    rng.shuffle(others)
    return sorted(others, key=lambda other: other.dataset != task.dataset)


def _edited(
    prompt: _Prompt, tasks: Sequence[Task], kinds: Sequence[EditKind], rng: random.Random
) -> tuple[EditKind, _Prompt] | None:
    """Returns the prompt after an edit of a kind that changes it, or None when none does."""
    others = _others(prompt.task, tasks, rng)
    for kind in rng.sample(list(kinds), len(kinds)):
        after = _MAKERS[kind](prompt, others, rng)
        if after is not None and after.messages() != prompt.messages():
            return kind, after
    return None


def _replace(prompt: _Prompt, others: list[Task], rng: random.Random) -> _Prompt | None:
    """Returns the prompt with another turn's results in one turn, of the same data set where it has another task."""
    if not others:
        return None
    at = rng.randrange(len(prompt.turns))
    return prompt.with_turn(at, replace(prompt.turns[at], results=rng.choice(others[0].turns).results))


def _refresh(prompt: _Prompt, others: list[Task], rng: random.Random) -> _Prompt | None:
    """Returns the prompt with up to a third of a turn's documents replaced, half of the time with two of them swapped."""
    several = [at for at, turn in enumerate(prompt.turns) if len(turn.results) > 1]
    fresh = [text for other in others[:4] for turn in other.turns for text in turn.results]
    if not several or not fresh:
        return None
    at = rng.choice(several)
    documents = list(prompt.turns[at].results)
    count = rng.randint(1, max(1, len(documents) // 3))
    for place in rng.sample(range(len(documents)), count):
        documents[place] = rng.choice(fresh)
    if rng.random() < 0.5:
        a, b = rng.sample(range(len(documents)), 2)
        documents[a], documents[b] = documents[b], documents[a]
    return prompt.with_turn(at, replace(prompt.turns[at], results=tuple(documents)))


def _summarise(prompt: _Prompt, _others: list[Task], rng: random.Random) -> _Prompt | None:
    """Returns the prompt with the first turns, half of them at most, as lead sentences of their results."""
    if len(prompt.turns) < 2:
        return None
    gone = rng.randint(1, max(1, len(prompt.turns) // 2))
    lines = [f"- {lead_sentences(text)}" for turn in prompt.turns[:gone] for text in turn.results if text.strip()]
    summary = "\n".join([prompt.summary, *lines] if prompt.summary else lines)
    return replace(prompt, turns=prompt.turns[gone:], summary=summary)


def _delete(prompt: _Prompt, _others: list[Task], rng: random.Random) -> _Prompt | None:
    """Returns the prompt without one turn, or without one document of a turn that has several."""
    at = rng.randrange(len(prompt.turns))
    results = prompt.turns[at].results
    if len(results) > 1:
        gone = rng.randrange(len(results))
        return prompt.with_turn(at, replace(prompt.turns[at], results=(*results[:gone], *results[gone + 1 :])))
    if len(prompt.turns) < 2:
        return None
    return replace(prompt, turns=(*prompt.turns[:at], *prompt.turns[at + 1 :]))


_MAKERS: dict[EditKind, Callable[[_Prompt, list[Task], random.Random], _Prompt | None]] = {
    "replace": _replace,
    "refresh": _refresh,
    "summarise": _summarise,
    "delete": _delete,
}
