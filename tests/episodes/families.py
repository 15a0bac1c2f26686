"""Tokenizers without a model: a small real BPE behind chat templates that behave like those of the model families."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "the capital of france is paris and the capital of spain is madrid, said the tool result " * 4,
    "hello world " * 9,
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops the thinking of replies before the last user message, merges tool results into one turn, sorts tools by length.
THINKING = (
    "{% if tools %}<|im_start|>system\n{% for t in tools | sort(attribute='function.description') %}{{ t | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + c + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ c | trim }}"
    "{% for k in m.tool_calls or [] %}\n<tool_call>{{ k.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Turns are opened, never closed; the reply is stripped; empty thinking is written.
OPENERS = (
    "<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
    "{% if m.role == 'assistant' %}<think></think>\n{{ m.content.strip() }}{% for c in m.tool_calls or [] %}"
    "\n<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "\n<arg>{{ k }}={{ v }}</arg>{% endfor %}\n</tool_call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Arguments must be JSON text, a missing content must be None, system messages are collected in front, results are JSON.
STRINGS = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}<|assistant|>{% for c in m.tool_calls %}<|call|>"
    "{{ c.function.name + ' ' + c.function.arguments }}<|endcall|>{% endfor %}<|eos|>"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|eos|>{% endif %}"
    "{% if m.role == 'tool' %}<|output|>{{ {'output': m.content} | tojson }}<|endoutput|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# No special tokens at all; the system message is part of the first user turn.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>\n\n"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} \n"
    "{% else %}[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "openers": OPENERS, "strings": STRINGS, "plain": PLAIN}
SPECIALS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "thinking": ["<|im_start|>", "<|im_end|>"],
    "openers": ["<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "strings": [
        "<bos>",
        "<|user|>",
        "<|assistant|>",
        "<|call|>",
        "<|endcall|>",
        "<|output|>",
        "<|endoutput|>",
        "<|eos|>",
    ],
    "plain": [],
}
ENDS = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "strings": "<|eos|>"}


def make_tokenizer(template, specials=(), eos="</s>", **kwargs):
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[]
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in {*specials, eos}])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, **kwargs)
    tokenizer.chat_template = template
    return tokenizer
