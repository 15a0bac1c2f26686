"""`agentcache eval replay`: recorded agent runs as LangGraph message histories, revised by two stock middlewares, prompt by prompt.

Each model call of a run is rendered by the model's chat template and recorded as a version; the diff and the plan are those of a
real resume, no engine runs. What prefix caching would compute is what follows the longest prefix that any earlier prompt of the
run, with its reply, has in common with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from agentcache.episodes import EpisodeTracker, Renderer
from agentcache.episodes.diff import common_prefix
from agentcache.episodes.pieces import TokenArray
from agentcache.errors import ConfigError
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.planner import plan

__all__ = ["RULES", "Call", "Revised", "Rule", "Rules", "histories", "replay_run", "revise", "summarise"]

Rule = Literal["clearing", "summarisation"]
RULES: tuple[Rule, ...] = get_args(Rule)
"""`clearing`: ContextEditing's ClearToolUsesEdit, on the request. `summarisation`: SummarizationMiddleware, on the state."""

_SUMMARY_CHARACTERS: Final = 120  # of each message that a summary replaces


@dataclass(frozen=True, slots=True)
class Rules:
    """When the middlewares act.

    Attributes:
        clear_trigger: Tokens of a history above which old tool results are cleared.
        clear_keep: Tool results that stay.
        summary_trigger: Tokens of a history above which its old messages are summarised.
        summary_keep: Messages that stay.
    """

    clear_trigger: int = 2500
    clear_keep: int = 3
    summary_trigger: int = 3500
    summary_keep: int = 8


@dataclass(frozen=True, slots=True)
class Revised:
    """The messages of one model call, and what became of them since the call before.

    Attributes:
        messages: LangChain's, as the model gets them.
        reply: The message that the model answered with.
        acted: Whether the middleware changed something that the call before had as it was.
    """

    messages: Sequence[Any]
    reply: Any
    acted: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One model call of a replayed run.

    Attributes:
        run: Id of the run.
        number: Of the call in it, from 0.
        rule: Which middleware revised it.
        acted: See `Revised`.
        kind: Why its prompt differs from that of the call before, as the tracker tells.
        tokens: Of its prompt.
        cached: Leading tokens that prefix caching has.
        reused: Tokens behind them that the policy restores.
        computed: Tokens that it computes.
    """

    run: str
    number: int
    rule: str
    acted: bool
    kind: str
    tokens: int
    cached: int
    reused: int
    computed: int


def histories(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yields each recorded tau-bench run as its id and LangChain messages, each with an id of its own.

    Raises:
        ConfigError: A row is no tau-bench run.
    """
    from langchain_core.messages import convert_to_messages

    for number, row in enumerate(rows):
        if "traj" not in row:
            raise ConfigError(f"row {number} is no run of tau-bench: it has {', '.join(row)} and no 'traj'")
        run = f"{row['task_id']}-{row.get('trial', 0)}-{number}"
        plain = [{k: v for k, v in message.items() if v is not None} for message in row["traj"]]
        messages = convert_to_messages([{"content": "", **message} for message in plain])
        for at, message in enumerate(messages):
            message.id = f"{run}/{at}"
        yield run, messages


def summarise(messages: Sequence[Any]) -> str:
    """Returns the beginnings of messages, one a line: a summary that needs no model and is made of the run's own words."""
    return "\n".join(f"- {m.type}: {' '.join(str(m.text).split())[:_SUMMARY_CHARACTERS]}" for m in messages)


def revise(
    messages: Sequence[Any], rule: Rule, count: Callable[[Sequence[Any]], int], rules: Rules
) -> Iterator[Revised]:
    """Yields the model calls of a run, with the prompts that the middleware of a rule makes of its history.

    Args:
        messages: The whole run.
        rule: Which middleware.
        count: Tokens of messages.
        rules: When it acts.

    Raises:
        ConfigError: There is no such rule.
    """
    if rule not in RULES:
        raise ConfigError(f"rule {rule!r} is not known; there are {', '.join(RULES)}")
    yield from (_cleared if rule == "clearing" else _summarised)(messages, count, rules)


