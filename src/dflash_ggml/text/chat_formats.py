"""The chat formats that llama-cpp-python and llama.cpp know by name, as templates of our own.

Turn marks are those that each model's makers published. Where llama-cpp-python puts a system text of its own into a prompt,
these put only what the conversation holds; and every system message is rendered, where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

Around = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One turn format: what stands before and after each role's text, and what opens the answer.

    stop: strings that end an answer. joins: a system message opens the turn of the user after it.
    """

    system: Around
    user: Around
    assistant: Around
    opening: str
    stop: tuple[str, ...] = ()
    joins: bool = False

    @property
    def template(self) -> str:
        """Source of the chat template; results of tools read like words of the user."""
        around = {"system": self.system, "user": self.user, "tool": self.user, "assistant": self.assistant}
        goes_on = "loop.previtem and loop.previtem.role == 'system' and m.role != 'assistant'"
        before = f"('' if {goes_on} else around[m.role][0])" if self.joins else "around[m.role][0]"
        return (
            f"{{%- set around = {around!r} -%}}"
            f"{{%- for m in messages -%}}{{{{ {before} + m.content + around[m.role][1] }}}}{{%- endfor -%}}"
            f"{{%- if add_generation_prompt -%}}{{{{ {self.opening!r} }}}}{{%- endif -%}}"
        )


def _marked(mark: str, end: str, system: str, user: str, assistant: str, **more: Any) -> ChatFormat:
    """Turns that begin with a mark that names the role: {} is where the name goes."""
    opening = mark.format(assistant)
    return ChatFormat((mark.format(system), end), (mark.format(user), end), (opening, end), opening, **more)


CHATML = _marked(
    "<|im_start|>{}\n", "<|im_end|>\n", "system", "user", "assistant", stop=("<|im_end|>", "<|endoftext|>")
)
_LLAMA_3 = _marked(
    "<|start_header_id|>{}<|end_header_id|>\n\n",
    "<|eot_id|>",
    "system",
    "user",
    "assistant",
    stop=("<|eot_id|>",),
)
_ZEPHYR = _marked("<|{}|>\n", "</s>\n", "system", "user", "assistant", stop=("</s>",))

FORMATS: dict[str, ChatFormat] = {
    "chatml": CHATML,
    "qwen": CHATML,
    "llama-2": ChatFormat(
        ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"),
        ("[INST] ", " [/INST]"),
        (" ", " </s><s>"),
        "",
        ("</s>",),
        joins=True,
    ),
    "llama-3": _LLAMA_3,
    "mistral-instruct": ChatFormat(
        ("[INST] ", "\n\n"), ("[INST] ", " [/INST]"), ("", "</s>"), "", ("</s>",), joins=True
    ),
    "gemma": ChatFormat(
        ("<start_of_turn>user\n", "\n\n"),
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
        "<start_of_turn>model\n",
        ("<end_of_turn>",),
        joins=True,
    ),
    "zephyr": _ZEPHYR,
    "chatglm3": ChatFormat(
        ("<|system|>\n ", ""), ("<|user|>\n ", ""), ("<|assistant|>\n ", ""), "<|assistant|>", ("<|user|>",)
    ),
    "alpaca": ChatFormat(
        ("", "\n\n"),
        ("### Instruction:\n", "\n\n"),
        ("### Response:\n", "\n\n"),
        "### Response:\n",
        ("### Instruction", "</s>"),
    ),
    "vicuna": ChatFormat(("", " "), ("USER: ", " "), ("ASSISTANT: ", "</s>"), "ASSISTANT:", ("</s>",)),
    "oasst_llama": ChatFormat(
        ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"),
        ("<|prompter|>", "</s>"),
        ("<|assistant|>", "</s>"),
        "<|assistant|>",
        ("</s>",),
    ),
    "baichuan": ChatFormat(
        ("", ""),
        ("<reserved_102>", ""),
        ("<reserved_103>", ""),
        "<reserved_103>",
        ("<reserved_102>",),
    ),
    "baichuan-2": ChatFormat(
        ("", ""),
        ("<reserved_106>", ""),
        ("<reserved_107>", ""),
        "<reserved_107>",
        ("<reserved_106>",),
    ),
    "openbuddy": ChatFormat(
        ("", "\n\n"), ("User: ", "\n"), ("Assistant: ", "\n"), "Assistant:", ("\nUser:",)
    ),
    "redpajama-incite": ChatFormat(
        ("", "\n"), ("<human>: ", "\n"), ("<bot>: ", "\n"), "<bot>:", ("<human>",)
    ),
    "snoozy": ChatFormat(
        ("### Instruction:\n", "\n"),
        ("### Prompt: ", "\n"),
        ("### Response: ", "\n"),
        "### Response:",
        ("### Prompt",),
    ),
    "phind": ChatFormat(
        ("### System Prompt\n", "\n\n"),
        ("### User Message\n", "\n\n"),
        ("### Assistant\n", "\n\n"),
        "### Assistant\n",
        ("### User Message",),
    ),
    "intel": ChatFormat(
        ("### System:\n", "\n"),
        ("### User:\n", "\n"),
        ("### Assistant:\n", "\n"),
        "### Assistant:\n",
        ("### User:",),
    ),
    "open-orca": ChatFormat(
        ("", "<|end_of_turn|>\n"),
        ("User: ", "<|end_of_turn|>\n"),
        ("Assistant: ", "<|end_of_turn|>\n"),
        "Assistant: ",
        ("<|end_of_turn|>",),
    ),
    "mistrallite": ChatFormat(
        ("<|system|>", "</s>"),
        ("<|prompter|>", "</s>"),
        ("<|assistant|>", "</s>"),
        "<|assistant|>",
        ("</s>",),
    ),
    "pygmalion": ChatFormat(
        ("<|system|>", ""), ("<|user|>", ""), ("<|model|>", ""), "<|model|>", ("<|user|>",)
    ),
    "openchat": ChatFormat(
        ("", "<|end_of_turn|>"),
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
        ("<|end_of_turn|>",),
    ),
    "saiga": ChatFormat(
        ("<s>system\n", "</s>"), ("<s>user\n", "</s>"), ("<s>bot\n", "</s>"), "<s>bot\n", ("</s>",)
    ),
}


def named_template(name: str) -> str:
    """The template of a format by its name here or in llama.cpp (`llama3`). Raises ConfigError listing the known ones."""
    found = {key.replace("-", ""): form for key, form in FORMATS.items()}.get(name.replace("-", ""))
    if found is None:
        raise ConfigError(
            f"{name!r} is no known chat format: give the template itself, or one of {', '.join(FORMATS)}"
        )
    return found.template
