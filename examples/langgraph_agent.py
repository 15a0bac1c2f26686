"""A LangGraph agent that reads documents while two stock middlewares shorten its prompt; every revision resumes its KV.

    python examples/langgraph_agent.py [--documents 8] [--clear-at 1200] [--summarise-at 3000] [--policy edit_local] [--model smollm2]

`ContextEditingMiddleware` clears old tool results in the request, `SummarizationMiddleware` replaces old turns in the state. All that
agentcache needs of it: its chat model, and `AgentCacheMiddleware` as the last one in the list.
"""

import argparse
from collections.abc import Callable

from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelRequest,
    ModelResponse,
    SummarizationMiddleware,
)
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver

from agentcache import ResumeTable
from agentcache.integrations.langchain import ChatAgentCache
from agentcache.integrations.langgraph import AgentCacheMiddleware
from agentcache.samples import load_hotpot_sample


class Reading(AgentMiddleware):
    """Has the model read all documents before it answers: one of 135M parameters does not choose tools by itself."""

    def __init__(self, documents: int) -> None:
        """Keeps how many there are."""
        super().__init__()
        self.left = documents

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        """Forces the tool while documents are left."""
        self.left -= 1
        return handler(request.override(tool_choice="read_next") if self.left >= 0 else request.override(tools=[]))


def reader(documents: list[str]) -> BaseTool:
    """Returns the tool that reads the documents one after the other."""
    waiting = iter(documents)

    @tool
    def read_next() -> str:
        """Read the next document."""
        return next(waiting)

    return read_next


def main() -> None:
    """Runs the agent and prints what each model call has reused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or the built-in smollm2")
    parser.add_argument("--policy", default="edit_local", help="how the edited prompts are resumed")
    parser.add_argument("--documents", type=int, default=8, help="how many to read, at most 12")
    parser.add_argument("--clear-at", type=int, default=1200, help="tokens above which old tool results are cleared")
    parser.add_argument("--summarise-at", type=int, default=3000, help="tokens above which old turns become a summary")
    options = parser.parse_args()
    paragraphs = [item.paragraphs for item in load_hotpot_sample()[: options.documents]]
    documents = ["\n\n".join(f"{p.title}\n{p.text}" for p in group[:4]) for group in paragraphs]

    with ChatAgentCache(model=options.model, max_tokens=48, max_model_len=8192) as model:
        agent = create_agent(
            model,
            [reader(documents)],
            system_prompt="Read the documents, then say in one sentence what they are about.",
            checkpointer=InMemorySaver(),
            middleware=[
                SummarizationMiddleware(model, trigger=("tokens", options.summarise_at), keep=("messages", 6)),
                ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=options.clear_at, keep=2)]),
                Reading(len(documents)),
                AgentCacheMiddleware(policy=options.policy),
            ],
        )
        with ResumeTable(model.engine, f"{len(documents)} documents, {options.policy}") as resumes:
            thread = {"configurable": {"thread_id": "reading"}, "recursion_limit": 100}
            result = agent.invoke({"messages": [{"role": "user", "content": "What are they about?"}]}, thread)
            print(result["messages"][-1].content)
            resumes.show()


if __name__ == "__main__":
    main()
