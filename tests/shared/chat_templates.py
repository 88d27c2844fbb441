"""Chat templates in the styles of well-known models, and chats."""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    # The roles between two marks; the assistant's turns are marked for training.
    "chatml": """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    # Headers, the text's begin first, a date in the system's message, which is always there.
    "llama3": """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    # Rotations that must alternate, no system's message of its own, the assistant by another name.
    "gemma": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate: user, assistant, user, …") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
""",
    # Instructions in brackets; a namespace, a macro, loop controls, JSON with an indent.
    "mistral": """\
{%- macro instruction(text) %}[INST] {{ text }}[/INST]{% endmacro %}
{%- set state = namespace(system='', users=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set state.system = message.content + '\\n\\n' %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- set state.users = state.users + 1 %}
        {{- instruction(state.system + message.content) }}
        {%- set state.system = '' %}
    {%- elif message.role == 'assistant' %}
        {%- generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- '[RESULTS] ' ~ {'call': loop.index, 'content': message.content} | tojson(indent=2) }}
    {%- endif %}
{%- endfor %}
{# A comment, and lines that are blocks alone. #}
{% if tools is not none %}
[TOOLS] {{ tools | length }}
{% endif %}
{{ state.users }} asked
""",
    # What earlier answers had thought is left out; the last one has thought, if only nothing.
    "qwen3": """\
{%- set last = namespace(question=0) %}
{%- for message in messages if message.role == 'user' %}
    {%- set last.question = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- set thought, _, said = message.content.rpartition('</think>') %}
    {%- if message.role == 'assistant' and loop.index0 > last.question %}
        {{- '<think>\\n' + thought.replace('<think>', '').strip() + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- (said.lstrip() if message.role == 'assistant' else said) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    # No turn has an end: the marker of the next one ends it.
    "glm": """\
[gMASK]<sop>
{%- for message in messages %}
    {{- '<|' + ('observation' if message.role == 'tool' else message.role) + '|>\\n' }}
    {{- message.content }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}
""",
    # A chat that waits for no answer has an end of its own.
    "phi3": """\
{% for message in messages %}
{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}
""",
}

CHATS = {
    "a question": [{"role": "user", "content": "  What is 1 < 2 & 'é' in 日本?\n"}],
    "turns": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! 😀"},
        {"role": "user", "content": "And you?"},
        {"role": "assistant", "content": "Fine.\n\n"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"a": "<int>"}}}]
