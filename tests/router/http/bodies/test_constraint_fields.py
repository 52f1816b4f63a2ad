"""A form that cannot be kept is refused by the name of the field that it came in, and by its place in the schema."""

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
CHAT, TEXT = {"messages": HI}, {"prompt": "Hi"}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}
MESSAGE_FORMAT = {"type": "json_schema", "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "a", "parameters": SCHEMA, "strict": True}}
TAG = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}
REFUSED = [
    ("chat/completions", {**CHAT, "response_format": FORM}, "response_format.json_schema.schema"),
    ("completions", {**TEXT, "response_format": FORM}, "response_format.json_schema.schema"),
    ("completions", {"prompt": ["Hi", "Ho"], "response_format": FORM}, "response_format.json_schema.schema"),
    ("completions", {**TEXT, "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    ("chat/completions", {**CHAT, "structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    *(
        ("chat/completions", {**CHAT, "response_format": {"type": "structural_tag", **tags}}, "response_format")
        for tags in (
            {"structures": [{"begin": "<a>"}], "triggers": ["<a"]},
            {"structures": [TAG], "triggers": ["<b"]},
        )
    ),
    (
        "chat/completions",
        {**CHAT, "structured_outputs": {"structural_tag": {"structural_tag": {"structures": [TAG], "triggers": []}}}},
        "structured_outputs.structural_tag",
    ),
    ("chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "tools"),
    ("responses", {"input": "Hi", "text": {"format": FORMAT}}, "text.format.schema"),
    ("messages", {**CHAT, "max_tokens": 9, "output_config": {"format": MESSAGE_FORMAT}}, "output_config.format.schema"),
]


async def test_a_refused_form_is_named_as_the_body_has_it(templates, post):
    for path, body, field in REFUSED:
        answer = await post(f"/v1/{path}", body)
        assert answer.status == 400
        said = answer.object["error"]["message"]
        assert said.startswith(f"{field}: ")
        assert "constraint" not in said
        if field.endswith(("schema", "json")):
            assert '"uniqueItems"' in said and said.endswith("in properties.tags")
