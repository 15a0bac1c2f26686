"""Two chunks, prompts that draw on them, and where their rows stand in such a prompt."""

from __future__ import annotations

import torch

from agentcache.engine.wire import ResumeParams
from tests.engine.harness import Answer, Engine, text

__all__ = [
    "JOIN",
    "PROMPT",
    "QUESTION",
    "STOP",
    "SYSTEM",
    "A",
    "B",
    "chunks",
    "drawing",
    "encode",
    "pages",
    "turned",
]

A, B = text(100, seed=31), text(120, seed=32)
SYSTEM, JOIN, QUESTION = text(40, seed=33), text(9, seed=34), text(15, seed=35)
PROMPT = [*SYSTEM, *B[1:], *JOIN, *A, *QUESTION]
"""B from 40 on, without its first token, A from 168 on, the question from 268 on."""
STOP = 268


def encode(engine: Engine, name: str, ids: list[int], **more: object) -> None:
    """Saves a chunk as `encode_chunk` does."""
    answer = engine.ask(ids, ResumeParams(version=name, **more), n=1)
    assert answer.recovery.saved == "pending"


def chunks(engine: Engine) -> None:
    """Saves both chunks, and leaves no block of them in vLLM's own cache."""
    encode(engine, "a", A)
    encode(engine, "b", B)
    engine.forget_local()


def drawing(version: str, policy: str = "direct_reuse", **more: object) -> ResumeParams:
    """Returns the parameters of a request without parent that names both chunks."""
    return ResumeParams(**{"version": version, "policy": policy, "sources": ["a", "b"]} | more)


@torch.inference_mode()
def pages(engine: Engine, answer: Answer, stop: int) -> torch.Tensor:
    """Returns a running request's rows `[L, 2, T, H, D]` once its first token is there."""
    while not answer.tokens:
        engine.step()
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(answer.request_id)
    return engine.runtime.rows(torch.tensor(blocks), 0, stop).clone()


def turned(engine: Engine, rows: torch.Tensor, shift: int) -> torch.Tensor:
    """Returns rows whose keys stand `shift` positions further on: the rotary embedding by its definition, in float64."""
    config = engine.llm.llm_engine.vllm_config.model_config.hf_config
    theta = config.rope_parameters["rope_theta"]
    half = rows.shape[-1] // 2
    angle = shift * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    plane = torch.complex(rows[:, 0, ..., :half].double(), rows[:, 0, ..., half:].double())
    plane = plane * torch.polar(torch.ones_like(angle), angle)
    out = rows.clone()
    out[:, 0] = torch.cat((plane.real, plane.imag), dim=-1).to(rows.dtype)
    return out
