"""`python -m agentcache.weights_gguf FILE FOLDER`: writes a GGUF model as a Hugging Face folder in bfloat16."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

__all__ = ["dequantise"]


def dequantise(gguf: Path, folder: Path) -> None:
    """Writes config, weights (bfloat16) and tokenizer of a GGUF file to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = copy.deepcopy(loaded.config)
    del config.quantization_config  # transformers refuses to save a model that says it is GGUF
    plain = type(loaded)(config).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
