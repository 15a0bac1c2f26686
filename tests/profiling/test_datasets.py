from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from agentcache.errors import ConfigError
from agentcache.profiling.datasets import load_dataset
from agentcache.samples import load_hotpot_sample

DOCUMENTS = {"task": "a", "question": "Why?", "documents": ["One.", "Two."]}
ROWS: dict[str, dict[str, Any]] = {
    "hotpotqa": {"_id": "x", "question": "Q?", "context": [["T", ["One.", " Two."]], ["U", ["Three."]]]},
    "musique": {"id": "x", "question": "Q?", "paragraphs": [{"title": "T", "paragraph_text": "One. Two."}]},
    "2wiki": {"i": "x", "question": "Q?", "ctx": [{"title": "T", "text": "One. Two."}]},
    "ama_bench": {
        "episode_id": "x",
        "domain": "d",
        "task": "Q?",
        "trajectory": [{"action": "-", "observation": ""}, {"action": "look", "observation": "One. Two."}],
    },
    "tau_bench": {
        "task_id": "x",
        "traj": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Q?"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "One. Two."},
            {"role": "assistant", "content": "Anything else?"},
            {"role": "user", "content": "No."},
            {"role": "assistant", "content": "Bye."},
        ],
    },
}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_each_form_gives_the_task(name: str, tmp_path: Path) -> None:
    dataset = load_dataset(write(tmp_path / "f.jsonl", ROWS[name]))
    (task,) = dataset.tasks
    assert dataset.name == task.dataset == name
    assert task.question == "Q?" and task.id.startswith(name) and task.id.endswith("x")
    assert "One. Two." in task.turns[0].results[0]
    assert task.system == ("Be kind." if name == "tau_bench" else "")


def test_turns_of_tau_bench_are_calls_with_results_and_answers_with_replies(tmp_path: Path) -> None:
    (task,) = load_dataset(write(tmp_path / "f.json", [ROWS["tau_bench"]])).tasks
    assert [(turn.action, turn.results) for turn in task.turns] == [
        ("f({})", ("One. Two.",)),
        ("Anything else?", ("No.",)),
    ]


def test_half_of_the_documents_is_found_and_the_others_are_read_one_by_one(tmp_path: Path) -> None:
    dataset = load_dataset(write(tmp_path / "mine.jsonl", DOCUMENTS, {"task": "b", "documents": ["Three."]}))
    assert dataset.name == "mine"
    assert [task.id for task in dataset.tasks] == ["mine-a", "mine-b"]
    assert [(turn.action, turn.results) for turn in dataset.tasks[0].turns] == [
        ('search("Why?")', ("One.",)),
        ('read("document 2")', ("Two.",)),
    ]


def test_the_shipped_sample_has_its_documents() -> None:
    dataset = load_dataset()
    assert dataset.name == "hotpotqa"
    for task, item in zip(dataset.tasks, load_hotpot_sample(), strict=True):
        assert task.question == item.question
        found = [text.split("\n")[0] for turn in task.turns for text in turn.results]
        assert found == [p.title for p in item.paragraphs]
        assert [turn.action for turn in task.turns[1:]] == [f"read({json.dumps(p.title)})" for p in item.paragraphs[5:]]


def test_a_folder_gives_all_its_files_and_their_hash(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", DOCUMENTS | {"task": 1})
    other = {key: value for key, value in ROWS["2wiki"].items() if key != "i"}
    write(first, other | {"i": 1})
    second = write(tmp_path / "b.jsonl", other | {"i": 2}, other | {"i": 3})
    (tmp_path / "LICENSE").write_text("none of it")
    dataset = load_dataset(tmp_path)
    assert [task.id for task in dataset.tasks] == ["2wiki-1", "2wiki-2", "2wiki-3"]
    assert dataset.hash == xxhash.xxh3_128_hexdigest(first.read_bytes() + second.read_bytes())


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "x"}], "rows of no known form, with the fields text; known: documents"),
        (["x"], "rows that are no objects"),
        ([DOCUMENTS, DOCUMENTS], "row 1: task 'f-a' is there twice"),
        ([DOCUMENTS, ROWS["2wiki"]], "holds 2wiki and f; give the tasks of one data set"),
        ([], "holds no tasks"),
        ([{"documents": ["x"]}], "row 0: not as in f: KeyError: 'task'"),
        ([{"task": "a", "documents": []}], "documents must be a list of texts"),
        ([{"task_id": 1, "traj": []}], "row 0: not as in tau_bench: ValueError"),
    ],
)
def test_what_is_no_data_is_named_with_its_place(rows: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_dataset(write(tmp_path / "f.jsonl", *rows))
    assert said in str(error.value)


def test_a_file_that_is_not_there_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_dataset(tmp_path / "none.json")
    (tmp_path / "f.json").write_text("{")
    with pytest.raises(ConfigError, match="neither JSON nor JSON lines"):
        load_dataset(tmp_path / "f.json")
