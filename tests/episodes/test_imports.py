import subprocess
import sys


def test_episodes_and_events_import_neither_torch_nor_vllm_nor_transformers():
    heavy = "{'torch', 'vllm', 'transformers'}"
    code = f"import sys, agentcache.episodes, agentcache.episodes.bench, agentcache.events; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
