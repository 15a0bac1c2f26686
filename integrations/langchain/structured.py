"""`with_structured_output`: a schema's instances, by a forced tool call or by a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, cast, get_args

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from agentcache.errors import ConfigError

__all__ = ["Method", "structured"]

Method = Literal["function_calling", "json_schema", "json_mode"]


def structured(
    model: BaseChatModel,
    schema: Mapping[str, Any] | type,
    method: Method,
    *,
    strict: bool | None,
    include_raw: bool,
    options: Mapping[str, Any],
) -> Runnable[LanguageModelInput, Any]:
    """Returns a runnable that gives instances of a schema: objects of a pydantic class, dicts for any other.

    Args:
        model: The chat model.
        schema: A pydantic class, a typed dict, a JSON schema or an OpenAI function.
        method: `function_calling` forces a call of a tool with this schema, `json_schema` a reply that follows it, `json_mode` a
            reply in JSON: the prompt must say which.
        strict: Whether the tool's arguments must follow the schema; None: yes.
        include_raw: Whether the message comes with it, as `{"raw", "parsed", "parsing_error"}`.
        options: Further arguments of each call.

    Raises:
        ConfigError: The method is unknown.
    """
    if method not in get_args(Method):
        raise ConfigError(f"unknown method {method!r}; there are {', '.join(get_args(Method))}")
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    parser: Runnable[Any, Any]
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        bound = model.bind_tools(
            [schema],
            tool_choice=name,
            strict=strict,
            parallel_tool_calls=False,
            ls_structured_output_format=traced,
            **options,
        )
        if is_class:
            parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
        else:
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    else:
        bound = model.bind(response_format=_format(schema, method), ls_structured_output_format=traced, **options)
        parser = PydanticOutputParser(pydantic_object=cast("type[Any]", schema)) if is_class else JsonOutputParser()
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _format(schema: Mapping[str, Any] | type, method: Method) -> dict[str, Any]:
    if method == "json_mode":
        return {"type": "json_object"}
    plain = convert_to_json_schema(schema)
    return {"type": "json_schema", "json_schema": {"name": str(plain.get("title", "reply")), "schema": plain}}
