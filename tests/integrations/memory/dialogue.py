"""A conversation of two friends over months, in the form of LoCoMo's, and a writer of notes that needs no model."""

from __future__ import annotations

import json
import re
from typing import Any

TURNS = [
    ("9:10 am on 3 March, 2023", "Ann", "I finally adopted a cat from the shelter on Mill Road, she is grey and I named her Miso."),
    ("9:14 am on 3 March, 2023", "Bob", "Lovely! My bike was stolen near the station last night, I walked home in the rain for an hour."),
    ("6:02 pm on 19 March, 2023", "Ann", "Miso knocked over both of my tomato plants today, the balcony looks like a battlefield now."),
    ("6:05 pm on 19 March, 2023", "Bob", "The police found my bike in the canal, the frame is bent but the dynamo hub still works."),
    ("8:40 pm on 7 April, 2023", "Ann", "I passed the interview at the botanical garden, I start as a junior gardener on the first of May."),
    ("8:44 pm on 7 April, 2023", "Bob", "Congratulations! I am learning to weld so that I can repair the frame with my uncle in Ghent."),
    ("7:30 am on 21 May, 2023", "Ann", "My first orchid in the tropical house flowered this week, the head gardener said it was luck."),
    ("7:33 am on 21 May, 2023", "Bob", "I rode the welded bike from Ghent to Bruges, forty-six kilometres, and only the chain complained."),
]  # fmt: skip

FIELD = re.compile(
    r"memory content: (.*?)\tmemory context: (.*?)\tmemory keywords: (.*?)\tmemory tags: (\[.*?\])$", re.M
)


def note(speaker: str, text: str) -> str:
    """Returns a turn as LoCoMo's notes have it."""
    return f"Speaker {speaker}says : {text}"


class Writer:
    """Stands where A-Mem has its language model: keywords are long words, and evolution rewrites what `rewrites` says.

    Attributes:
        rewrites: New contexts by a word of the neighbour's content; empty: nothing evolves.
        calls: How many notes and neighbourhoods it was asked about.
    """

    def __init__(self) -> None:
        self.rewrites: dict[str, str] = {}
        self.calls = 0

    def get_completion(self, prompt: str, response_format: Any = None, temperature: float = 1.0) -> str:
        """Returns the JSON that A-Mem asks for."""
        self.calls += 1
        if "memory evolution agent" not in prompt:
            content = prompt.rsplit("Content for analysis:", 1)[1].strip()
            words = [*dict.fromkeys(word.strip(".,!").lower() for word in content.split() if len(word) > 6)]
            return json.dumps(
                {
                    "keywords": words[:4],
                    "context": f"A chat about {' and '.join(words[:2])}.",
                    "tags": ["conversation", *words[:1]],
                }
            )
        neighbours = FIELD.findall(prompt)
        contexts = [
            next((new for word, new in self.rewrites.items() if word in content), old)
            for content, old, _, _ in neighbours
        ]
        return json.dumps(
            {
                "should_evolve": bool(self.rewrites),
                "actions": ["update_neighbor"],
                "suggested_connections": [],
                "tags_to_update": [],
                "new_context_neighborhood": contexts,
                "new_tags_neighborhood": [json.loads(tags.replace("'", '"')) for *_, tags in neighbours],
            }
        )
