"""`agentcache eval qa` from the command line: in full on a small size, and what it refuses before anything starts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from agentcache.cli import app
from agentcache.config import CacheConfig
from agentcache.errors import ConfigError
from agentcache.evaluation import qa as measured
from agentcache.evaluation.cli_qa import ABLATIONS, POLICIES, Ablation
from agentcache.evaluation.qa import arms_of
from agentcache.evaluation.qa_cells import AGAIN, ALL, BASE
from agentcache.recovery import get_policy
from agentcache.recovery.spec import parse_policy

CELL = {
    "model", "dataset", "edit", "policy", "n", "f1", "f1_ci", "em", "rouge1", "bleu1", "ttft_ms", "recompute_ratio", "speedup",
    "f1_diff", "f1_diff_ci",
}  # fmt: skip


def call(*words: str):
    return CliRunner().invoke(app, ["eval", "qa", *words])


SHORT = [
    (
        "Who keeps the key?",
        "Ada Berg",
        ["The key of the mill is kept by the baker.", "The baker of the mill is Ada Berg, born in Lund."],
    ),
    (
        "Where does the ferry land?",
        "Vik",
        ["The ferry leaves from the old pier at noon.", "From the old pier all boats go to Vik."],
    ),
    (
        "What is the price?",
        "12 crowns",
        ["The ticket is of the second class on Sundays.", "Tickets of the second class cost 12 crowns."],
    ),
]
"""Questions so short that a slow machine measures them in seconds."""

OTHERS = [
    "The garden behind the church has apple trees, and nobody has counted them since the war.",
    "In the harbour there are nine boats, three of which are painted green every spring.",
    "The school opens at eight, except on days when the river is over the road.",
]

ARMS = "prefix_cache,edit_local:k=8,edit_local:k=8@k8v4"


@pytest.fixture(scope="module")
def quick(tmp_path_factory, smollm2_path):
    """A quick run's folder."""
    folder = tmp_path_factory.mktemp("qa")
    rows = [
        {"task": at, "question": question, "answers": [answer], "documents": [*gold, OTHERS[at]], "gold": [1, 2]}
        for at, (question, answer, gold) in enumerate(SHORT)
    ]
    (folder / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = measure(folder)
    assert result.exit_code == 0, result.output
    return folder


def measure(folder, policies=ARMS):
    data, out = str(folder / "short.jsonl"), str(folder / "qa.json")
    return call("--quick", "--items", "2", "--context", "96", "--policies", policies, "--data", data, "--out", out)


@pytest.fixture(scope="module")
def found(quick):
    return json.loads((quick / "qa.json").read_text())


def pooled(found):
    return {cell["policy"]: cell for cell in found["cells"] if cell["dataset"] == cell["edit"] == ALL}


@pytest.mark.engine
def test_the_cells_have_what_a_table_needs(found):
    assert all(set(cell) >= CELL for cell in found["cells"])
    assert {*pooled(found)} == {*ARMS.split(","), AGAIN}
    assert {cell["n"] for cell in pooled(found).values()} == {2}
    assert {cell["edit"] for cell in found["cells"]} == {ALL, "replace", "update"}


@pytest.mark.engine
def test_the_exact_arm_recomputes_all_and_the_others_less(found):
    cells = pooled(found)
    assert (cells[BASE]["recompute_ratio"], cells[BASE]["f1_diff"], cells[BASE]["speedup"]) == (1, 0, 1)
    _, exact, coarse = ARMS.split(",")
    assert 0 < cells[exact]["recompute_ratio"] < 1
    assert cells[exact]["ran_exact"] == 0
    # The old chat was stored twice, in each of both ways.
    assert [cells[name]["stored"] for name in (exact, coarse)] == [{"exact": 1}, {"k8v4": 1}]


@pytest.mark.engine
def test_the_result_says_how_it_was_made(found):
    origin = found["provenance"]
    [data] = origin["data"]
    assert (data["name"], data["count"], len(data["hash"])) == ("short", 2, 32)
    assert origin["model"]["dtype"] in ("bfloat16", "float32")
    assert origin["model"]["name"] and origin["model"]["hash"] and origin["versions"] and origin["hardware"]
    # A quick run may measure tasks of the calibration: it shows that it works, and is no result.
    assert found["is_result"] is False
    assert found["policies"][ARMS.split(",")[2]]["precision"] == "k8v4"
    assert len(found["per_item"]["f1"][AGAIN]) == 2


@pytest.mark.engine
def test_a_second_run_measures_nothing_and_finds_the_same(quick, found, monkeypatch):
    def no_engine(**_):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(measured, "AgentCache", no_engine)
    lines = (quick / "qa.json.work.jsonl").read_text()
    result = measure(quick)
    assert result.exit_code == 0, result.output
    assert (quick / "qa.json.work.jsonl").read_text() == lines
    again = json.loads((quick / "qa.json").read_text())
    assert again["cells"] == found["cells"]
    assert "| edit_local:k=8@k8v4 |" in (quick / "qa.md").read_text()


@pytest.mark.engine
def test_other_arms_are_measured_again(quick, monkeypatch):
    def engine(**_):
        raise ConfigError("an engine is wanted")

    monkeypatch.setattr(measured, "AgentCache", engine)
    result = measure(quick, "edit_local:k=9")
    assert "an engine is wanted" in str(result.exception)


def test_every_default_arm_and_every_ablation_is_allowed():
    config = CacheConfig.build(model="smollm2")  # whose profile ships
    specs = [*POLICIES.split(","), *ABLATIONS[Ablation.attention], *ABLATIONS[Ablation.block]]
    specs += [f"patchkv@{precision}" for precision in ABLATIONS[Ablation.precision]]
    assert [arm.name for arm in arms_of(specs, config)] == list(dict.fromkeys(specs))
    assert arms_of(["patchkv@mixed"], config)[1].precision == "mixed"
    assert arms_of(["patchkv:kappa=0"], config)[1].options["kappa"] == 0
    assert not get_policy(*parse_policy("epic:k=128")).exact


@pytest.mark.parametrize(
    ("policy", "message"),
    [("edit_local@k9", "'k9' is unknown; take one of exact"), ("edit_locl", "edit_locl"), ("edit_local:kk=3", "kk")],
)
def test_unknown_arms_are_refused(policy, message):
    with pytest.raises(ConfigError, match=message):
        arms_of([policy], CacheConfig.build(model="smollm2"))


def test_the_command_says_what_is_measured(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(measured, "run", lambda settings, _: asked.append(settings))
    out = str(tmp_path / "qa.json")
    assert call("--out", out, "--data", "a", "--data", "b", "--edits", "update,clear", "--no-noise").exit_code == 0
    assert call("--out", out, "--ablation", "precision", "--policies", "attended,epic").exit_code == 0
    assert call("--out", out, "--ablation", "attention", "--quick").exit_code == 0
    plain, precision, attention = asked
    assert (plain.data, plain.kinds, plain.noise, plain.items, plain.overlap) == (
        ("a", "b"),
        ("update", "clear"),
        False,
        150,
        False,
    )
    assert plain.policies == tuple(POLICIES.split(","))
    assert precision.policies[:2] == ("attended", "attended@mixed") and "epic@k8v4" in precision.policies
    assert attention.policies == ABLATIONS[Ablation.attention]
    assert (attention.items, attention.overlap) == (4, True)


def test_a_result_may_not_be_of_the_calibrations_tasks(tmp_path):
    # SmolLM2's profile was made of other HotpotQA files too, which are not at hand.
    result = call("--items", "4", "--out", str(tmp_path / "qa.json"))
    assert isinstance(result.exception, ConfigError)
    assert "name its file with --calibrated-on" in str(result.exception)


def test_what_calibration_takes_away_is_said_where_too_little_is_left():
    settings = SimpleNamespace(items=4, seed=0, context=800, kinds=("replace",))
    with pytest.raises(ConfigError, match=r"0 questions can be asked, 4 are wanted .* 12 questions are left out"):
        measured._items(settings, [], 12)


def test_an_item_that_is_too_long_is_named():
    cache = SimpleNamespace(
        config=SimpleNamespace(max_model_len=20),
        stats=lambda: {"engine": {"dtype": "float32"}},
        render=lambda _: SimpleNamespace(token_ids=SimpleNamespace(tolist=lambda: list(range(10)))),
    )
    settings = SimpleNamespace(max_tokens=16, context=8)
    measurement = measured._Measurement(cache, [], settings)
    with pytest.raises(ConfigError, match=r"'t' has 10 tokens .*, 4 fit"):
        measurement._ids(SimpleNamespace(new=(), task="t"))
