"""The exact policy on a real model and real edits gives the tokens of plain vLLM; and what a second version costs to store.

The text is HotpotQA's: `hotpotqa/*.jsonl` in the folder that AGENTCACHE_DATA names or else in `../shared/data`, beside the
repository, where that is present; the shipped sample where it is not.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from agentcache.samples import load_hotpot_sample
from tests.engine.harness import Reference

pytestmark = pytest.mark.engine

CHAINS, EDITS, REPLY = 10, 5, 8
PARAGRAPH = 400
"""Most characters of a document: float32 on two cores computes about a thousand tokens a second."""
SHARED = Path(__file__).parents[3] / "shared" / "data"
ENGINE = {"blocks": 160, "threads": os.cpu_count() or 1}


def documents() -> list[tuple[str, list[str]]]:
    """Returns questions with their paragraphs."""
    named = os.environ.get("AGENTCACHE_DATA")
    files = sorted((Path(named) if named else SHARED).glob("hotpotqa/*.jsonl"))
    if named and not files:
        raise FileNotFoundError(f"AGENTCACHE_DATA={named} has no hotpotqa/*.jsonl: unset it to use the shipped sample")
    if files:
        rows = [json.loads(line) for path in files for line in path.read_text("utf-8").splitlines()[:CHAINS]]
        rows = rows[:: len(files)]
        found = [(row["question"], [(title, "".join(text)) for title, text in row["context"]]) for row in rows]
    else:
        found = [(item.question, list(item.paragraphs)) for item in load_hotpot_sample()]
    return [(question, [f"{title}: {text[:PARAGRAPH]}" for title, text in texts]) for question, texts in found]


def revisions(seed: int, question: str, paragraphs: list[str]) -> Iterator[str]:
    """Yields a prompt and `EDITS` revisions of it: documents replaced, inserted, deleted, summarised."""
    rng = random.Random(seed)
    shown, spare = paragraphs[:3], paragraphs[3:]
    for turn in range(EDITS + 1):
        listed = "\n\n".join(shown)
        yield f"Answer with the documents.\n\n{listed}\n\nQuestion: {question}\nAnswer:"
        at = rng.randrange(len(shown))
        kind = ("replace", "insert", "summarise", "delete", "replace")[(seed + turn) % 5]
        if kind == "replace":
            shown[at] = spare[turn % len(spare)]
        elif kind == "insert":
            shown.insert(at, spare[turn % len(spare)][:200])
        elif kind == "summarise":
            shown[at] = shown[at][: len(shown[at]) // 3]
        elif len(shown) > 1:
            del shown[at]


@pytest.fixture
def engine(start_engine, smollm2_path):
    return start_engine(smollm2_path, **ENGINE)


@pytest.mark.parametrize("policy", ["prefix_cache", "edit_local"])
def test_a_second_version_stores_the_tokens_that_it_computed(engine, policy):
    tokenizer = engine.llm.get_tokenizer()
    question, paragraphs = documents()[0]
    first, second, *_ = (tokenizer.encode(prompt) for prompt in revisions(0, question, paragraphs))

    def payload_bytes() -> int:
        return engine.llm.collective_rpc("agentcache_stats")[0]["payload_bytes"]

    engine.ask(first, ResumeParams(version="v1"), n=REPLY)
    before = payload_bytes()
    assert before == (len(first) + REPLY - 1) * engine.runtime.row_bytes
    report = engine.ask(second, ResumeParams(version="v2", parent="v1", policy=policy), n=REPLY).recovery
    computed = report.prompt_tokens - report.prefix_tokens - report.reused_tokens + REPLY - 1
    assert computed < len(second)
    assert payload_bytes() - before <= 1.1 * computed * engine.runtime.row_bytes


def test_the_exact_policy_gives_the_tokens_of_plain_vllm_on_fifty_real_edits(engine, start_engine, smollm2_path):
    tokenizer = engine.llm.get_tokenizer()
    texts = [
        [tokenizer.encode(prompt) for prompt in revisions(chain, *document)]
        for chain, document in enumerate(documents()[:CHAINS])
    ]
    edits, restored = [], 0
    for turn in range(EDITS + 1):
        answers = []
        for chain, prompts in enumerate(texts):
            parent = f"{chain}.{turn - 1}" if turn else None
            params = ResumeParams(version=f"{chain}.{turn}", parent=parent, episode=str(chain))
            answers.append(engine.add(prompts[turn], params, n=REPLY))
        engine.run()
        engine.drain()
        engine.forget_local()  # what is not computed comes from the checkpoint
        if turn:
            edits += answers
            assert all(answer.recovery.exact and answer.recovery.reason is None for answer in answers)
            restored += sum(answer.recovery.restored_tokens for answer in answers)
    engine.check()
    assert len(edits) == CHAINS * EDITS == 50
    assert restored > 0.2 * sum(len(answer.prompt) for answer in edits)

    start_engine.stop()
    reference = Reference(smollm2_path, executor="uni", threads=ENGINE["threads"])
    try:
        wanted = reference.answer([answer.prompt for answer in edits], REPLY)
    finally:
        reference.close()
    ties = 0
    for answer, (want, sure) in zip(edits, wanted, strict=True):
        assert answer.tokens[:sure] == want[:sure], (tokenizer.decode(answer.prompt), answer, want)
        ties += sure < REPLY
    assert ties <= 0.01 * len(edits) * REPLY
