"""Types of the dicts that `Llama` takes and returns (OpenAI's shapes, and what this package adds to them).

The names are llama-cpp-python's. They are made from a table: a type, then its keys and theirs, `?` for one that may be missing.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import or_
from types import new_class
from typing import Any, Literal, Union

try:  # pydantic, which brings it along, takes no other before Python 3.12
    from typing_extensions import TypedDict
except ImportError:
    from typing import TypedDict

JsonType = Union[None, int, str, bool, list[Any], dict[str, Any]]

_SHAPES = """
EmbeddingUsage prompt_tokens:int total_tokens:int
Embedding index:int object:str embedding:list[float]|list[list[float]]
CreateEmbeddingResponse object:Literal['list'] model:str data:list[Embedding] usage:EmbeddingUsage
CompletionUsage prompt_tokens:int completion_tokens:int total_tokens:int prompt_tokens_details?:dict[str,int]
    completion_tokens_details?:dict[str,int]
CompletionLogprobs text_offset:list[int] token_logprobs:list[float|None] tokens:list[str]
    top_logprobs:list[dict[str,float]|None]
CompletionChoice text:str index:int logprobs:CompletionLogprobs|None finish_reason:Literal['stop','length']|None
CreateCompletionResponse id:str object:Literal['text_completion'] created:int model:str choices:list[CompletionChoice]
    usage?:CompletionUsage timings?:dict[str,Any]
NamedFunction name:str
ChatCompletionFunctionCall name:str arguments:str
ChatCompletionMessageToolCall id:str type:Literal['function'] function:ChatCompletionFunctionCall
ChatCompletionRequestMessageContentPartText type:Literal['text'] text:str
ChatCompletionRequestMessageContentPartImageImageUrl url:str detail?:Literal['auto','low','high']
ChatCompletionRequestMessageContentPartImage type:Literal['image_url']
    image_url:str|ChatCompletionRequestMessageContentPartImageImageUrl
ChatCompletionRequestSystemMessage role:Literal['system'] content:str|None
ChatCompletionRequestUserMessage role:Literal['user'] content:str|list[ChatCompletionRequestMessageContentPart]|None
ChatCompletionRequestAssistantMessage role:Literal['assistant'] content?:str reasoning_content?:str
    tool_calls?:list[ChatCompletionMessageToolCall] function_call?:ChatCompletionFunctionCall
ChatCompletionRequestToolMessage role:Literal['tool'] content:str|None tool_call_id:str
ChatCompletionRequestFunctionMessage role:Literal['function'] content:str|None name:str
ChatCompletionFunction name:str parameters:dict[str,Any] description?:str strict?:bool
ChatCompletionTool type:Literal['function'] function:ChatCompletionFunction
ChatCompletionNamedToolChoice type:Literal['function'] function:NamedFunction
ChatCompletionRequestResponseFormat type:Literal['text','json_object','json_schema'] schema?:JsonType
    json_schema?:dict[str,Any]
ChatCompletionTopLogprobToken token:str logprob:float bytes:list[int]|None
ChatCompletionLogprobToken token:str logprob:float bytes:list[int]|None
    top_logprobs:list[ChatCompletionTopLogprobToken]
ChatCompletionLogprobs content:list[ChatCompletionLogprobToken]|None refusal:list[ChatCompletionLogprobToken]|None
ChatCompletionResponseMessage role:Literal['assistant'] content:str|None reasoning_content?:str
    tool_calls?:list[ChatCompletionMessageToolCall] function_call?:ChatCompletionFunctionCall
ChatCompletionResponseChoice index:int message:ChatCompletionResponseMessage logprobs:ChatCompletionLogprobs|None
    finish_reason:Literal['stop','length','tool_calls']|None
CreateChatCompletionResponse id:str object:Literal['chat.completion'] created:int model:str
    choices:list[ChatCompletionResponseChoice] usage:CompletionUsage timings?:dict[str,Any]
ChatCompletionMessageToolCallChunkFunction name?:str|None arguments?:str
ChatCompletionMessageToolCallChunk index:int function:ChatCompletionMessageToolCallChunkFunction id?:str
    type?:Literal['function']
