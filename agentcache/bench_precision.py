"""`agentcache bench precision`: what each precision loses of a model's real KV, tensor by tensor, and of its next token.

A real prompt is saved by the engine once for each precision while vLLM holds its rows; the stored rows are unpacked and compared
with the exact ones: `‖x − x̂‖ / ‖x‖` of the keys and of the values of each layer. The effect is the KL of the next token after a
restore, as in `bench store`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agentcache.bench_resume import sample_ids
from agentcache.bench_store_payload import measure_kl, prompts
from agentcache.bench_store_timing import KV_BYTES, wait_until_stored
from agentcache.cache import AgentCache
from agentcache.config import Precision
from agentcache.environment import hardware, versions
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.kernels import PackedFormat, Tag
from agentcache.kernels.reference import unpack
from agentcache.samples import load_hotpot_sample
from agentcache.store.payloads import decode_payload
from agentcache.store.tiers import KVStore, Lost, Manifest, open_store

__all__ = ["relative_errors", "run", "stored_rows"]

TAGS: Final[tuple[Precision, ...]] = ("k8v8", "k8v4")
_LONGEST_CHAT = 3072  # tokens of a shipped question with all its documents, roomily

Rows = dict[str, torch.Tensor]


def stored_rows(store: KVStore, namespace: str, version: str, *, heads: int, head_dim: int, layers: int) -> Rows:
    """Returns a stored version's rows, float32 `{"keys", "values": [L, H, T, D]}`; rank 0's, of a 16-bit model.

    Raises:
        AgentCacheError: It, or a payload of it, is not there.
    """
    manifest = store.find(namespace, version)
    if not isinstance(manifest, Manifest):
        raise AgentCacheError(f"the checkpoint {version!r} was not stored: {manifest}")
    blobs = store.fetch([entry.key for entry in manifest.objects], 0)
    keys, values = [], []
    for extent in manifest.extents:
        blob = blobs[extent.key]
        if isinstance(blob, Lost):
            raise AgentCacheError(f"object {extent.key} of checkpoint {version!r} is lost: {blob.reason}")
        for run in decode_payload(blob, verify=False).runs:
            form = PackedFormat(Tag(run.tag), layers, heads, head_dim, 2)
            k, v = unpack(run.data, form, run.tokens, torch.bfloat16)
            keys.append(k.float())
            values.append(v.float())
    return {"keys": torch.cat(keys, 2), "values": torch.cat(values, 2)}


def relative_errors(exact: Rows, lossy: Rows, rows: int) -> dict[str, dict[str, float]]:
    """Returns `‖x − x̂‖ / ‖x‖` of the first `rows` rows of keys and of values: the mean over layers, and the worst layer's."""
    out = {}
    for tensor, want in exact.items():
        flat = want[:, :, :rows].flatten(1)
        error = (flat - lossy[tensor][:, :, :rows].flatten(1)).norm(dim=1) / flat.norm(dim=1)
        out[tensor] = {"mean": float(error.mean()), "worst_layer": float(error.max())}
    return out


def run(*, model: str, tokens: int, chats: int, json_path: Path | None, console: Console) -> dict[str, Any]:
    """Measures and prints both, writes JSON when a path is given; returns what the JSON holds.

    Args:
        model: A folder, a hub id, or the name of a built-in model.
        tokens: Of the prompt whose rows are compared.
        chats: Prompts whose next tokens are compared.
        json_path: File to write.
        console: Where it is printed.

    Raises:
        ConfigError: The shipped text is shorter than `tokens`.
    """
    with tempfile.TemporaryDirectory(prefix="agentcache-bench-") as work:
        url = f"disk://{work}/store?bytes=8GiB"
        longest = max(tokens, _LONGEST_CHAT) + 64
        with AgentCache(model, store=url, max_model_len=longest, kv_bytes=KV_BYTES) as cache:
            text = sample_ids(cache.tokenizer.encode)
            if len(text) < tokens:
                raise ConfigError(f"--tokens {tokens} are too many: the shipped text has {len(text)}; give fewer")
            errors = _errors(cache, url, text[:tokens])
            ids = [cache.render(chat).token_ids.tolist() for chat in prompts(load_hotpot_sample(), chats)]
            rounds = track(ids, "prompts", console=console, transient=True)
            kl = _merged([measure_kl(cache, [each]) for each in rounds])
    result = {
        "model": model,
        "data": "HotpotQA sample shipped with agentcache (CC BY-SA 4.0)",
        "tokens": tokens,
        "prompts": chats,
        "rows": [{"precision": tag, "error": errors[tag], "kl": kl[tag]} for tag in TAGS],
        "kl_exact": kl["exact"],
        "versions": versions(),
        "hardware": hardware(),
    }
    _print(result, console)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"wrote {json_path}")
    return result


def _errors(cache: AgentCache, url: str, ids: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    engine = cache.stats()["engine"]
    shape = {"heads": engine["kv_heads"], "head_dim": engine["head_dim"], "layers": engine["layers"]}
    # All saves but the first compute the last, partial block anew, in another batch.
    rows = len(ids) // engine["block_size"] * engine["block_size"] - engine["block_size"]
    found: dict[str, Rows] = {}
    arms: tuple[Precision, ...] = ("exact", *TAGS)
    with open_store(url) as store:
        for tag in arms:
            reply = cache.episode(f"precision {tag}").generate(ids, max_tokens=1, precision=tag)
            wait_until_stored(cache)
            assert reply.version is not None
            found[tag] = stored_rows(store, cache.config.namespace, reply.version, **shape)
    return {tag: relative_errors(found["exact"], found[tag], rows) for tag in TAGS}


def _merged(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, float]:
    return {arm: float(np.mean([each[arm]["mean"] for each in rounds])) for arm in rounds[0]}


def _print(result: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"{result['model']}: {result['tokens']:,} tokens, {result['prompts']} prompts", box=box.SIMPLE_HEAD
    )
    for name in ("precision", "error of keys", "worst layer", "error of values", "worst layer", "KL, nats"):
        table.add_column(name, justify="left" if name == "precision" else "right")
    table.add_row("exact", "0", "0", "0", "0", f"{result['kl_exact']:.4f}")
    for row in result["rows"]:
        keys, values = row["error"]["keys"], row["error"]["values"]
        figures = (keys["mean"], keys["worst_layer"], values["mean"], values["worst_layer"], row["kl"])
        table.add_row(row["precision"], *(f"{figure:.4f}" for figure in figures))
    console.print(table)
