"""`agentcache eval qa`: task F1 and time to the first token after an edit of the documents that were read, by policy.

The table of PatchKV's Fig. 7 on models of any size. Of each item the old chat is computed and saved once; every arm then resumes
the new one from that checkpoint while vLLM holds exactly the prefix before the edit, and decodes an answer greedily. All arms of an
item run in one go, in an order that changes with the item.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

from agentcache.bench_resume import empty_prefix_cache
from agentcache.cache import AgentCache, Episode
from agentcache.config import PRECISIONS, CacheConfig
from agentcache.episodes.diff import as_ids, common_prefix
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.evaluation.app import work_path
from agentcache.evaluation.items import Row, item_key, rotated, run_items
from agentcache.evaluation.provenance import DataUse, fingerprint, provenance
from agentcache.evaluation.qa_cells import AGAIN, BASE, cells, pareto_plot, per_item, sections
from agentcache.evaluation.qa_data import QuestionSet, load_questions, without_calibration
from agentcache.evaluation.qa_edits import QA_EDITS, QAEdit, QAItem, make_items
from agentcache.evaluation.report import write_report
from agentcache.evaluation.scores import score_reply
from agentcache.evaluation.stored import rows_stored
from agentcache.profiling.datasets import SAMPLE
from agentcache.profiling.model import ModelFingerprint
from agentcache.profiling.profile import Profile
from agentcache.recovery import get_policy
from agentcache.recovery.spec import parse_policy
from agentcache.reply import Reply
from agentcache.work_file import WorkFile

__all__ = ["Arm", "QARun", "arms_of", "run"]

_SCHEMA: Final = 2  # of an item's row and of how it is measured
_ROOM: Final = 512  # tokens beside the documents: frames, question, answer


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to resume.

    Attributes:
        name: In tables; unique.
        policy: Of the resume.
        options: The policy's, those of the model's profile included.
        precision: How the old chat was saved.
    """

    name: str
    policy: str
    options: Mapping[str, Any]
    precision: str = "exact"


@dataclass(frozen=True, slots=True)
class QARun:
    """What is measured.

    Attributes:
        model: A folder, a hub id, or the name of a built-in model.
        out: The result's file.
        policies: The arms, `name:option=value:…`, with `@precision` for a checkpoint that is not exact.
        data: Files or folders of questions, see `qa_data`.
        items: Questions.
        seed: Of items, edits and intervals.
        context: Length of the documents in tokens, about.
        kinds: Of edits.
        max_tokens: Longest answer; it ends with its first line.
        profile: File of the model's profile; None: the one that ships, if there is one.
        calibrated_on: Files that the profile was made of.
        overlap: Whether tasks of the calibration may be measured, which shows that it works and is no result.
        noise: Whether the exact arm is measured once more, from another batch.
        ablation: What the arms differ in, or nothing; for the result's readers.
        plots: Whether the Pareto plot is drawn.
    """

    model: str
    out: Path
    policies: tuple[str, ...]
    data: tuple[str, ...] = (SAMPLE,)
    items: int = 150
    seed: int = 0
    context: int = 800
    kinds: tuple[QAEdit, ...] = QA_EDITS
    max_tokens: int = 16
    profile: Path | None = None
    calibrated_on: tuple[str, ...] = ()
    overlap: bool = False
    noise: bool = True
    ablation: str = ""
    plots: bool = False


def arms_of(policies: Sequence[str], config: CacheConfig) -> list[Arm]:
    """Returns the arms, the exact one first: everything is compared with it.

    Args:
        policies: `name:option=value:…`, with `@precision` for a checkpoint that is not exact.
        config: Gives options of the model's profile.

    Raises:
        ConfigError: A policy, an option or a precision is unknown, or a policy needs a profile and there is none.
    """
    arms = []
    for spec in dict.fromkeys((BASE, *policies)):
        text, _, precision = spec.partition("@")
        if precision and precision not in PRECISIONS:
            raise ConfigError(
                f"policy {spec!r}: precision {precision!r} is unknown; take one of {', '.join(PRECISIONS)}"
            )
        name, given = parse_policy(text)
        options = config.options_for(name, given)
        get_policy(name, options)
        arms.append(Arm(spec, name, options, precision or "exact"))
    return arms


