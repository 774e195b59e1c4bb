"""The chat template: K3's message layout as jinja.

Every message is ``<|open|>message role="..."<|sep|>``, its content, ``<|end_of_msg|>``. That of the
assistant may first hold its reasoning, ``<|open|>think<|sep|>...<|close|>think<|sep|>``. Only the
marks are special tokens; role names and tag names are ordinary text. The template writes ``[BOS]``
itself and the tokenizer adds nothing, so a rendered chat never starts with two. The generation
prompt is the assistant header; no system message and no thinking are added.
"""

from __future__ import annotations

BOS, EOS = "[BOS]", "[EOS]"
END_OF_MESSAGE = "<|end_of_msg|>"
OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
MASK, UNK, PAD = "<|MASK|>", "[UNK]", "[PAD]"
K2_MARKS = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
"""Turn marks of the previous model generation. K3 keeps them in its vocabulary and never writes
them, so code that picks a turn format by looking at the vocabulary finds no turns."""

SPECIAL_TOKENS = (BOS, EOS, END_OF_MESSAGE, OPEN, CLOSE, SEP, MASK, *K2_MARKS, UNK, PAD)
"""In the order of their ids, which end the vocabulary."""

ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role not in ["system", "user", "assistant"] -%}
    {{- raise_exception("unknown role " ~ message.role ~ "; expected system, user or assistant") -}}
  {%- endif -%}
  {{- '<|open|>message role="' ~ message.role ~ '"<|sep|>' -}}
  {%- if message.role == "assistant" -%}
    {%- generation -%}
      {%- if message.reasoning_content -%}
        {{- "<|open|>think<|sep|>" ~ message.reasoning_content ~ "<|close|>think<|sep|>" -}}
      {%- endif -%}
      {{- message.content ~ "<|end_of_msg|>" -}}
    {%- endgeneration -%}
  {%- else -%}
    {{- message.content ~ "<|end_of_msg|>" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|open|>message role="assistant"<|sep|>' -}}
{%- endif -%}
"""


def header(role: str) -> str:
    """The text that opens a message of `role`."""
    return f'{OPEN}message role="{role}"{SEP}'
