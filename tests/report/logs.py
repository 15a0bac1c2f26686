"""A small event log: a first version, an edit, a new turn, a fork, and a version that no reply came for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentcache.engine.wire import Recovery
from agentcache.events import Event, KVPaused, KVResumed, PromptRevised, QualityChecked, ReplyEnded
from agentcache.types import AlignedRun, PromptDiff, RevisionKind

T0 = 1_700_000_000.0


def words(start: int, count: int) -> tuple[str, ...]:
    """Returns the texts of tokens: each tells where it was written."""
    return tuple(f" w{i}" for i in range(start, start + count))


def revised(
    version: str,
    parent: str | None,
    new_len: int,
    aligned: Sequence[tuple[int, int, int]] = (),
    *,
    old_len: int = 0,
    kind: RevisionKind = RevisionKind.TOOL_RESULT,
    episode: str = "thread-1",
    time_s: float = T0,
    labels: tuple[str, ...] = ("system", "tool:call_1"),
) -> PromptRevised:
    runs = tuple(AlignedRun(*run) for run in aligned)
    return PromptRevised(
        episode=episode,
        version=version,
        parent=parent,
        kind=kind,
        prefix=PromptDiff(old_len, new_len, runs).prefix,
        aligned=runs,
        old_len=old_len,
        new_len=new_len,
        labels=labels,
        diff_ms=0.5,
        time_s=time_s,
    )


def ended(version: str, *, episode: str = "thread-1", time_s: float = T0 + 1, **more: Any) -> ReplyEnded:
    recovery = more.pop("recovery", {})
    return ReplyEnded(
        episode=episode,
        version=version,
        finish_reason="stop",
        reply_tokens=3,
        recovery=Recovery(version=version, **recovery).model_dump(mode="json"),
        time_s=time_s,
        **more,
    )


FIRST = {"prompt_tokens": 200, "new_tokens": 200, "ttft_ms": 400.0, "rows": "N*200", "saved": "pending"}
EDIT = {
    "parent": "v1",
    "policy": "edit_local",
    "requested_policy": "edit_local",
    "exact": False,
    "prompt_tokens": 206,
    "prefix_tokens": 40,
    "fresh_tokens": 10,
    "repair_tokens": 32,
    "reused_tokens": 121,
    "new_tokens": 3,
    "suffix_tokens": 153,
    "restored_tokens": 161,
    "restored_bytes": 161_000,
    "recomputed_tokens": 42,
    "diff_ms": 0.5,
    "plan_ms": 0.75,
    "restore_ms": 4.0,
    "recompute_ms": 20.0,
    "ttft_ms": 60.0,
    "saved": "pending",
    "rows": "P*40 X*10 R*32 F*121 N*3",
    "precisions": "exact*40 -*42 exact*57 k8v8*64 -*3",
}
TURN = {
    "parent": "v2",
    "prompt_tokens": 250,
    "prefix_tokens": 208,
    "new_tokens": 42,
    "restored_tokens": 208,
    "ttft_ms": 90.0,
    "rows": "P*208 N*42",
}
FORK = {
    "parent": "v1",
    "policy": "edit_local",
    "requested_policy": "edit_local",
    "exact": False,
    "prompt_tokens": 190,
    "prefix_tokens": 100,
    "reused_tokens": 60,
    "repair_tokens": 20,
    "new_tokens": 10,
    "restored_tokens": 160,
    "ttft_ms": 50.0,
    "rows": "P*100 R*20 F*60 N*10",
    "reason": "parent <script>alert(1)</script> & more",
}


def events(*, text: bool = True) -> list[Event]:
    """Returns the log. Prompt v1 is w0 to w199, its reply w900 to w902; v2 replaces w40 to w49 by w1000 to w1009."""

    def texts(fresh: tuple[str, ...]) -> dict[str, Any]:
        return {"fresh_text": fresh, "reply_text": words(900, 3)} if text else {}

    spans = ((0, 40), (40, 200))
    return [
        revised("v1", None, 200, kind=RevisionKind.FIRST),
        ended("v1", recovery=FIRST, spans=spans, **texts(words(0, 200))),
        KVPaused(episode="thread-1", key="v1", version="v1", reason="the reply ended", time_s=T0 + 1),
        KVPaused(episode="thread-1", key="call_1", version="v1", reason="a search", time_s=T0 + 1),
        KVResumed(episode="thread-1", key="call_1", time_s=T0 + 5),
        revised("v2", "v1", 206, [(0, 0, 40), (49, 50, 153)], old_len=202, time_s=T0 + 8),
        ended(
            "v2", recovery=EDIT, spans=((0, 40), (40, 206)), time_s=T0 + 9, **texts((*words(1000, 10), *words(2000, 3)))
        ),
        KVResumed(episode="thread-1", version="v2", recovery=Recovery(**EDIT).model_dump(mode="json"), time_s=T0 + 9),
        QualityChecked(
            episode="thread-1",
            version="v2",
            policy="edit_local",
            kl=0.5,
            top1_agrees=False,
            agreement=0.5,
            strike=True,
            time_s=T0 + 9,
        ),
        revised("f1", "v1", 190, [(0, 0, 100), (120, 100, 80)], old_len=202, episode="fork/2", time_s=T0 + 10),
        ended("f1", episode="fork/2", recovery=FORK, time_s=T0 + 11, **texts(words(3000, 10))),
        revised("v3", "v2", 250, [(0, 0, 208)], old_len=208, kind=RevisionKind.APPEND, time_s=T0 + 12),
        ended("v3", recovery=TURN, time_s=T0 + 13, **texts(words(4000, 42))),
        revised("v4", "v3", 240, [(0, 0, 50), (70, 60, 170)], old_len=252, kind=RevisionKind.MEMORY, time_s=T0 + 14),
        revised("a1", None, 64, kind=RevisionKind.FIRST, episode="other", time_s=T0 + 20),
        ended(
            "a1", episode="other", recovery={"prompt_tokens": 64, "new_tokens": 64, "ttft_ms": 128.0}, time_s=T0 + 21
        ),
    ]
