"""Reads the data set of `--dataset`: a file with one JSON object per line.

    {"prompt": "a text"}          a text, or a list of token ids
    {"messages": [{"role": "user", "content": "…"}]}          for --chat
    {"turns": ["first", "second"]}          what a user says, turn by turn
Each may have "max_tokens".
"""

import json
from pathlib import Path
from typing import Any

from octavo.cli.bench.conversation import ConversationTurn
from octavo.process.command_error import CommandError
from octavo.request.chat_messages import message_pairs
from octavo.request.errors import InvalidArgument

FORMS = 'write {"prompt": "…"}, {"messages": […]} or {"turns": ["…", …]}, and if you like "max_tokens"'


def read_dataset(path: str, chat: bool) -> list[list[ConversationTurn]]:
    """The turns of each row. Raises CommandError, which names the line, for what is no row."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--dataset: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--dataset: {path} is no text in UTF-8: one JSON object per line is wanted") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line), chat))
            except (ValueError, RecursionError) as error:
                raise CommandError(f"--dataset: line {number} of {path}: {_reason(error)}") from None
    if not rows:
        raise CommandError(f"--dataset: {path} has no rows: {FORMS}")
    return rows


def _reason(error: Exception) -> str:
    if isinstance(error, InvalidArgument):
        return error.message
    return f"is no JSON; {FORMS}" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)


def _row(row: Any, chat: bool) -> list[ConversationTurn]:
    names = [name for name in ("prompt", "messages", "turns") if isinstance(row, dict) and name in row]
    if len(names) != 1:
        raise ValueError(f"has none or several of prompt, messages and turns; {FORMS}")
    name = names[0]
    content = row[name]
    max_tokens = row.get("max_tokens", 0)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 0:
        raise ValueError("max_tokens must be a whole number above 0")
    if name == "turns":
        if not (isinstance(content, list) and content and all(isinstance(turn, str) and turn for turn in content)):
            raise ValueError("turns must be a list of texts")
        return [ConversationTurn(turn, max_tokens) for turn in content]
    if name == "messages":
        if not chat:
            raise ValueError("has messages: add --chat")
        message_pairs(content, "messages")
        return [ConversationTurn(content, max_tokens)]
    if isinstance(content, str) and content:
        return [ConversationTurn(content, max_tokens)]
    if not (isinstance(content, list) and content and all(type(token) is int and token >= 0 for token in content)):
        raise ValueError("prompt must be a text or a list of token ids")
    if chat:
        raise ValueError("has token ids, which are no message: leave out --chat")
    return [ConversationTurn(content, max_tokens)]
