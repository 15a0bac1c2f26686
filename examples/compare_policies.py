"""One edit, resumed under each policy from the same checkpoint: what is computed again, how long it takes, how far it is off.

python examples/compare_policies.py [--documents 16] [--policies prefix_cache,edit_local,attended] [--model smollm2]
"""

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from agentcache import AgentCache
from agentcache.quality import kl_divergence, top1_agrees
from agentcache.samples import load_hotpot_sample

POLICIES = "prefix_cache,direct_reuse,edit_local,epic,attended,patchkv,frontier,cacheblend,prophetkv,mean_shift,auto"


def main() -> None:
    """Prints a table of policies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or the built-in smollm2")
    parser.add_argument("--documents", type=int, default=16, help="how many stand in the prompt, at most 60")
    parser.add_argument("--policies", default=POLICIES, help="separated by commas; prefix_cache is the baseline")
    options = parser.parse_args()
    paragraphs = [p for item in load_hotpot_sample() for p in item.paragraphs][: options.documents]

    def prompt(record: str) -> list[dict[str, str]]:
        documents = "\n\n".join(f"{p.title}\n{p.text}" for p in paragraphs)
        texts = (f"Record 4711: {record}", documents, "Is it confirmed?")
        return [{"role": "user", "content": text} for text in texts]

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for name in ("reused", "computed", "TTFT", "saved", "KL to exact", "top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    # Some policies rank by attention that the save of the parent measures.
    with AgentCache(options.model, connector={"attention": True}, max_model_len=8192) as cache:
        episode = cache.episode("record")
        parent = episode.generate(prompt("provisional, 3 sources."), max_tokens=1).version
        exact, exact_ms = None, 0.0
        for policy in ["prefix_cache", *(p for p in options.policies.split(",") if p != "prefix_cache")]:
            # Each starts from the parent, keeps nothing, and shares no block with the others.
            asked = {"policy": policy, "parent": parent, "save": False, "salt": policy, "max_tokens": 1, "logprobs": -1}
            reply = episode.generate(prompt("confirmed by two editors, 5 sources."), **asked)
            (shown,), done = reply.logprobs, reply.recovery
            if exact is None:
                exact, exact_ms = shown, reply.ttft_ms
            table.add_row(
                policy,
                str(done.reused_tokens),
                str(done.fresh_tokens + done.repair_tokens + done.new_tokens),
                f"{reply.ttft_ms:.0f} ms",
                f"{1 - reply.ttft_ms / exact_ms:.0%}" if reply.ttft_ms < exact_ms else "–",
                f"{kl_divergence(exact, shown):.4f}",
                "=" if top1_agrees(exact, shown) else "≠",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