def run(settings: QARun, console: Console) -> dict[str, Any]:
    """Measures what the work file has not, prints and writes the tables; returns what the JSON holds.

    Raises:
        ConfigError: A setting, a policy or the data is not allowed.
        AgentCacheError: The engine failed.
    """
    sets = [load_questions(source) for source in dict.fromkeys(settings.data)]
    _, model = fingerprint(settings.model)
    config = CacheConfig.build(**_engine_settings(settings, model))
    profile = config.measured
    kept, left_out = (sets, 0) if settings.overlap else without_calibration(sets, profile, settings.calibrated_on)
    items = _items(settings, kept, left_out)
    arms = arms_of(settings.policies, config)
    with ExitStack() as stack:

        @functools.cache
        def measurement() -> _Measurement:
            cache = stack.enter_context(AgentCache(**_engine_settings(settings, model)))
            ready = _Measurement(cache, arms, settings)
            ready(items[0], 0)  # warms up, and is not counted
            return ready

        numbered = [(_key(settings, model, arms, item, number), (item, number)) for number, item in enumerate(items)]
        rows = run_items(
            numbered,
            lambda each: measurement()(*each),
            work=WorkFile(work_path(settings.out)),
            label="questions",
            console=console,
        )
    return _report(settings, model, profile, kept, left_out, arms, rows, console)


def _items(settings: QARun, sets: Sequence[QuestionSet], left_out: int) -> list[QAItem]:
    questions = [question for each in sets for question in each.questions]
    try:
        return make_items(questions, settings.items, seed=settings.seed, context=settings.context, kinds=settings.kinds)
    except ConfigError as error:
        if not left_out:
            raise
        raise ConfigError(
            f"{error}. {left_out} questions are left out since the profile's calibration may have used them"
        ) from error


def _engine_settings(settings: QARun, model: ModelFingerprint) -> dict[str, Any]:
    longest = 2 * settings.context + _ROOM
    row_bytes = 2 * model.layers * model.kv_heads * model.head_dim * 4  # of float32, where the machine computes in that
    return {
        "model": settings.model,
        "max_model_len": longest,
        "kv_bytes": 4 * longest * row_bytes,
        "profile": settings.profile,
        "connector": {"attention": True},  # of the old chat, off the token path: for the policies that rank by it
    }


def _key(settings: QARun, model: ModelFingerprint, arms: Sequence[Arm], item: QAItem, number: int) -> str:
    return item_key(
        part="qa",
        schema=_SCHEMA,
        model=model.hash,
        item=asdict(item),
        turn=number % len(arms),
        arms=[asdict(arm) for arm in arms],
        noise=settings.noise,
        max_tokens=settings.max_tokens,
        context=settings.context,
    )


class _Saved(NamedTuple):
    """A checkpoint of the old chat."""

    episode: Episode
    version: str


