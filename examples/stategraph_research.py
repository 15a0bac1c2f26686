"""A hand-made StateGraph whose documents are refreshed while it runs: each refresh resumes the KV of the others.

    python examples/stategraph_research.py [--rounds 4] [--documents 8] [--policy edit_local] [--model smollm2]

Each round asks a question about all documents, then one of them is replaced by a newer one, in the middle of the prompt. All that
agentcache needs of it: its chat model, and `wrap_node` around the node that calls it.
"""

import argparse
from typing import TypedDict

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from agentcache import ResumeTable
from agentcache.integrations.langchain import ChatAgentCache
from agentcache.integrations.langgraph import wrap_node
from agentcache.samples import load_hotpot_sample


class Research(TypedDict):
    """The graph's state."""

    documents: list[str]
    newer: list[str]
    notes: list[str]


def main() -> None:
    """Runs the graph and prints what each model call has reused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or the built-in smollm2")
    parser.add_argument("--policy", default="edit_local", help="how the edited prompts are resumed")
    parser.add_argument("--documents", type=int, default=16, help="how many stand in the prompt, at most 60")
    parser.add_argument("--rounds", type=int, default=4, help="how many questions are asked")
    options = parser.parse_args()
    texts = [f"{p.title}\n{p.text}" for item in load_hotpot_sample() for p in item.paragraphs]
    standing, newer = texts[: options.documents], texts[options.documents :][: options.rounds]

    with ChatAgentCache(model=options.model, max_tokens=24, max_model_len=8192) as model:

        def analyse(state: Research) -> dict[str, list[str]]:
            documents = "\n\n".join(state["documents"])
            reply = model.invoke(
                [
                    SystemMessage("Answer in one sentence."),
                    HumanMessage(f"Documents:\n\n{documents}"),
                    HumanMessage(f"Question {len(state['notes']) + 1}: what do they have in common?"),
                ]
            )
            return {"notes": [*state["notes"], str(reply.content)]}

        def refresh(state: Research) -> dict[str, list[str]]:
            documents = list(state["documents"])
            place = (3 * len(state["notes"])) % len(documents)
            documents[place] = state["newer"][0]
            return {"documents": documents, "newer": state["newer"][1:]}

        graph = StateGraph(Research)
        graph.add_node("analyse", wrap_node(analyse, policy=options.policy))
        graph.add_node("refresh", refresh)
        graph.add_edge(START, "analyse")
        graph.add_conditional_edges("analyse", lambda s: "refresh" if len(s["notes"]) < options.rounds else END)
        graph.add_edge("refresh", "analyse")
        research = graph.compile(checkpointer=InMemorySaver())
        with ResumeTable(model.engine, f"{options.documents} documents, {options.policy}") as resumes:
            thread = {"configurable": {"thread_id": "research"}, "recursion_limit": 100}
            result = research.invoke({"documents": standing, "newer": newer, "notes": []}, thread)
            for number, note in enumerate(result["notes"], 1):
                print(f"{number}. {note}")
            resumes.show()


if __name__ == "__main__":
    main()