ChatCompletionStreamResponseDeltaFunctionCall name?:str arguments?:str
ChatCompletionStreamResponseDeltaEmpty
ChatCompletionStreamResponseDelta role?:Literal['assistant'] content?:str reasoning_content?:str
    tool_calls?:list[ChatCompletionMessageToolCallChunk] function_call?:ChatCompletionStreamResponseDeltaFunctionCall
ChatCompletionStreamResponseChoice index:int
    delta:ChatCompletionStreamResponseDelta|ChatCompletionStreamResponseDeltaEmpty
    logprobs:ChatCompletionLogprobs|None finish_reason:Literal['stop','length','tool_calls']|None
CreateChatCompletionStreamResponse id:str model:str object:Literal['chat.completion.chunk'] created:int
    choices:list[ChatCompletionStreamResponseChoice] usage?:CompletionUsage timings?:dict[str,Any]
"""
_UNIONS: dict[str, list[Any]] = {
    "ChatCompletionRequestMessageContentPart": [
        f"ChatCompletionRequestMessageContentPart{kind}" for kind in ("Text", "Image")
    ],
    "ChatCompletionRequestMessage": [
        f"ChatCompletionRequest{role}Message" for role in ("System", "User", "Assistant", "Tool", "Function")
    ],
    "ChatCompletionRequestFunctionCall": [Literal["none", "auto"], "NamedFunction"],
    "ChatCompletionToolChoiceOption": [Literal["none", "auto", "required"], "ChatCompletionNamedToolChoice"],
}
# a type, and its other names
_SAME = """
Embedding EmbeddingData
CreateCompletionResponse Completion CompletionChunk CreateCompletionStreamResponse
NamedFunction ChatCompletionFunctionCallOption ChatCompletionRequestFunctionCallOption
    ChatCompletionNamedToolChoiceFunction
ChatCompletionFunction ChatCompletionFunctions ChatCompletionToolFunction ChatCompletionResponseFunction
ChatCompletionFunctionCall ChatCompletionMessageToolCallFunction ChatCompletionRequestAssistantMessageFunctionCall
    ChatCompletionResponseFunctionCall
CreateChatCompletionResponse ChatCompletion
CreateChatCompletionStreamResponse ChatCompletionChunk ChatCompletionStreamResponse
ChatCompletionResponseMessage ChatCompletionMessage
ChatCompletionResponseChoice ChatCompletionChoice
ChatCompletionStreamResponseChoice ChatCompletionChunkChoice
ChatCompletionStreamResponseDelta ChatCompletionChunkDelta
ChatCompletionStreamResponseDeltaEmpty ChatCompletionChunkDeltaEmpty
"""


def _entries(table: str) -> list[list[str]]:
    """The words of each entry; an indented line goes on."""
    return [entry.split() for entry in table.replace("\n    ", " ").strip().splitlines()]


def _typed_dict(name: str, keys: list[str]) -> Any:
    """A TypedDict, as class statements make one: with the keys that must be there, then a subclass with the others."""
    types = dict(key.split(":") for key in keys)
    must = {key: kind for key, kind in types.items() if not key.endswith("?")}
    may = {key[:-1]: kind for key, kind in types.items() if key.endswith("?")}
    base = new_class(name, (TypedDict,), exec_body=partial(_fill, must))
    return new_class(name, (base,), {"total": False}, partial(_fill, may)) if may else base


def _fill(keys: dict[str, str], namespace: dict[str, Any]) -> None:
    namespace |= {"__module__": __name__, "__annotations__": keys}


TYPES: dict[str, Any] = {name: _typed_dict(name, keys) for name, *keys in _entries(_SHAPES)}
TYPES |= {
    name: reduce(or_, [TYPES[part] if isinstance(part, str) else part for part in parts])
    for name, parts in _UNIONS.items()
}
TYPES |= {name: TYPES[first] for first, *names in _entries(_SAME) for name in names}
TYPES |= {"JsonType": JsonType, "ChatCompletionFunctionParameters": dict[str, Any]}
_call: Any = TYPES["ChatCompletionMessageToolCall"]
TYPES["ChatCompletionMessageToolCalls"] = list[_call]
globals().update(TYPES)
