"""Anthropic's own package, unchanged, with pictures: python pictures.py http://HOST:PORT MODEL docs/pictures.md.

It runs the example of the page, in a folder that has cat.png. Its last line is what it got, as JSON.
"""

import json
import re
import sys
from pathlib import Path

base, model, page = sys.argv[1:]
code = re.findall(r"```python\n(.*?)```", Path(page).read_text(encoding="utf-8"), re.DOTALL)[1]
code = code.replace("http://127.0.0.1:58051", base).replace("Qwen2.5-VL-3B-Instruct", model)
example: dict = {}
code = code.replace("max_tokens=60", "max_tokens=8, extra_body={'temperature': 0}")
exec(compile(code, page, "exec"), example)  # noqa: S102  what the page tells users to run, and not a copy of it
client, anthropic, blocks, answer = (example[name] for name in ("client", "anthropic", "blocks", "answer"))
asked = {"model": model, "max_tokens": 8, "extra_body": {"temperature": 0}}
turns = [{"role": "user", "content": blocks}]
counted = client.messages.count_tokens(model=model, messages=turns)
again = client.messages.create(**asked, messages=turns)
with client.messages.stream(**asked, messages=turns) as stream:
    streamed = "".join(stream.text_stream)
use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
looked = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": [use]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": blocks}]},
]
result = client.messages.count_tokens(model=model, messages=looked)

errors = []
for source in (
    {"type": "base64", "media_type": "image/png", "data": "????"},
    {"type": "url", "url": "https://example.com/a.png"},
    {"type": "file", "file_id": "f"},
):
    try:
        client.messages.create(**asked, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    except anthropic.APIStatusError as error:
        said = error.body["error"]["message"]
        errors.append([type(error).__name__, error.status_code, said])


print(
    json.dumps(
        {
            "text": answer.content[0].text,
            "again": again.content[0].text,
            "streamed": streamed,
            "prompt": answer.usage.input_tokens + answer.usage.cache_read_input_tokens,
            "counted": counted.input_tokens,
            "result": result.input_tokens,
            "errors": errors,
        }
    )
)
