"""An agent waits for a human, the process ends meanwhile, and another one goes on: the KV comes back from the disk store.

    python examples/long_pause.py [--documents 10] [--policy edit_local] [--model smollm2] [--folder FOLDER]

The first process asks for approval and ends. The second one has LangGraph's state from SQLite and the prompt's KV from the store; the
human has corrected a record meanwhile, in the middle of the prompt. `AgentCacheCallbackHandler` marks the pause.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypedDict

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from agentcache import AgentCache, ResumeTable
from agentcache.integrations.langchain import ChatAgentCache
from agentcache.integrations.langgraph import AgentCacheCallbackHandler, wrap_node
from agentcache.samples import load_hotpot_sample

CORRECTION = "Record 4711: confirmed by two editors, 5 sources."


class Review(TypedDict):
    """The graph's state."""

    record: str
    documents: str
    draft: str
    report: str


def review(model: ChatAgentCache, policy: str) -> Any:
    """Returns the graph: a draft, a human's correction of the record, a report."""

    def ask(state: Review, question: str) -> str:
        messages = [
            SystemMessage("Answer in one sentence."),
            HumanMessage(state["record"]),
            HumanMessage(state["documents"]),
            HumanMessage(question),
        ]
        return str(model.invoke(messages).content)

    def draft(state: Review) -> dict[str, str]:
        return {"draft": ask(state, "Is the record confirmed?")}

    def approve(state: Review) -> dict[str, str]:
        return {"record": interrupt({"draft": state["draft"], "please": "correct the record"})}

    def report(state: Review) -> dict[str, str]:
        return {"report": ask(state, "Is the record confirmed?")}

    graph = StateGraph(Review)
    graph.add_node("draft", wrap_node(draft, policy=policy))
    graph.add_node("approve", approve)
    graph.add_node("report", wrap_node(report, policy=policy, episode="review"))
    graph.add_edge(START, "draft")
    graph.add_edge("draft", "approve")
    graph.add_edge("approve", "report")
    graph.add_edge("report", END)
    return graph


def step(options: argparse.Namespace) -> None:
    """Runs one process: up to the interrupt, or from it."""
    begins = options.step == "begin"
    title = "before the pause" if begins else "after it, in another process"
    settings = {"store": f"disk://{options.folder / 'kv'}", "max_model_len": 8192}
    with (
        SqliteSaver.from_conn_string(str(options.folder / "graph.sqlite")) as saver,
        AgentCache(options.model, **settings) as cache,
        ResumeTable(cache, title) as resumes,
    ):
        graph = review(ChatAgentCache(cache=cache, max_tokens=24), options.policy).compile(checkpointer=saver)
        thread = {"configurable": {"thread_id": "review"}, "callbacks": [AgentCacheCallbackHandler(cache)]}
        if begins:
            paragraphs = [p for item in load_hotpot_sample() for p in item.paragraphs][: options.documents]
            documents = "\n\n".join(f"{p.title}\n{p.text}" for p in paragraphs)
            given = {"record": "Record 4711: provisional, 3 sources.", "documents": documents}
            waiting = graph.invoke(given, thread)
            print("waits for a human:", waiting["__interrupt__"][0].value["please"])
        else:
            print("report:", graph.invoke(Command(resume=CORRECTION), thread)["report"])
        resumes.show()


def main() -> None:
    """Runs both processes, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or the built-in smollm2")
    parser.add_argument("--policy", default="edit_local", help="how the edited prompt is resumed")
    parser.add_argument("--documents", type=int, default=16, help="how many stand in the prompt, at most 60")
    parser.add_argument("--folder", type=Path, help="where state and KV are kept; by default a temporary one")
    parser.add_argument("--step", choices=("begin", "end"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is not None:
        step(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(options.folder or scratch)
        for name in ("begin", "end"):
            again = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--step", name]
            subprocess.run(again, check=True)


if __name__ == "__main__":
    main()
