"""Small real tokenizers with the chat templates of the model families in use.

Byte-level BPE trained on a few sentences, so that any text encodes and merges exist. The K3 one
also holds the markers of the older K2 format, which mean nothing in its template.
"""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

K2_MARKERS = ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"]
K3_MARKERS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]", "[EOS]"]

K3 = (
    "{%- for m in messages -%}"
    "{{- '<|open|>message role=\"' + m.role + '\"<|sep|>' -}}"
    "{%- if m.role == 'assistant' -%}"
    "{%- if m.reasoning_content is defined -%}"
    "{{- '<|open|>think<|sep|>' + m.reasoning_content + '<|close|>think<|sep|>' -}}"
    "{%- endif -%}"
    "{{- '<|open|>response<|sep|>' + m.content + '<|close|>response<|sep|>' -}}"
    "{%- else -%}{{- m.content -}}{%- endif -%}"
    "{{- '<|end_of_msg|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|open|>message role=\"assistant\"<|sep|>' -}}"
    "{%- if thinking -%}{{- '<|open|>think<|sep|>' -}}{%- endif -%}"
    "{%- endif -%}"
)
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (  # drops the thinking of every turn but the last, writes an empty one when switched off
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
KIMI_LINEAR = (  # the K2 format: a default system message, the role twice, no line breaks
    "{%- for m in messages -%}"
    "{%- if loop.first and m.role != 'system' -%}"
    "<|im_system|>system<|im_middle|>Default system.<|im_end|>"
    "{%- endif -%}"
    "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
SMOLLM2 = (  # ChatML with a default system message
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nDefault system.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA32 = (  # writes today's date into its system message
    "{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '01 Jan 2000' %}"
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date"
    " + '<|eot_id|>' }}" + LLAMA.removeprefix("{{ bos_token }}")
)
_TEXT = [
    "What is the total number of apples? The total is 12 apples. #### 12",
    "message role user assistant system think response You are a helpful assistant.",
    "Let me think step by step. First, 3 + 4 = 7.\n\nThen 7 + 5 = 12.\n",
]


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    text: str = tokenizer.to_str()
    return text


def tokenizer(template: str | None, special: list[str], **roles: str) -> PreTrainedTokenizerFast:
    """A fast tokenizer with `special` tokens at the end of its table."""
    backend = Tokenizer.from_str(_trained())
    backend.add_special_tokens(special)
    if "bos_token" in roles:  # as Llama's: encoding adds a begin token unless told not to
        bos = roles["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    wrapped.chat_template = template
    return wrapped


def k3() -> PreTrainedTokenizerFast:
    return tokenizer(K3, K2_MARKERS + K3_MARKERS, eos_token="[EOS]")


def k3_bare() -> PreTrainedTokenizerFast:
    """As Kimi K3 comes: its marks, three of them not special, and no template."""
    wrapped = tokenizer(None, [*K2_MARKERS, "<|end_of_msg|>", "[BOS]", "[EOS]"], eos_token="[EOS]")
    wrapped.add_tokens(["<|open|>", "<|close|>", "<|sep|>"])
    return wrapped


def kimi_linear() -> PreTrainedTokenizerFast:
    return tokenizer(KIMI_LINEAR, K2_MARKERS, eos_token="<|im_end|>")


def smollm2() -> PreTrainedTokenizerFast:
    return tokenizer(SMOLLM2, ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")


def chatml() -> PreTrainedTokenizerFast:
    """Its end of turn is not its end of text."""
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    return tokenizer(CHATML, special, eos_token="<|endoftext|>")


def llama(template: str = LLAMA) -> PreTrainedTokenizerFast:
    special = ["<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eos|>"]
    return tokenizer(template, special, bos_token="<|bos|>", eos_token="<|eos|>")


def qwen3() -> PreTrainedTokenizerFast:
    return tokenizer(QWEN3, ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
