"""Reads tasks from files of public data sets, each known by the fields of its rows.

| rows with | data set | a turn is |
|---|---|---|
| `documents` | your own: `{"task": id, "documents": [text, …], "question": …}` | a search that finds half of them, or the reading of one more |
| `context` | HotpotQA | the same |
| `paragraphs` of `paragraph_text` | MuSiQue | the same |
| `paragraphs` of `text` | the HotpotQA sample that ships with agentcache | the same |
| `ctx` | 2WikiMultihopQA, joined with passages | the same |
| `trajectory` | AMA-Bench | an action and its observation |
| `traj` | tau-bench | what the agent said or called and what it got |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import xxhash

from agentcache.errors import ConfigError
from agentcache.profiling.edits import Task, Turn

__all__ = ["SAMPLE", "Dataset", "load_dataset", "read_rows", "read_texts"]

SAMPLE: Final = "sample"
"""Names the data that ships with agentcache."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Tasks and where they are from.

    Attributes:
        name: Of the data set; of your own documents: the file's name.
        hash: xxh3-128 of the bytes that were read, in hex.
        tasks: In the order of the files.
    """

    name: str
    hash: str
    tasks: tuple[Task, ...]


def load_dataset(source: str | Path = SAMPLE) -> Dataset:
    """Returns the tasks of a file of JSON or JSON lines, of a folder of such files, or of the shipped sample.

    Args:
        source: A path, or `sample`.

    Raises:
        ConfigError: It cannot be read, has rows of no known form or of several, or names two tasks alike.
    """
    digest = xxhash.xxh3_128()
    tasks: dict[str, Task] = {}
    names: set[str] = set()
    for where, raw in read_texts(source):
        digest.update(raw)
        for number, row in enumerate(read_rows(where, raw)):
            name, read = _form(where, row)
            try:
                task = read(row, name)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise ConfigError(
                    f"{where}, row {number}: not as in {name}: {type(error).__name__}: {error}"
                ) from error
            if task.id in tasks:
                raise ConfigError(f"{where}, row {number}: task {task.id!r} is there twice; give each its own id")
            if task.turns:
                tasks[task.id] = task
                names.add(name)
    if len(names) != 1:
        raise ConfigError(
            f"{str(source)!r} holds {' and '.join(sorted(names)) or 'no tasks'}; give the tasks of one data set"
        )
    return Dataset(names.pop(), digest.hexdigest(), tuple(tasks.values()))


def read_texts(source: str | Path) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the bytes of each file of a data set.

    Args:
        source: A file, a folder of JSON files, or `sample`.

    Raises:
        ConfigError: A file cannot be read.
    """
    if str(source) == SAMPLE:
        yield SAMPLE, files("agentcache").joinpath("data", "hotpot_sample.jsonl").read_bytes()
        return
    path = Path(source)
    paths = sorted(file for file in path.glob("*.json*") if file.is_file()) if path.is_dir() else [path]
    for file in paths:
        try:
            yield str(file), file.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"data {str(source)!r} cannot be read: {error}; give a file, a folder, or {SAMPLE!r}"
            ) from error


def read_rows(where: str, raw: bytes) -> list[Row]:
    """Returns the objects of a JSON array, of one object, or of JSON lines.

    Args:
        where: The file's name, for errors.
        raw: Its bytes.

    Raises:
        ConfigError: It is no JSON, or holds something else than objects.
    """
    try:
        text = raw.decode("utf-8")
        rows: list[Row]
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{where} is neither JSON nor JSON lines: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{where} has rows that are no objects; take one of: {_KNOWN}")
    return rows


def _form(where: str, row: Row) -> tuple[str, Callable[[Row, str], Task]]:
    """Returns the data set's name and reader."""
    if "documents" in row:
        return Path(where).stem, _documents
    if "paragraphs" in row:
        ours = all("text" in paragraph for paragraph in row["paragraphs"])
        return ("hotpotqa", _sample) if ours else ("musique", _musique)
    for key, name, reader in (
        ("context", "hotpotqa", _hotpotqa),
        ("ctx", "2wiki", _wiki),
        ("trajectory", "ama_bench", _ama_bench),
        ("traj", "tau_bench", _tau_bench),
    ):
        if key in row:
            return name, reader
    raise ConfigError(f"{where} has rows of no known form, with the fields {', '.join(row)}; known: {_KNOWN}")


_KNOWN: Final = "documents (your own), context (HotpotQA), paragraphs (MuSiQue), ctx (2Wiki), trajectory (AMA-Bench), traj (tau-bench)"


def _retrieval(dataset: str, task: Any, question: str, documents: Sequence[tuple[str, str]]) -> Task:
    """Returns one question, a search that finds the first half of its documents, and the others, read one by one.

    Args:
        dataset: Its name.
        task: Its id there.
        question: That is asked.
        documents: Title, or nothing, and text of each.
    """
    results = [f"{title}\n{' '.join(text.split())}" if title else text for title, text in documents]
    half = -(-len(results) // 2)
    reads = [
        Turn(f"read({json.dumps(title or f'document {at + 1}')})", (results[at],))
        for at, (title, _) in enumerate(documents[half:], half)
    ]
    search = Turn(f"search({json.dumps(question)})", tuple(results[:half]))
    return Task(f"{dataset}-{task}", dataset, question, (search, *reads))


def _documents(row: Row, name: str) -> Task:
    if not all(isinstance(text, str) for text in row["documents"]) or not row["documents"]:
        raise ValueError("documents must be a list of texts, at least one")
    question = row.get("question") or "Read these documents."
    return _retrieval(name, row["task"], question, [("", text) for text in row["documents"]])


def _sample(row: Row, name: str) -> Task:
    return _retrieval(name, row["id"], row["question"], [(p["title"], p["text"]) for p in row["paragraphs"]])


def _hotpotqa(row: Row, name: str) -> Task:
    documents = [(title, "".join(sentences)) for title, sentences in row["context"]]
    return _retrieval(name, row["_id"] if "_id" in row else row["id"], row["question"], documents)


def _musique(row: Row, name: str) -> Task:
    return _retrieval(name, row["id"], row["question"], [(p["title"], p["paragraph_text"]) for p in row["paragraphs"]])


def _wiki(row: Row, name: str) -> Task:
    return _retrieval(name, row["i"], row["question"], [(p["title"], p["text"]) for p in row["ctx"]])


def _ama_bench(row: Row, name: str) -> Task:
    turns = tuple(
        Turn(step["action"], (step["observation"],)) for step in row["trajectory"] if step["observation"].strip()
    )
    return Task(f"{name}-{row['domain']}-{row['episode_id']}", name, row["task"], turns)


def _tau_bench(row: Row, name: str) -> Task:
    """The first message is the system prompt, the second one the user's request; an answer by tool or user ends a turn."""
    system, request, *rest = row["traj"]
    turns: list[Turn] = []
    action = ""
    for message in rest:
        if message["role"] == "assistant":
            calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or ()]
            action = "\n".join([message["content"], *calls] if message["content"] else calls)
        elif action and message["content"]:
            turns.append(Turn(action, (message["content"],)))
            action = ""
    trial = f"-{row['trial']}" if row.get("trial") else ""
    return Task(f"{name}-{row['task_id']}{trial}", name, request["content"], tuple(turns), system["content"])
