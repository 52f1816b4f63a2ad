"""Paths that other servers have and octavo has not, and what to use instead."""

COMPLETIONS = "use /v1/completions"
CHATS = "use /v1/chat/completions"
TEXT_ALONE = "octavo takes text, pictures and speech, and makes text"
TRANSCRIBED = "use /v1/audio/transcriptions, with task: translate"
NO_FILES = "octavo keeps no files, batches or conversations; send each request by itself"
GENERATES = "octavo serves models that generate text; there are /v1/completions and /v1/chat/completions"
VECTORS = "use /v1/embeddings"
COUNTED = "use /tokenize with messages, or /v1/messages/count_tokens"
BY_HAND = "octavo has no such call over HTTP; see the command octavo, and --web-listen for metrics"
INSTEAD = {
    # llama.cpp
    "/completion": f"{COMPLETIONS}, where n_predict is max_tokens",
    "/completions": COMPLETIONS,
    "/chat/completions": CHATS,
    "/embedding": VECTORS,
    "/embeddings": VECTORS,
    "/reranking": "use /v1/rerank",
    "/models": "use /v1/models",
    "/infill": "write the model's own marks for a gap into the prompt of /v1/completions",
    "/apply-template": "use /tokenize with messages, then /detokenize",
    "/props": "use /v1/models",
    "/slots": BY_HAND,
    "/lora-adapters": "use /v1/models, where adapters stand beside models, and an adapter's name as model",
    "/v1/health": "use /health",
    "/v1/reranking": "use /v1/rerank",
    # vLLM
    "/invocations": f"{CHATS}, or /v1/completions",
    "/ping": "use /health",
    "/load": BY_HAND,
    "/metrics": "metrics are on --web-listen",
    "/pooling": VECTORS,
    "/classify": GENERATES,
    "/server_info": "use /v1/models and /version",
    "/reset_prefix_cache": BY_HAND,
    "/sleep": BY_HAND,
    "/wake_up": BY_HAND,
    "/is_sleeping": BY_HAND,
    "/start_profile": BY_HAND,
    "/stop_profile": BY_HAND,
    "/v1/chat/completions/render": COUNTED,
    "/v1/completions/render": "use /tokenize",
    "/v2/embed": VECTORS,
    # OpenAI, Anthropic, Cohere
    "/v1/responses/input_tokens": COUNTED,
    "/v1/responses/compact": "send a shorter input; octavo shortens no conversation",
    "/v1/edits": CHATS,
    "/v1/audio/translations": TRANSCRIBED,
    "/v1/complete": "use /v1/messages",
    "/v1/messages/batches": NO_FILES,
    "/v1/embed": VECTORS,
    "/v1/chat": CHATS,
    "/v2/chat": CHATS,
    "/v1/tokenize": "use /tokenize",
    "/v1/detokenize": "use /detokenize",
    # SGLang, TGI, Ollama
    "/generate": f"{COMPLETIONS}, with stream: true for a stream",
    "/generate_stream": f"{COMPLETIONS} with stream: true",
    "/encode": VECTORS,
    "/api/embed": VECTORS,
    "/api/embeddings": VECTORS,
    "/get_model_info": "use /v1/models",
    "/get_server_info": "use /v1/models and /version",
    "/model_info": "use /v1/models",
    "/get_load": BY_HAND,
    "/chat_tokenize": "use /tokenize with messages",
    "/embed": VECTORS,
    "/info": "use /v1/models and /version",
    "/flush_cache": BY_HAND,
    "/health_generate": "use /health",
    "/api/generate": COMPLETIONS,
    "/api/chat": CHATS,
    "/api/tags": "use /v1/models",
    "/api/show": "use /v1/models",
    "/api/ps": "use /v1/models",
    "/api/version": "use /version",
}
BELOW = {
    "/v1/audio/": TEXT_ALONE,
    "/v1/images/": TEXT_ALONE,
    "/v1/videos": TEXT_ALONE,
    "/v1/realtime": f"{TEXT_ALONE}; use {CHATS.removeprefix('use ')} with stream: true",
    "/v1/moderations": GENERATES,
    "/v1/files": NO_FILES,
    "/v1/uploads": NO_FILES,
    "/v1/batches": NO_FILES,
    "/v1/assistants": NO_FILES,
    "/v1/threads": NO_FILES,
    "/v1/vector_stores": NO_FILES,
    "/v1/conversations": "use previous_response_id of /v1/responses",
    "/v1/containers": "octavo runs no tools; run them in your program",
    "/v1/evals": NO_FILES,
    "/v1/messages/batches/": NO_FILES,
    "/v1/fine_tuning": "octavo trains no models",
}


def instead_of(path: str) -> str:
    """What to use in place of a path that other servers have; empty for a path that nobody has."""
    exact = INSTEAD.get(path.rstrip("/"))
    return exact or next((what for beginning, what in BELOW.items() if path.startswith(beginning)), "")
