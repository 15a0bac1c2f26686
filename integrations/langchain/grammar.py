"""Grammars that leave a model no room to ramble: between the parts of JSON stands one character of whitespace at most.

Models that were not trained on a schema fill free whitespace until they run out of tokens. Import it only after an engine has
started, which imports vLLM quietly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

__all__ = ["BACKENDS", "tightened"]

BACKENDS: Final = ("auto", "xgrammar")
"""vLLM's back ends of structured outputs that can bound whitespace."""

_MOST_WHITESPACE: Final = 1


def tightened(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Returns a constraint with bounded whitespace; one that is not JSON's, or that xgrammar does not know, as it is."""
    if params.structural_tag is not None:
        tag = json.loads(params.structural_tag)
        return params if "structures" in tag else _tag(_bounded(tag))
    schema = {"type": "object"} if params.json_object else params.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if schema is None or has_xgrammar_unsupported_json_features(schema):
        return params
    return _tag(_bounded({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}))


def _tag(tag: Mapping[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=json.dumps(tag))


def _bounded(node: Any) -> Any:
    if isinstance(node, list):
        return [_bounded(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema" and "json_schema" in node:
        return node | {"max_whitespace_cnt": _MOST_WHITESPACE} if node.get("style", "json") == "json" else node
    return {key: _bounded(value) for key, value in node.items()}
