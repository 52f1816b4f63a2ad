"""A real (tiny) model in a folder: weights, tokenizer and chat template as people have them."""

import pytest
import transformers
from folder_llama import folder_llama

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TEMPLATE = (
    "{% if tools %}<|im_start|>{{ tools | tojson }}{% endif %}{% if enable_thinking %}<|im_start|>think{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "eos_token_id": None}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a tiny Llama with a byte tokenizer and a chat template, and the model as transformers runs it."""
    folder = folder_llama(tmp_path_factory.mktemp("model"), **SIZES)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
