"""The quality guard: which resumes are shadowed by an exact run, how far off they were, and what then runs exactly.

A resume is chosen by its version's id, and its first token's most likely tokens are compared with those of an exact run. Too many
strikes (`GuardConfig`) make its episode run with `prefix_cache`; too many such episodes of a policy, all requests for that policy.
`engine.shadow` makes the exact runs. Pure: no torch, no vLLM.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import Any, Final, Literal

from agentcache.config import SHADOW_TOKENS, GuardConfig
from agentcache.events import PolicyFellBack, QualityChecked

__all__ = ["Miss", "QualityGuard", "first_tokens", "top_kl"]

Miss = Literal["failed", "dropped", "unfit"]
"""Why a resume that was chosen gave no result: its exact run failed, made room, or its log-probabilities are not comparable."""

_ROUNDING: Final = 1e-6
"""Float32 log-probabilities say nothing of a mass below this."""


def first_tokens(logprobs: Mapping[int, float], count: int = SHADOW_TOKENS) -> dict[int, float]:
    """Returns the `count` most likely tokens, the most likely first. A sampled token beyond them is left out."""
    return dict(sorted(logprobs.items(), key=lambda item: -item[1])[:count])


def top_kl(exact: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Returns a lower bound of KL(exact ‖ other), in nats, from the most likely tokens of each and their log-probabilities.

    Let A and B be the tokens that exact `p` and other `q` list. Over the cells *each token of A ∩ B*, *G = A ∖ B* and *the rest*:

        Σ_{t ∈ A∩B} p_t ln(p_t / q_t)  +  P_G ln(P_G / Q_G)  +  P_rest ln(P_rest / Q_rest)

    with P_rest = 1 − Σ_A p and Q_G + Q_rest = 1 − Σ_{A∩B} q. Q_G is not known, but a token that q does not list has at most
    the probability of the least likely one that it does. So Q_G is the value with the least KL, the share P_G / (P_G + P_rest) of
    what is left, unless that exceeds |G| · min_B q. Merging tokens never raises a KL (log-sum inequality), hence the bound;
    it is the KL itself when both list the whole vocabulary.
    """
    common = exact.keys() & other.keys()
    gone = exact.keys() - common
    known = math.fsum(math.exp(exact[t]) * (exact[t] - other[t]) for t in common if exact[t] > -math.inf)
    p_gone = math.fsum(math.exp(exact[t]) for t in gone)
    p_rest = max(0.0, 1.0 - math.fsum(map(math.exp, exact.values())))
    left = max(0.0, 1.0 - math.fsum(math.exp(other[t]) for t in common))
    most = len(gone) * math.exp(min(other.values()))
    q_gone = min(most, left * p_gone / (p_gone + p_rest)) if p_gone else 0.0
    kl = known + _term(p_gone, q_gone) + _term(p_rest, left - q_gone)
    return math.inf if math.isnan(kl) else max(0.0, kl)  # logits that are no numbers are as far off as can be


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, _ROUNDING)) if p else 0.0


@dataclass(slots=True)
class _Policy:
    """What was measured of a policy, and the episodes that fell back because of it."""

    agreed: deque[bool]
    fallen: set[str] = field(default_factory=set)
    off: str | None = None


@dataclass(slots=True)
class _Episode:
    """The strikes of an episode; once it has fallen back, the policy and the reason."""

    strikes: deque[bool]
    policy: str = ""
    off: str | None = None


