"""`agentcache doctor`: what works here and what does not, each with its reason."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from agentcache.bench_resume import make_edit, sample_ids
from agentcache.environment import versions
from agentcache.errors import AgentCacheError

__all__ = ["run_doctor"]

_CONTEXT = 1200
# Relative to the largest value. In 16 bits a rounding step is 2^-8, and 30 layers of them add up.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}
_BROKEN_TOGETHER = ("torchvision", "torchaudio", "torchcodec")


@dataclass(slots=True)
class _Findings:
    console: Console
    ok: bool = True

    def good(self, text: str) -> None:
        self.console.print(f"[green]✓[/] {text}", highlight=False)

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]•[/] {text}", highlight=False)

    def bad(self, text: str) -> None:
        self.ok = False
        self.console.print(f"[red]✗[/] {text}", highlight=False)


@contextmanager
def _step(findings: _Findings, what: str) -> Iterator[None]:
    """Turns an error that agentcache raises on purpose into a finding."""
    try:
        yield
    except AgentCacheError as error:
        findings.bad(f"{what}: {error}")


def run_doctor(model: str, gpu: bool, console: Console) -> bool:
    """Checks the installation and a model, prints the findings; returns whether everything works.

    Args:
        model: A folder, a hub id, or the built-in model.
        gpu: Whether a CUDA device is expected: without one this is a finding.
        console: Where to print.
    """
    findings = _Findings(console)
    if not _packages(findings, gpu):
        return False
    with _step(findings, model):
        _engine(findings, model, gpu)
    console.print(
        "[bold green]everything works[/]" if findings.ok else "[bold red]something does not work, see above[/]"
    )
    return findings.ok


def _packages(findings: _Findings, gpu: bool) -> bool:
    """Returns whether an engine can be started at all."""
    findings.good(", ".join(f"{name} {version}" for name, version in versions().items()))
    for name in ("torch", "transformers", "vllm"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            findings.bad(f"{name} cannot be imported: {error}. Install agentcache-kv[cpu] or agentcache-kv[gpu].")
            return False
    for name in _BROKEN_TOGETHER:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            findings.bad(
                f"{name} is installed and cannot be imported ({reason}); run `pip uninstall {name}`: it breaks others"
            )
    import torch

    if gpu and not torch.cuda.is_available():
        findings.bad("--gpu was given and torch sees no CUDA device")
        return False
    if gpu:
        findings.good(f"GPU: {torch.cuda.get_device_name()}, compute capability {torch.cuda.get_device_capability()}")
    return True


def _engine(findings: _Findings, model: str, gpu: bool) -> None:
    from agentcache.cache import AgentCache

    started = time.perf_counter()
    with AgentCache(model, max_model_len=4096) as cache:
        findings.good(f"{model} runs in an embedded vLLM (started in {time.perf_counter() - started:.0f} s)")
        engine: dict[str, Any] = cache.stats()["engine"]
        findings.good(
            f"attention: {engine['backend']}{' ' + engine['isa'] if engine.get('isa') else ''}, {engine['layers']} layers of "
            f"{engine['kv_heads']} KV heads × {engine['head_dim']}, {engine['dtype']}, {engine['block_size']} tokens a block; "
            f"page layout learned (keys {engine['key_layout']}, values {engine['value_layout']})"
        )
        findings.good(
            f"rotary: {engine['rotary']}; rotate(rotate(k, p), d) = rotate(k, p + d) holds on the model's own module"
        )
        if gpu and "CPU" in str(engine["backend"]):
            findings.bad("--gpu was given and the engine runs on the CPU: install agentcache-kv[gpu]")
        edit = make_edit(sample_ids(cache.tokenizer.encode), _CONTEXT, 0.4)
        prefix = next(i for i, (a, b) in enumerate(zip(edit.old, edit.new, strict=False)) if a != b)
        suffix = next(i for i, (a, b) in enumerate(zip(edit.old[::-1], edit.new[::-1], strict=False)) if a != b)
        errors = cache.check_recovery(edit.old, edit.new, prefix, suffix)
        limit = _TOLERANCE[engine["dtype"]]
        for name, text in (
            ("kv", "a suffix recomputed in segments has the K/V of a full prefill"),
            ("logits", "and its next-token logits"),
            ("moved_keys", "restored and rotated keys are those of their new position"),
        ):
            say = findings.good if errors[name] <= limit else findings.bad
            say(f"{text} (relative error {errors[name]:.1e}, allowed {limit:.0e})")
        findings.note(
            f"an unrepaired suffix would be off by {errors['stale_kv']:.1e} in K/V, {errors['stale_logits']:.1e} in logits"
        )
        episode = cache.episode("doctor")
        parent = episode.generate(edit.old, max_tokens=1).version
        exact = cache.generate(edit.new, max_tokens=8).token_ids
        cache.reset_prefix_cache()
        for policy in ("prefix_cache", "edit_local"):
            reply = episode.generate(edit.new, max_tokens=8, policy=policy, parent=parent, save=False)
            recovery = reply.recovery
            assert recovery is not None
            recovered = recovery.reason is None and (policy == "prefix_cache" or recovery.reused_tokens > 0)
            (findings.good if recovered else findings.bad)(f"{recovery}")
            if policy == "prefix_cache" and reply.token_ids != exact:
                findings.bad(f"the exact policy's reply {reply.token_ids} is not that of vLLM alone {exact}")
