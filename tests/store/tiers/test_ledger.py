"""Bookkeeping against a naive count."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.store.tiers import ObjectEntry, Part, Refused
from agentcache.store.tiers.ledger import Holder, Ledger

ENTRIES = [ObjectEntry(f"{n:032x}", 4, 0, True, ("exact", "k8v4")[n % 2], (Part(10 + n, "0" * 16),)) for n in range(8)]

QUIET = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])

HOLDERS = st.lists(
    st.tuples(st.sets(st.sampled_from(range(8)), max_size=5), st.integers(0, 30), st.integers(0, 20), st.booleans()),
    max_size=9,
)


def build(rows: list[tuple[set[int], int, int, bool]], policy: str = "lru") -> Ledger:
    ledger = Ledger(policy)
    for number, (objects, own, score, pinned) in enumerate(rows):
        keys = tuple(ENTRIES[n].key for n in sorted(objects))
        holder = Holder(f"h{number}", "red", own, keys, number, score, pins=int(pinned))
        ledger.add(holder, [ENTRIES[n] for n in sorted(objects)])
    return ledger


def used(holders: list[Holder]) -> int:
    keys = {key for holder in holders for key in holder.keys}
    return sum(h.own_bytes for h in holders) + sum(e.size_bytes for e in ENTRIES if e.key in keys)


@QUIET
@given(HOLDERS, st.integers(0, 200), st.integers(0, 400), st.sampled_from(["lru", "fifo"]))
def test_victims_are_the_fewest_in_order_and_pinned_ones_never(
    rows: list[tuple[set[int], int, int, bool]], needed: int, budget: int, policy: str
) -> None:
    ledger = build(rows, policy)
    ledger.check_integrity()
    everyone = [*ledger.holders.values()]
    assert ledger.used_bytes == used(everyone)
    pinned = [holder for holder in everyone if holder.pins]
    made = ledger.victims(needed, budget)
    assert isinstance(made, Refused) == (used(pinned) + needed > budget)
    if isinstance(made, Refused):
        return
    order = [h for h in everyone if not h.pins]
    order.sort(key=lambda h: (h.score, h.sequence) if policy == "lru" else (h.sequence,))
    assert made == order[: len(made)]
    assert used([h for h in everyone if h not in made]) + needed <= budget
    assert not made or used([h for h in everyone if h not in made[:-1]]) + needed > budget
    for victim in made:
        ledger.remove(victim.name)
        ledger.check_integrity()
    assert ledger.used_bytes + needed <= budget


@QUIET
@given(HOLDERS, st.data())
def test_a_score_that_others_have_raised_is_seen(
    rows: list[tuple[set[int], int, int, bool]], data: st.DataObject
) -> None:
    ledger = build(rows)
    latest = {name: data.draw(st.integers(0, 40)) for name in ledger.holders}
    free = [h for h in ledger.holders.values() if not h.pins]
    made = ledger.victims(0, ledger.pinned_bytes, lambda holder: max(holder.score, latest[holder.name]))
    assert not isinstance(made, Refused)
    scores = [holder.score for holder in made]
    assert scores == sorted(scores)
    assert {h.name for h in made} <= {h.name for h in free}


@QUIET
@given(HOLDERS)
def test_removing_gives_back_exactly_what_nobody_else_keeps(rows: list[tuple[set[int], int, int, bool]]) -> None:
    ledger = build(rows)
    while ledger.holders:
        name = next(iter(ledger.holders))
        mine = set(ledger.holders[name].keys)
        others = {key for other, holder in ledger.holders.items() if other != name for key in holder.keys}
        assert {entry.key for entry in ledger.remove(name)} == mine - others
        ledger.check_integrity()
    assert (ledger.used_bytes, ledger.pinned_bytes, ledger.records, dict(ledger.bytes_by_tag)) == (0, 0, {}, {})
