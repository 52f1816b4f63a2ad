"""vLLM's name of the module that has the forms of a prompt."""

from gpu_worker.offline.prompts import PromptArgument as PromptType
from gpu_worker.offline.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