class _Measurement:
    """One engine, which measures items."""

    def __init__(self, cache: AgentCache, arms: Sequence[Arm], settings: QARun) -> None:
        self._cache = cache
        self._arms = arms
        self._settings = settings
        self._dtype: str = cache.stats()["engine"]["dtype"]
        self._decode: dict[str, Any] = {"max_tokens": settings.max_tokens, "stop": ["\n"]}

    def __call__(self, item: QAItem, number: int) -> Row:
        """Returns what the arms answered to one item, and how long each took."""
        saved, started = dict[str, _Saved](), time.monotonic()
        try:
            ids = self._ids(item)
            saved |= self._save(item, number)
            saved_s = time.monotonic() - started
            prefix = common_prefix(self._cache.render(list(item.old)).token_ids, as_ids(ids))
            arms = dict[str, Any]()
            for arm in rotated(self._arms, number):
                self._prime(saved["exact"], ids[:prefix])
                reply = saved[arm.precision].episode.generate(
                    list(item.new),
                    policy=arm.policy,
                    policy_options=dict(arm.options),
                    parent=saved[arm.precision].version,
                    save=False,
                    salt=f"{number}/{arm.name}",
                    **self._decode,
                )
                arms[arm.name] = _found(reply, item)
            if self._settings.noise:
                # Half of the prefix is computed in the same step as the rest: the same mathematics in other batches.
                self._prime(saved["exact"], ids[: prefix // 2])
                arms[AGAIN] = _found(self._cache.generate(ids, **self._decode), item)
        finally:
            for each in saved.values():
                each.episode.drop()
        return {
            "id": item.id,
            "task": item.task,
            "dataset": item.dataset,
            "edit": item.kind,
            "carrier": item.carrier,
            "answers": [*item.answers],
            "tokens": len(ids),
            "prefix_tokens": prefix,
            "dtype": self._dtype,
            "save_s": round(saved_s, 2),
            "took_s": round(time.monotonic() - started, 2),
            "arms": arms,
        }

    def _ids(self, item: QAItem) -> list[int]:
        ids: list[int] = self._cache.render(list(item.new)).token_ids.tolist()
        longest = (self._cache.config.max_model_len or math.inf) - self._settings.max_tokens
        if len(ids) > longest:
            raise ConfigError(
                f"question {item.task!r} has {len(ids)} tokens in this model's vocabulary, {longest:.0f} fit; "
                f"take a smaller --context than {self._settings.context}, or another --seed"
            )
        return ids

    def _save(self, item: QAItem, number: int) -> dict[str, _Saved]:
        """Returns the old chat by the precision that it is stored in, `exact` among them; it is computed once."""
        empty_prefix_cache(self._cache)
        saved = dict[str, _Saved]()
        for precision in dict.fromkeys(("exact", *(arm.precision for arm in self._arms))):
            # In an episode of its own: a version shares the stored rows of its parent, at their precision.
            episode = self._cache.episode(f"{item.id}/{number}/{precision}")
            reply = episode.generate(list(item.old), max_tokens=1, policy=BASE, precision=precision)
            if reply.version is None or not self._cache.flush():
                raise AgentCacheError(f"the chat before the edit of {item.id!r} was not saved")
            saved[precision] = _Saved(episode, reply.version)
        return saved

    def _prime(self, saved: _Saved, prefix: Sequence[int]) -> None:
        """Leaves exactly these first tokens in vLLM's prefix cache. They come from an exact checkpoint, bit by bit."""
        empty_prefix_cache(self._cache)
        if prefix:
            saved.episode.generate(prefix, max_tokens=1, policy=BASE, parent=saved.version, save=False)


def _found(reply: Reply, item: QAItem) -> dict[str, Any]:
    """Returns what one arm answered and took."""
    answer = next((line.strip() for line in reply.text.split("\n") if line.strip()), "")
    found: dict[str, Any] = {"answer": answer, **score_reply(answer, item.answers), "ttft_ms": round(reply.ttft_ms, 3)}
    recovery = reply.recovery
    if recovery is not None:
        found |= {
            "recompute_ratio": recovery.recompute_ratio,
            "planned_ratio": recovery.planned_ratio,
            "suffix_tokens": recovery.suffix_tokens,
            "reused_tokens": recovery.reused_tokens,
            "stored": rows_stored(recovery),
            "used": recovery.policy,
        }
        if recovery.reason is not None:
            found["reason"] = recovery.reason
    return found


def _report(
    settings: QARun,
    model: ModelFingerprint,
    profile: Profile | None,
    sets: Sequence[QuestionSet],
    left_out: int,
    arms: Sequence[Arm],
    rows: Sequence[Row],
    console: Console,
) -> dict[str, Any]:
    """Writes and prints the result; returns what the JSON holds."""
    names = {row["task"] for row in rows}
    data = [DataUse(s.name, s.hash, sum(q.id in names for q in s.questions), "questions") for s in sets]
    found = cells(rows, model.name, settings.seed)
    result = {
        "part": "qa",
        "ablation": settings.ablation or None,
        "is_result": not settings.overlap,
        "unit": "f1, em, rouge1, bleu1 and their differences from 0 to 1; ttft_ms the mean; speedup of means, to prefix_cache",
        **found,
        "policies": {
            arm.name: {"policy": arm.policy, "options": dict(arm.options), "precision": arm.precision} for arm in arms
        },
        "settings": {
            "items": settings.items,
            "context": settings.context,
            "max_tokens": settings.max_tokens,
            "edits": [*settings.kinds],
            "tokens": _spread([row["tokens"] for row in rows]),
            "suffix_tokens": _spread([row["arms"][BASE]["suffix_tokens"] for row in rows]),
            "seconds": _spread([row["took_s"] for row in rows]),
        },
        "tasks_left_out_for_calibration": left_out,
        "provenance": provenance(
            model,
            dtype=" and ".join(sorted({row["dtype"] for row in rows})),
            seeds={"items": settings.seed},
            data=data,
            profile=profile,
        ),
        "per_item": per_item(rows),
    }
    written = write_report(settings.out, result, f"Answers after an edit: {model.name}", sections(result))
    if settings.plots:
        written += pareto_plot(settings.out, result)
    _print(result, console)
    console.print(f"wrote {', '.join(str(path) for path in written)}")
    return result


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "mean": round(sum(values) / len(values), 1), "most": max(values)}


def _print(result: Mapping[str, Any], console: Console) -> None:
    from rich.markdown import Markdown

    from agentcache.evaluation.report import markdown_table

    pooled = sections(result)[0]
    console.print(Markdown(f"**{pooled.title}**\n\n{markdown_table(pooled.rows, pooled.columns)}"))
