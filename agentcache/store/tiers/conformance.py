"""The check that every checkpoint store must pass, shipped so that a new back end anywhere is tested by a few lines.

```python
class MyBackend(Backend):
    def open(self, budget_bytes=1 << 30, fingerprint=None):
        return MyStore(self.place, budget_bytes, fingerprint=fingerprint)

    def damage(self, store, key, rank):
        ...  # change one bit of that payload

@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_my_store(check):
    check_store(MyBackend, [check])
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing

from agentcache.store.tiers import conformance_faults, conformance_saves
from agentcache.store.tiers.conformance_kit import Backend

__all__ = ["CHECKS", "Backend", "Check", "check_store"]

Check = Callable[[Backend], None]
CHECKS: tuple[Check, ...] = (
    conformance_saves.a_version_reads_what_was_put,
    conformance_saves.a_save_is_seen_as_a_whole_or_not_at_all,
    conformance_saves.what_does_not_fit_a_save_is_refused,
    conformance_saves.another_engines_versions_are_refused_with_the_reason,
    conformance_saves.tenants_are_isolated_and_ids_may_be_anything,
    conformance_saves.versions_share_objects_until_the_last_is_gone,
    conformance_faults.a_damaged_payload_is_lost_and_no_other,
    conformance_saves.the_budget_holds_and_the_least_recently_used_goes,
    conformance_faults.a_durable_store_survives_a_restart,
    conformance_faults.handles_share_one_save,
    conformance_faults.failures_are_answers,
    conformance_faults.threads_may_do_anything_at_once,
    conformance_faults.any_history_agrees_with_a_naive_model,
)


def check_store(factory: Callable[[], Backend], checks: Iterable[Check] = CHECKS) -> None:
    """Runs the checks, each on a fresh back end.

    Args:
        factory: Makes a back end that holds nothing.
        checks: Some of `CHECKS`.

    Raises:
        AssertionError: Says what does not hold.
    """
    for check in checks:
        with closing(factory()) as backend:
            check(backend)