def _cleared(messages: Sequence[Any], count: Callable[[Sequence[Any]], int], rules: Rules) -> Iterator[Revised]:
    from langchain.agents.middleware import ClearToolUsesEdit

    edit = ClearToolUsesEdit(trigger=rules.clear_trigger, keep=rules.clear_keep)
    before = 0
    for at in _calls(messages):
        request = list(messages[:at])
        edit.apply(request, count_tokens=count)
        cleared = sum(new is not old for new, old in zip(request, messages, strict=False))
        yield Revised(request, messages[at], cleared > before)
        before = cleared


def _summarised(messages: Sequence[Any], count: Callable[[Sequence[Any]], int], rules: Rules) -> Iterator[Revised]:
    from langchain.agents.middleware import SummarizationMiddleware
    from langchain_core.language_models import FakeListChatModel
    from langgraph.graph.message import add_messages

    middleware: Any = SummarizationMiddleware(
        FakeListChatModel(responses=[""]),  # it is asked for nothing: the summarizer writes
        trigger=("tokens", rules.summary_trigger),
        keep=("messages", rules.summary_keep),
        token_counter=count,
        summarizer=summarise,
        trim_tokens_to_summarize=None,
    )
    # The system prompt is no part of the state, as in `create_agent`.
    system = [m for m in messages[:1] if m.type == "system"]
    state: Any = []
    done = len(system)
    for at in _calls(messages):
        state = add_messages(state, list(messages[done:at]))
        done = at
        update = middleware.before_model({"messages": state}, None)
        if update is not None:
            state = add_messages(state, update["messages"])
        yield Revised([*system, *state], messages[at], update is not None)


def _calls(messages: Sequence[Any]) -> list[int]:
    """Returns where the model's replies stand."""
    return [at for at, message in enumerate(messages) if message.type == "ai" and at]


def replay_run(
    run: str, calls: Sequence[Revised], rule: str, renderer: Renderer, policy: RecoveryPolicy
) -> Iterator[Call]:
    """Yields the calls of a run, tracked and planned as an engine's requests would be.

    Args:
        run: Its id.
        calls: Its prompts.
        rule: That revised them.
        renderer: Of the model.
        policy: Chooses what is computed again.
    """
    from agentcache.integrations.langchain.messages import to_chat

    tracker = EpisodeTracker()
    earlier: list[TokenArray] = []
    for number, call in enumerate(calls):
        chat = to_chat(call.messages)
        head = tracker.head(run)
        replies = tracker.replies(head.version_id) if head is not None else ()
        prompt = renderer.render(chat, generated=replies)
        revision = tracker.record(run, prompt)
        context = PolicyContext(revision.diff, prompt.token_ids, revision.boundaries)
        length = len(prompt.token_ids)
        made = plan(policy, context, parent_exact_end=length, limit=length - 1)
        cached = min(max((common_prefix(ids, prompt.token_ids) for ids in earlier), default=0), length - 1)
        if head is None:
            made = replace(made, load_end=0, restore=(), recompute=(), prefix_tokens=0, reused_tokens=0)
        restored = sum(run_.length for run_ in made.restore)
        reused = sum(max(run_.new_stop - max(run_.new_start, cached), 0) for run_ in made.restore)
        yield Call(
            run=run,
            number=number,
            rule=rule,
            acted=call.acted,
            kind=str(revision.kind.value),
            tokens=length,
            cached=cached,
            reused=reused,
            computed=length - max(restored, cached + reused),
        )
        reply = _reply(renderer, chat, call.reply, prompt.token_ids)
        # The last sampled token has no KV.
        version = tracker.finish(revision.version, reply, computed=length + max(len(reply) - 1, 0))
        earlier.append(version.context_ids)


def _reply(renderer: Renderer, chat: list[dict[str, Any]], message: Any, prompt: TokenArray) -> TokenArray:
    """Returns the ids that the model would have generated for a recorded reply: those that the template gives it."""
    from agentcache.integrations.langchain.messages import to_chat

    whole = renderer.render([*chat, *to_chat([message])], add_generation_prompt=False).token_ids
    return whole[common_prefix(whole, prompt) :]
