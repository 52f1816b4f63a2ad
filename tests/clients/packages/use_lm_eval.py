"""lm-eval: tasks of its own making, by completions with the log probabilities of the prompt, and by chats."""

import json
import tempfile
from pathlib import Path

import lm_eval
from cases import BASE, MODEL, run
from lm_eval.tasks import TaskManager

FOLDER = Path(tempfile.mkdtemp(prefix="lm-eval-"))
QUESTIONS = [
    {"question": "The sky is", "choices": ["blue", "cheese"], "answer": 0, "text": "blue"},
    {"question": "Water is", "choices": ["a stone", "wet"], "answer": 1, "text": "wet"},
    {"question": "Two and two are", "choices": ["four", "a cat"], "answer": 0, "text": "four"},
]
COMMON = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = (
    COMMON
    + """task: tiny_choices
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
)
TEXTS = (
    COMMON
    + """task: tiny_texts
output_type: generate_until
doc_to_target: text
generation_kwargs: {{until: ["."], max_gen_toks: 12, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""
)


def evaluate(model, path, task, **options):
    """What each question got: the log probabilities of its answers, or a text."""
    arguments = {"model": MODEL, "base_url": f"{BASE}/{path}", "num_concurrent": 2, "max_retries": 9, **options}
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0,
        apply_chat_template="chat" in model,
    )  # fmt: skip
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(QUESTIONS)
    return [sample["resps"] for sample in samples]


data = FOLDER / "questions.jsonl"
data.write_text("\n".join(map(json.dumps, QUESTIONS)))
for name, text in (("choices", CHOICES), ("texts", TEXTS)):
    FOLDER.joinpath(f"{name}.yaml").write_text(text.format(data=data))
tasks = TaskManager(include_path=str(FOLDER), include_defaults=False)
run(
    likelihoods=lambda: evaluate("local-completions", "completions", "tiny_choices"),
    likelihoods_of_texts=lambda: evaluate("local-completions", "completions", "tiny_choices", tokenized_requests=False),
    texts=lambda: evaluate("local-completions", "completions", "tiny_texts"),
    chats=lambda: evaluate("local-chat-completions", "chat/completions", "tiny_texts"),
)
