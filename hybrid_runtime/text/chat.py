"""Conversations as prompts: the chat template, and where the turns end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_runtime.text.borders import count_tokens_before, stable_end

Message = Mapping[str, Any]
MAX_TURN_ENDS = 8  # that are worth a checkpoint: the first, which ends the system message, and the latest


@dataclass(frozen=True)
class ChatOptions:
    """How messages become text. Names and meanings are those of transformers' `apply_chat_template`."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message needs add_generation_prompt=False")


def split_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One conversation or several, as a list. Raises ValueError for what is neither, and for an empty one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of messages, or a list of such lists, not {messages!r}")
    is_one = all(isinstance(message, Mapping) for message in messages)
    several: Sequence[Any] = [messages] if is_one else messages
    for conversation in several:
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str | bytes)
        if not is_list or not conversation or not all(_is_message(message) for message in conversation):
            raise ValueError(f"a conversation must be a list of messages with a 'role' each, not {conversation!r}")
    return [list(conversation) for conversation in several]


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def render_chat(tokenizer: Any, conversation: Sequence[Message], options: ChatOptions) -> str:
    """The text of a conversation. Raises ValueError without a template, and where the template refuses it."""
    if options.chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the tokenizer has no chat template: pass chat_template=")
    try:
        return _render(tokenizer, conversation, options)
    except Exception as error:  # templates raise errors of their own
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def find_turn_ends(tokenizer: Any, conversation: Sequence[Message], text: str, options: ChatOptions) -> list[int]:
    """Character positions in the conversation's `text` at which turns end, as far as the template shows them.

    A turn's end is found by rendering the conversation up to there. Templates that refuse that, or that write a turn
    otherwise when others follow, leave it unmarked.
    """
    ends: list[int] = []
    count = len(conversation)
    for num_turns in sorted({1, *range(max(2, count - MAX_TURN_ENDS + 2), count + 1)}):
        shortened = ChatOptions(options.chat_template, False, False, options.tools, options.template_kwargs)
        try:
            beginning = _render(tokenizer, conversation[:num_turns], shortened)
        except Exception:  # a template that wants, say, a user's message
            continue
        if beginning and text.startswith(beginning):
            ends.append(len(beginning))
    return ends


def turn_hints(tokenizer: Any, text: str, ends: Sequence[int], *, min_saving: int) -> tuple[int, ...]:
    """Lengths in tokens at which a prompt of this `text` should leave checkpoints for others that share some turns.

    They are the last borders that no other continuation can move, and the turns' ends themselves where that is at least
    `min_saving` tokens more. None without a fast tokenizer, which alone knows where its tokens lie.
    """
    if not getattr(tokenizer, "is_fast", False):
        return ()
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    lengths: set[int] = set()
    for end in ends:
        stable = count_tokens_before(offsets, stable_end(tokenizer, text[:end]))
        whole = count_tokens_before(offsets, end)
        lengths |= {stable} if whole - stable < min_saving else {stable, whole}
    return tuple(sorted(lengths - {0}))


def stable_prompt_length(tokenizer: Any, text: str) -> int:
    """How many tokens of a text prompt stay whatever follows; 0 without a fast tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        return 0
    return count_tokens_before(
        tokenizer(text, return_offsets_mapping=True)["offset_mapping"], stable_end(tokenizer, text)
    )


def _render(tokenizer: Any, conversation: Sequence[Message], options: ChatOptions) -> str:
    return tokenizer.apply_chat_template(
        [dict(message) for message in conversation],
        chat_template=options.chat_template,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        tools=options.tools,
        tokenize=False,
        **(options.template_kwargs or {}),
    )
