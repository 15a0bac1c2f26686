from agentcache import AgentCache, ResumeTable
from agentcache.samples import load_hotpot_sample

documents = "\n\n".join(p.text for item in load_hotpot_sample()[:2] for p in item.paragraphs)
record = {"role": "tool", "content": "Record 4711: provisional, 3 sources."}
messages = [{"role": "user", "content": "Is it confirmed?"}, record, {"role": "user", "content": documents}]

with AgentCache("smollm2", policy="edit_local") as cache, ResumeTable(cache) as resumes:  # or a folder, or a hub id
    episode = cache.episode("thread-1")
    episode.generate(messages, max_tokens=16)  # version 1: its KV is kept when the reply ends
    record["content"] = "Record 4711: confirmed by two editors, 5 sources."  # an edit in the middle
    episode.generate(messages, max_tokens=16)  # version 2: diff, restore, recompute
    resumes.show()  # `generate` returns a reply whose `recovery` says the same
