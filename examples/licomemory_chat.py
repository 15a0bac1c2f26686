"""A conversation with LiCoMemory's triples, chunks and summaries: each chunk is encoded once, whatever its rank.

    python examples/licomemory_chat.py [--model smollm2] [--questions 6] [--policy epic:k=8] [--ranks]

LiCoMemory is not on a package index. A small processor with its interface stands in its place here; with the real one, give
`LiCoMemory` your `QueryProcessor`.
"""

import argparse
import re
from pathlib import Path

from agentcache import AgentCache, ResumeTable
from agentcache.integrations.licomemory import LiCoMemory
from agentcache.integrations.memory_units import MemoryPrompt
from agentcache.recovery.spec import parse_policy

SESSIONS = {
    ("1", "2023/03/03"): (
        ("March 3rd, cat, Miso, bike", {"Pets": "Ann adopted the grey cat Miso.", "Bikes": "Bob's bike was stolen."}),
        [
            "Ann: I finally adopted a cat from the shelter on Mill Road. She is grey, afraid of the vacuum cleaner, and I named her Miso after the soup that I spilled on the form.",
            "Bob: Lovely! I had less luck: my bike was stolen near the station last night, and I walked home for an hour in the rain with two bags of groceries.",
            "Ann: Miso has chosen the laundry basket as her bed. My neighbour Jon will feed her when I am away, he has two cats himself and a key to my door.",
        ],
    ),
    ("2", "2023/03/19"): (
        ("March 19th, Miso, tomatoes, bike, police", {"Pets": "Miso broke Ann's tomato plants.", "Bikes": "The police found Bob's bike in the canal."}),
        [
            "Ann: Miso knocked over both of my tomato plants today. The balcony looks like a battlefield, and she slept in the empty pot as if nothing had happened.",
            "Bob: The police found my bike in the canal behind the market hall. The frame is bent like a banana, but the dynamo hub still lights up when I turn the wheel.",
            "Ann: Jon says that the plants may grow again if I tie them to sticks. He gave me twelve sticks of bamboo from his garden and a roll of green string.",
        ],
    ),
    ("3", "2023/04/07"): (
        ("April 7th, botanical garden, welding, Ghent", {"Work": "Ann becomes a gardener in the tropical house.", "Skills": "Bob learns to weld from his uncle in Ghent."}),
        [
            "Ann: I passed the interview at the botanical garden! I start as a junior gardener on the first of May, in the tropical house, with the old head gardener Irma.",
            "Bob: Congratulations! I have news too: my uncle in Ghent teaches me to weld on Saturdays, so that I can repair the frame of my bike before the summer.",
            "Bob: My first seam broke when I sat down on the bike, and my uncle laughed until he cried. The second one holds, he says it looks like a caterpillar.",
        ],
    ),
    ("4", "2023/07/09"): (
        ("July 9th, flood, seeds, cake", {"Work": "A flood wetted the seeds of the garden; the fans of Bob's uncle dried them.", "Thanks": "Irma baked a cake."}),
        [
            "Ann: We had a flood in the cellar of the garden. All the seed drawers were wet, and I spent a day drying four hundred paper bags on the roof.",
            "Bob: I brought my uncle's big fans on the cargo trailer of my bike, they dry a freshly painted gate in two hours, so the seeds were easy.",
            "Ann: The fans saved the seeds! Irma baked a rhubarb cake for Bob and his uncle, it waits in our fridge, and Miso has already licked one corner of it.",
        ],
    ),
}  # fmt: skip
TRIPLES = [
    ("Ann", "adopted", "the cat Miso"), ("Jon", "feeds", "the cat Miso"), ("Miso", "knocked over", "the tomato plants"),
    ("Bob", "lost and found", "his bike"), ("Bob's uncle", "teaches welding to", "Bob"), ("Ann", "works with", "Irma"),
    ("Irma", "baked a cake for", "Bob"), ("the fans", "dried", "the seeds"),
]  # fmt: skip
QUESTIONS = [
    "What is the name of Ann's cat, and who feeds the cat?",
    "Where was Bob's bike found, and what was bent?",
    "What did the cat do to the tomato plants?",
    "Who taught Bob to weld the frame of his bike?",
    "What happened to the seeds in the garden, and what dried the seeds?",
    "Who baked a cake for Bob and his uncle, and which cat has tasted the cake?",
]


def words(text: str) -> set[str]:
    """Returns the words of a text that tell something."""
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 2} - {
        "the",
        "and",
        "who",
        "what",
        "was",
    }


class Processor:
    """Finds by shared words what LiCoMemory finds by its graph; the form of the result is LiCoMemory's."""

    async def process_query(self, question: str, question_time: str = "") -> dict[str, list]:  # noqa: ARG002
        """Returns what is known about a question, the best first."""
        asked = words(question)
        turns = [(when, text) for (_, when), (_, texts) in SESSIONS.items() for text in texts]
        best = sorted(turns, key=lambda turn: -len(asked & words(turn[1])))[:7]
        (session, when), (summary, _) = max(SESSIONS.items(), key=lambda item: len(asked & words(" ".join(item[1][1]))))
        keys, themes = summary
        context = {}
        for number, (theme, told) in enumerate(themes.items(), 1):
            context |= {f"theme_{number}": theme, f"summary_{number}": told}
        triples = [triple for triple in TRIPLES if asked & words(" ".join(triple))]
        return {
            "triples": [{"src": head, "relation": relation, "tgt": tail} for head, relation, tail in triples],
            "chunks": [f"{when} {text}" for when, text in best],
            "summaries": [{"session_id": session, "session_time": when, "keys": keys, "context": context}],
        }


def main() -> None:
    """Asks the questions and prints what each resume has saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or the built-in model")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many questions are asked")
    parser.add_argument("--policy", default="epic:k=8", help="recovery policy, with its options")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--events", type=Path, help="a log with all texts, for `agentcache report`")
    parser.add_argument(
        "--ranks", action="store_true", help="put each chunk's rank before it, as LiCoMemory's prompt does"
    )
    args = parser.parse_args()
    policy, options = parse_policy(args.policy)

    with (
        AgentCache(args.model, max_model_len=4096, events=args.events, events_text=args.events is not None) as cache,
        ResumeTable(cache, title="answers in one conversation") as resumes,
    ):
        prompt = MemoryPrompt(system="Answer from the memories in one short sentence.")
        memory = LiCoMemory(
            cache=cache, processor=Processor(), ranks=args.ranks, prompt=prompt, policy=policy, policy_options=options
        )
        history: list[dict[str, str]] = []
        for question in QUESTIONS[: args.questions]:
            reply = memory.ask(question, episode="lico", history=history, max_tokens=args.tokens)
            print(f"Q {question}\nA {reply.text.strip()}\n  {reply.recovery}\n")
            history += [{"role": "user", "content": question}, {"role": "assistant", "content": reply.text}]
        resumes.show()
        if memory.chunks is not None:
            print(
                f"chunks: {memory.chunks.encoded} encoded, {memory.chunks.reused} times found encoded; encoding is not in the table"
            )


if __name__ == "__main__":
    main()
