from __future__ import annotations

import pytest

from agentcache.profiling.edits import Edit
from agentcache.profiling.measure import Pair, Wanted, pair_key, pairs_of, training_pair


def edit(name: str, old: str, new: str) -> Edit:
    return Edit(
        name, "replace", f"task {name}", "set", ({"role": "user", "content": old},), ({"role": "user", "content": new},)
    )


def render(messages: tuple[dict[str, str], ...]) -> list[int]:
    return [ord(letter) for message in messages for letter in message["content"]]


BEHIND = "".join(chr(200 + at % 5000) for at in range(150))


def test_pairs_are_ids_of_both_revisions() -> None:
    (pair,) = pairs_of([edit("e", f"aXb{BEHIND}", f"aYYYb{BEHIND}")], render, max_tokens=200)
    assert (pair.id, pair.task, pair.dataset) == ("e", "task e", "set")
    assert pair.old == [ord(c) for c in f"aXb{BEHIND}"] and len(pair.new) == len(pair.old) + 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (f"aXb{BEHIND}", f"a{'Y' * 60}b{BEHIND}", "the new revision is too long"),
        (f"a{'Y' * 60}b{BEHIND}", f"aXb{BEHIND}", "the old revision is too long"),
        (f"aX{BEHIND[:100]}", f"aY{BEHIND[:100]}", "too little stands behind the edit"),
        (f"a{BEHIND}X", f"a{BEHIND}Y", "nothing stands behind the edit"),
        (f"aXb{BEHIND}", f"aXb{BEHIND}", "nothing has changed"),
    ],
)
def test_what_cannot_be_measured_is_left_out(old: str, new: str, why: str) -> None:
    assert list(pairs_of([edit("e", old, new)], render, max_tokens=200)) == [], why


def test_a_measurement_is_named_by_all_that_it_depends_on() -> None:
    pair = Pair("e", "set", "task", [1, 2], [1, 3])
    wanted = Wanted(arms=(("patchkv", {"kappa": 0.1, "block": 16}),))
    other_order = Wanted(arms=(("patchkv", {"block": 16, "kappa": 0.1}),))
    assert pair_key("m", pair, wanted) == pair_key("m", Pair("another id", "s", "t", [1, 2], [1, 3]), other_order)
    different = [
        pair_key("m", pair, Wanted()),
        pair_key("n", pair, wanted),
        pair_key("m", Pair("e", "set", "task", [1, 2], [1, 4]), wanted),
        pair_key("m", Pair("e", "set", "task", [1, 2, 1], [3]), wanted),
    ]
    assert len({pair_key("m", pair, wanted), *different}) == 5


def test_the_length_model_is_fitted_to_the_last_run() -> None:
    last = {"prefix": 10, "middle": 4, "suffix": 40, "deviation": [0.2, 0.1]}
    pair = training_pair({"last": last})
    assert (pair.prefix, pair.middle, pair.suffix, pair.deviation) == (10, 4, 40, (0.2, 0.1))
