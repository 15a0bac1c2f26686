"""vLLM engines inside a test's process, texts, and what vLLM alone answers to them."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams, envs

from agentcache.engine.wire import Recovery, ResumeParams

__all__ = [
    "BLOCK",
    "NEW",
    "OLD",
    "Answer",
    "Reference",
    "assert_exact",
    "differs",
    "edit",
    "engines_in_this_process",
    "lossy",
    "start_llm",
    "text",
]

BLOCK = 32
TIE = 1e-4
"""Two best log-probabilities that are closer may come out in either order after a different summation order."""
_set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it


def text(length: int, seed: int) -> list[int]:
    """Returns ordinary token ids that only this seed gives."""
    rng = random.Random(f"{seed}")
    return [rng.randrange(100, 49_000) for _ in range(length)]


def edit(ids: Sequence[int], at: int, remove: int, insert: Sequence[int]) -> list[int]:
    """Returns ids with `remove` tokens at `at` replaced."""
    return [*ids[:at], *insert, *ids[at + remove :]]


OLD = text(300, seed=1)
NEW = edit(OLD, 100, 10, text(20, seed=2))
"""P 100, X 20, S 190 tokens."""


def lossy(version: str, parent: str = "v1", policy: str = "edit_local", **more: Any) -> ResumeParams:
    """Returns the parameters of a resume that may be approximate; 32 tokens of S are recomputed by default."""
    return ResumeParams(version=version, parent=parent, policy=policy, **more)


@contextmanager
def engines_in_this_process() -> Iterator[None]:
    """Undoes afterwards what engines change in this process: its environment, torch's threads and their setter."""
    saved, threads = dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = _set_num_threads
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(saved)


def start_llm(model: Path, threads: int, **args: Any) -> LLM:
    """Returns a vLLM engine whose core, and with the `uni` executor its worker too, lives in this process."""
    _set_num_threads(threads)
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    # vLLM's worker looks at every name of every loaded module when it starts, and stumbles over a proxy of numba's, which a
    # worker process imports only later.
    proxy = sys.modules.pop("llvmlite.binding.ffi", None)
    os.environ[name] = "0"
    envs.disable_envs_cache()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
            return LLM(str(model), enforce_eager=True, **args)
    finally:
        if proxy is not None:
            sys.modules["llvmlite.binding.ffi"] = proxy
        # Engines of other tests in this process have processes of their own.
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
        envs.disable_envs_cache()


@dataclass
class Answer:
    """What came of one request."""

    request_id: str
    prompt: list[int]
    params: ResumeParams | dict[str, Any] | None
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    aborted: bool = False
    recovery: Recovery | None = None
    cached: int = 0

    @property
    def ids(self) -> list[int]:
        """The prompt and the reply."""
        return self.prompt + self.tokens


class Reference:
    """A stock engine without connector and without prefix cache; answers are kept."""

    def __init__(self, model: Path, *, blocks: int = 1024, executor: str = "mp", threads: int = 1, **args: Any) -> None:
        self.llm = start_llm(
            model,
            threads,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=False,
            distributed_executor_backend=executor,
            **{"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 64, "block_size": BLOCK} | args,
        )
        self._known: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def answer(self, prompts: Sequence[Sequence[int]], n: int) -> list[tuple[list[int], int]]:
        """Returns, for each prompt, `n` greedy tokens and how many come before the first near-tie."""
        keys = [(n, *prompt) for prompt in prompts]
        todo = list(dict.fromkeys(key for key in keys if key not in self._known))
        sampling = SamplingParams(temperature=0, max_tokens=n, logprobs=2, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": list(key[1:])} for key in todo], sampling, use_tqdm=False)
        for key, output in zip(todo, outputs, strict=True):
            (reply,) = output.outputs
            sure = 0
            for at in reply.logprobs:
                best, second = sorted((lp.logprob for lp in at.values()), reverse=True)[:2]
                if best - second < TIE:
                    break
                sure += 1
            self._known[key] = (list(reply.token_ids), sure)
        return [self._known[key] for key in keys]


def assert_exact(reference: Reference, *answers: Answer) -> None:
    """Asserts that requests got the greedy tokens of a full prefill, up to the reference's first near-tie."""
    for answer in answers:
        ((want, sure),) = reference.answer([answer.prompt], len(answer.tokens))
        assert answer.tokens[:sure] == want[:sure], (answer, want)


def differs(reference: Reference, answer: Answer) -> bool:
    """Whether an answer is not that of a full prefill."""
    ((want, sure),) = reference.answer([answer.prompt], len(answer.tokens))
    return answer.tokens[:sure] != want[:sure]