class QualityGuard:
    """Chooses the resumes that are shadowed, judges their results, and says what runs exactly. Thread-safe.

    Args:
        config: Share and bounds.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._lock = Lock()
        self._policies: dict[str, _Policy] = {}
        self._episodes: dict[str, _Episode] = {}
        self._counts: dict[str, Counter[str]] = {}  # by policy; these only ever grow
        self._kl: dict[str, tuple[float, float]] = {}  # by policy: sum and largest

    def chooses(self, version: str) -> bool:
        """Whether the resume that made this version is shadowed; the same answer for the same id, share and seed."""
        digest = blake2b(f"{self.config.seed}:{version}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.config.share * 2**64

    def objection(self, episode: str, policy: str) -> str | None:
        """Returns why a request of this episode for this approximate policy has to run exactly, or None."""
        with self._lock:
            of_policy, of_episode = self._policies.get(policy), self._episodes.get(episode)
            if of_policy is not None and of_policy.off is not None:
                return of_policy.off
            return None if of_episode is None else of_episode.off

    def record(
        self, episode: str, version: str, policy: str, kl: float, top1_agrees: bool
    ) -> tuple[QualityChecked, tuple[PolicyFellBack, ...]]:
        """Takes in a result; returns its event, and one for each of the episode and the policy that falls back for it.

        Args:
            episode: Of the resume.
            version: That it made.
            policy: That was asked for.
            kl: KL of its first token to that of the exact run.
            top1_agrees: Whether both have the same most likely token.
        """
        with self._lock:
            of_policy = self._policies.setdefault(policy, _Policy(deque(maxlen=self.config.window)))
            of_episode = self._episodes.setdefault(episode, _Episode(deque(maxlen=self.config.window)))
            of_policy.agreed.append(top1_agrees)
            agreement = sum(of_policy.agreed) / len(of_policy.agreed)
            seldom = len(of_policy.agreed) == self.config.window and agreement < self.config.min_top1
            strike = not kl <= self.config.max_kl or (not top1_agrees and seldom)
            of_episode.strikes.append(strike)
            self._count(policy, kl, "agreed" if top1_agrees else "disagreed", strike)
            falls = []
            if strike and of_episode.off is None and sum(of_episode.strikes) >= self.config.episode_strikes:
                measured = (
                    f"a KL of {kl:.3g}" if not kl <= self.config.max_kl else f"top-1 agreement of {agreement:.0%}"
                )
                of_episode.policy, of_episode.off = policy, self._episode_reason(episode, of_episode, policy, measured)
                falls.append(PolicyFellBack(scope="episode", episode=episode, policy=policy, reason=of_episode.off))
                of_policy.fallen.add(episode)
                if of_policy.off is None and len(of_policy.fallen) >= self.config.policy_episodes:
                    of_policy.off = self._policy_reason(of_policy, policy, measured)
                    falls.append(PolicyFellBack(scope="policy", episode=episode, policy=policy, reason=of_policy.off))
        checked = QualityChecked(
            episode=episode,
            version=version,
            policy=policy,
            kl=kl,
            top1_agrees=top1_agrees,
            agreement=agreement,
            strike=strike,
        )
        return checked, tuple(falls)

    def missed(self, policy: str, why: Miss) -> None:
        """Counts a resume that was chosen and gave no result."""
        with self._lock:
            self._counts.setdefault(policy, Counter())[why] += 1

    def forget(self, episode: str) -> None:
        """Removes what is known of an episode; that it fell back still counts for its policy."""
        with self._lock:
            self._episodes.pop(episode, None)

    def reset(self, *, episode: str | None = None, policy: str | None = None) -> bool:
        """Forgets results, so that what fell back is tried again; returns whether anything had. Counters stay.

        Args:
            episode: Only what is known of this episode.
            policy: Only what is known of this policy, and of the episodes that fell back because of it.
        """
        with self._lock:
            every = episode is None and policy is None
            policies = {n: p for n, p in self._policies.items() if every or n == policy}
            episodes = {
                n: e
                for n, e in self._episodes.items()
                if every or n == episode or (e.off is not None and e.policy == policy)
            }
            for name in policies:
                del self._policies[name]
            for name in episodes:
                del self._episodes[name]
                for each in self._policies.values():
                    each.fallen.discard(name)
            fell = [*(p.off for p in policies.values()), *(e.off for e in episodes.values())]
            return any(reason is not None for reason in fell)

    def stats(self) -> dict[str, Any]:
        """Returns `share`, `policies` (results, misses, KL, and why one is off) and `episodes` (why those that fell back did)."""
        with self._lock:
            return {
                "share": self.config.share,
                "policies": {name: self._policy_stats(name) for name in sorted(self._counts)},
                "episodes": {name: e.off for name, e in self._episodes.items() if e.off is not None},
            }

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _count(self, policy: str, kl: float, outcome: str, strike: bool) -> None:
        counts = self._counts.setdefault(policy, Counter())
        counts[outcome] += 1
        counts["strikes"] += strike
        total, largest = self._kl.get(policy, (0.0, 0.0))
        self._kl[policy] = total + kl, max(largest, kl)

    def _policy_stats(self, name: str) -> dict[str, Any]:
        counts, known = self._counts[name], self._policies.get(name)
        results = counts["agreed"] + counts["disagreed"]
        total, largest = self._kl.get(name, (0.0, 0.0))
        return {
            **{n: counts[n] for n in ("agreed", "disagreed", "strikes", "failed", "dropped", "unfit")},
            "mean_kl": total / results if results else 0.0,
            "max_kl": largest,
            "fallen_episodes": len(known.fallen) if known is not None else 0,
            "off": None if known is None else known.off,
        }

    @property
    def _bounds(self) -> str:
        return f"the bounds are max_kl={self.config.max_kl:g} and min_top1={self.config.min_top1:g}"

    def _episode_reason(self, episode: str, known: _Episode, policy: str, measured: str) -> str:
        return (
            f"the quality guard has episode {episode!r} run exactly: {sum(known.strikes)} of its last {len(known.strikes)} "
            f"shadowed resumes were strikes, the last with policy {policy!r} by {measured}; {self._bounds}; "
            f"guard.reset(episode={episode!r}) tries it again"
        )

    def _policy_reason(self, known: _Policy, policy: str, measured: str) -> str:
        return (
            f"the quality guard has policy {policy!r} off: {len(known.fallen)} of its episodes fell back, the last by {measured}; "
            f"{self._bounds}; guard.reset(policy={policy!r}) tries it again"
        )
