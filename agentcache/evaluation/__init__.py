"""What policies do to answers and to time, measured: the papers' tables on real models.

Each part is one command of `agentcache eval`; it measures item by item, goes on where it was interrupted, and writes JSON that
names the model, the data, the seeds and the machine.
"""
