"""LangChain's conformance suites, set up for `ChatAgentCache`.

What the suites skip, each for a capability that is declared below or that a model of text has not:

| test | why |
|---|---|
| `test_*_with_model_override` | an engine runs one model (`supports_model_override`) |
| `test_init_from_env` | no setting is read from the environment (`init_from_env_params`) |
| `test_serdes` | a running engine cannot be serialised (`is_lc_serializable`) |
| `test_json_mode` | SmolLM2 cannot keep to a schema that only the prompt names (`supports_json_mode`) |
| `test_image_*`, `test_pdf_*`, `test_audio_*` | the engine's models read text (`supports_*_inputs`, `supports_*_tool_message`) |
| `test_anthropic_inputs` | Anthropic's tool results inside a user's message (`supports_anthropic_inputs`) |
| `test_agent_loop` | SmolLM2 calls no tool unless it is forced to; `test_tool_model.py` runs it on a model that does |
| `test_stream_time` | recorded network traffic, of which there is none (`enable_vcr_tests`) |
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from agentcache import AgentCache
from agentcache.integrations.langchain import ChatAgentCache

__all__ = ["TOOL_MODEL", "TOOL_MODEL_VARIABLE", "Conformance"]

TOOL_MODEL_VARIABLE = "AGENTCACHE_TOOL_MODEL"
TOOL_MODEL = os.environ.get(TOOL_MODEL_VARIABLE)

_TEXT_TOKENS = 12
_FORM_TOKENS = 112
_ENDS = ('"', '."', '?"', '!"', '",', '"}')
_TOWARDS_THE_END = 12.0  # logits
_WORDS = ("tool", "_call", "call", "name", "arguments", "setup", "punchline", "magic", "function", "input", "rating")
"""Of the forms' frames: the grammar leaves SmolLM2 one way to spell them, and it would go letter by letter."""
_TOWARDS_WORDS = 6.0
_READ = ("unicode", "bind_runnables", "agent")
"""Of tests that look at what stands in a string, or leave the call to the model."""


class Conformance(ChatModelIntegrationTests):
    """The suite that calls the model. A subclass sets `running`."""

    running: ClassVar[AgentCache]

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAgentCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"cache": self.running, "policy": "edit_local", "timeout": 300.0}

    @pytest.fixture
    def model(self, request: Any) -> BaseChatModel:
        """The model of one test: few tokens where only text is wanted."""
        forms = any(part in request.node.name for part in ("tool", "structured", "json", "agent"))
        params = {
            **self.standard_chat_model_params,
            **self.chat_model_params,
            **(getattr(request, "param", None) or {}),
        }
        if forms and not any(part in request.node.name for part in _READ):
            bias = self._towards(_WORDS, _TOWARDS_WORDS) | self._towards(_ENDS, _TOWARDS_THE_END)
            # Greedy, SmolLM2 repeats itself in a joke without end.
            penalty = {"repetition_penalty": 1.1} if "structured_output" in request.node.name else {}
            params["extra"] = {"logit_bias": bias, **penalty}
        return ChatAgentCache(**{**params, "max_tokens": _FORM_TOKENS if forms else _TEXT_TOKENS})

    def _towards(self, pieces: tuple[str, ...], logits: float) -> dict[int, float]:
        """Returns a bias towards pieces of text that are one token each: what stands in a form matters to few tests, and each takes time."""
        encoded = (self.running.tokenizer.encode(piece, add_special_tokens=False) for piece in pieces)
        return {ids[0]: logits for ids in encoded if len(ids) == 1}

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[Any, list[Any]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatAgentCache(**self.chat_model_params, max_tokens=4)
        facts = " ".join(f"Item {i} weighs {7 * i} grams." for i in range(24))
        question = HumanMessage(f"{facts} How heavy is item 7?")
        first = model.invoke([question])
        more = [question, first, HumanMessage("And item 8?")]
        if not stream:
            reply = model.invoke(more)
        else:
            chunks = list(model.stream(more))
            reply = sum(chunks[1:], chunks[0])
        assert reply.usage_metadata is not None and reply.usage_metadata["input_token_details"]["cache_read"] > 200
        return reply
