"""Every supported model form recovers its KV; every other one is refused with its reasons."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from agentcache.engine.support import check_config
from agentcache.engine.wire import ResumeParams
from agentcache.errors import UnsupportedModelError
from tests.engine.harness import BLOCK, NEW, OLD, Engine, edit, first_version, lossy, text
from tests.models import REFUSED, SUPPORTED

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
SHORTER = edit(OLD, 100, 40, text(7, seed=3))


@pytest.fixture(scope="module", params=SUPPORTED)
def kind(request):
    """All tests of one form run before the next one's: the scope is what orders them."""
    return request.param


@pytest.fixture
def form(kind, start_engine, tiny):
    engine = start_engine(tiny(kind))
    yield engine
    engine.drain()
    engine.check()


@pytest.mark.parametrize(("new", "suffix"), [(NEW, 190), (SHORTER, 160)], ids=["longer", "shorter"])
def test_rows_recomputed_in_runs_equal_a_full_prefill_and_stale_ones_do_not(form, new, suffix):
    (found,) = form.llm.collective_rpc("agentcache_check", args=(OLD, new, 100, suffix))
    assert found["kv"] <= TOLERANCE, found
    assert found["logits"] <= TOLERANCE, found
    assert found["moved_keys"] <= TOLERANCE, found
    assert found["stale_kv"] >= 100 * TOLERANCE, found
    assert found["stale_logits"] >= 100 * TOLERANCE, found


def test_a_segment_forward_computes_what_vllm_computes(form):
    form.ask(OLD)
    blocks, error = form.audit(OLD)
    assert blocks == len(OLD) // BLOCK
    assert error <= TOLERANCE


def test_the_exact_policy_gives_the_tokens_of_a_plain_request(form):
    plain = {name: form.ask(ids).tokens for name, ids in (("old", OLD), ("new", NEW))}
    form.forget_local()
    parent = first_version(form)
    form.forget_local()
    child = form.ask(NEW, ResumeParams(version="v2", parent="v1"))
    assert child.recovery.restored_tokens == 100
    assert child.recovery.exact
    assert (parent.tokens, child.tokens) == (plain["old"], plain["new"])


def test_an_approximate_version_leaves_plain_requests_exact(form):
    plain = form.ask(NEW).tokens
    form.forget_local()
    first_version(form)
    reused = form.ask(NEW, lossy("v2", policy="direct_reuse"))
    edited = form.ask(NEW, lossy("v3"))
    assert reused.recovery.reused_tokens == 189
    assert edited.recovery.reused_tokens == 157
    assert reused.tokens != plain
    again = form.ask(NEW)
    assert again.tokens == plain
    assert again.cached == 128
    assert form.audit(NEW)[1] <= TOLERANCE


# -- refusals ----------------------------------------------------------------------------------------------------------


def config(model, **args):
    """Returns the configuration of an engine that is not started."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        str(model), enforce_eager=True, max_model_len=256, block_size=BLOCK, **args
    ).create_engine_config()


OURS = {
    "kv_connector": "AgentCacheConnector",
    "kv_connector_module_path": "agentcache.engine.connector",
    "kv_role": "kv_both",
}
REASONS = {"gemma3": "sliding-window", "deepseek_mla": "latent attention", "qwen2_mrope": "M-RoPE"}


@pytest.mark.parametrize("name", REFUSED)
def test_other_model_forms_are_refused(tiny, name):
    reasons = check_config(config(tiny(name)))
    assert any(REASONS[name] in reason for reason in reasons), reasons


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_model_forms_are_not(tiny, name):
    assert check_config(config(tiny(name))) == []


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "quantised (fp8"),
        ({"enable_lora": True}, "LoRA"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"runner": "pooling"}, "'pooling'"),
        ({"kv_transfer_config": OURS | {"kv_load_failure_policy": "fail"}}, "kv_load_failure_policy"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "connectors": [OURS, {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}]
                    },
                }
            },
            "keys KV by token ids",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_break_recovery_are_refused(tiny, args, reason):
    reasons = check_config(config(tiny("llama"), **args))
    assert any(reason in found for found in reasons), reasons


def test_a_refused_model_ends_the_start_with_all_reasons(start_engine, tiny):
    from vllm.distributed import cleanup_dist_env_and_memory

    start_engine.stop()
    with pytest.raises(UnsupportedModelError, match="sliding-window") as caught:
        Engine(tiny("gemma3"))
    cleanup_dist_env_and_memory()
    assert len(caught.value.reasons) >= 1
    assert "decoder-only model with full attention" in str(caught.value)
