"""The tokenizers of `families`, made once, and the real one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from agentcache.episodes.render import Renderer
from tests.episodes.families import ENDS, SPECIALS, TEMPLATES, make_tokenizer


@pytest.fixture(scope="session")
def family():
    """Returns the tokenizer of a template family, made once."""
    return cache(lambda name: make_tokenizer(TEMPLATES[name], SPECIALS[name], ENDS.get(name, "</s>")))


@pytest.fixture(scope="session")
def renderer(family):
    """Returns the renderer of a template family, made once."""
    return cache(lambda name: Renderer(family(name)))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)
