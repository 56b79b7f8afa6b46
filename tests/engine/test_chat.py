"""Conversations: the right text and tokens, and states where their turns end."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_runtime import HybridRuntime, SamplingParams
from hybrid_runtime.text.chat import MAX_TURN_ENDS, ChatOptions, find_turn_ends, render_chat
from tests.engine.cache_content import assert_content, states_of
from tests.engine.chat_tokenizer import SYSTEM, TEMPLATE, chat_tokenizer, ids_of, messages_of
from tests.engine.helpers import MIXER_KINDS, assert_idle, greedy, runtime_of, solo_tokens, tokens_of

HELLO = "the cat sat on the mat, and the hat"
OTHER = "a hat is a hat; count 12345 of it"
WANTS_A_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('a user must speak') }}{% endif %}" + TEMPLATE
)
LAST_TURN_IS_MARKED = (  # each turn is written otherwise as soon as another follows
    "{% for m in messages %}{{ '<|im_start|>' if loop.last else '' }}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
)


@pytest.fixture
def rt() -> Any:
    with runtime_of("kda", tokenizer=chat_tokenizer(), num_kv_slots=4000) as rt:
        yield rt
        assert_content(rt)
        assert_idle(rt)


def rendered(messages: list[dict[str, str]], **options: Any) -> str:
    return render_chat(chat_tokenizer(), messages, ChatOptions(**options))


def turn_end(messages: list[dict[str, str]]) -> int:
    """Tokens of the messages up to the end of the last one, which a line break follows."""
    return len(ids_of(rendered(messages, add_generation_prompt=False).removesuffix("\n")))


def hit(output: Any) -> tuple[int, str | None]:
    return output.num_cached_tokens, output.checkpoint_origin


@pytest.mark.parametrize("kind", MIXER_KINDS)
def test_the_second_conversation_resumes_behind_the_system_message(kind: str) -> None:
    """Not only the third; and right behind it, though the line break there may go with what follows."""
    first, second = messages_of(SYSTEM, HELLO), messages_of(SYSTEM, OTHER)
    with runtime_of(kind, tokenizer=chat_tokenizer()) as rt:
        outputs = [rt.chat(messages, greedy(4))[0] for messages in (first, second)]
        assert [hit(output) for output in outputs] == [(0, None), (turn_end(first[:1]), "hint")]
        prompts = [ids_of(rendered(messages)) for messages in (first, second)]
        assert [list(output.prompt_token_ids) for output in outputs] == prompts
        assert tokens_of(outputs) == solo_tokens(kind, prompts, [4, 4])
        assert_content(rt)
        assert_idle(rt)


def test_the_same_as_the_rendered_text(rt: HybridRuntime) -> None:
    messages = messages_of(SYSTEM, HELLO, "the mat", OTHER)
    text = rendered(messages)
    assert text.endswith("<|im_start|>assistant\n")
    params = SamplingParams(max_tokens=12, seed=5, temperature=0.8, logprobs=1)
    [chat], [plain] = rt.chat(messages, params), rt.generate(text, params)
    assert (chat.prompt, chat.prompt_token_ids) == (plain.prompt, plain.prompt_token_ids) == (text, tuple(ids_of(text)))
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids
    assert chat.outputs[0].text == plain.outputs[0].text
    assert (
        rt.chat(messages, max_new_tokens=3, temperature=0.0)[0].outputs[0].token_ids
        == tokens_of(rt.generate(text, max_tokens=3, temperature=0.0))[0]
    )


def test_a_conversation_that_goes_on_resumes_at_the_end_of_the_last_answer(rt: HybridRuntime) -> None:
    """The answer is the same word over and over, so that its text has the tokens that were sampled."""
    [word] = ids_of(" the")
    params = greedy(6, logit_bias={word: 100.0})
    messages = messages_of(SYSTEM, HELLO)
    for question in (OTHER, HELLO, OTHER):
        output = rt.chat(messages, params)[0]
        assert output.outputs[0].text == " the" * 6
        computed = len(output.prompt_token_ids) + 6 - 1  # the last token was sampled and not computed
        messages = [*messages, {"role": "assistant", "content": output.outputs[0].text}]
        following = rt.chat([*messages, {"role": "user", "content": question}], params)[0]
        assert hit(following) == (computed, "final")
        messages = [*messages, {"role": "user", "content": question}]
    other = [*messages[:-1], {"role": "user", "content": "another mat"}]
    assert hit(rt.chat(other, params)[0]) == (turn_end(messages[:-1]), "hint")


def test_several_conversations_at_once(rt: HybridRuntime) -> None:
    """They share the system message's prefill, too."""
    conversations = [messages_of(SYSTEM, question) for question in (HELLO, OTHER, "mat", "hat")]
    params = [greedy(count) for count in (1, 2, 3, 4)]
    outputs = rt.chat(conversations, params)
    prompts = [ids_of(rendered(messages)) for messages in conversations]
    assert tokens_of(outputs) == solo_tokens("kda", prompts, [1, 2, 3, 4])
    assert all(output.num_cached_tokens >= turn_end(conversations[0][:1]) for output in outputs[1:])
    with pytest.raises(ValueError, match="3 entries for 4 prompts"):
        rt.chat(conversations, params[:3])


def test_templates(rt: HybridRuntime) -> None:
    """The call's own, the tokenizer's, none; options reach it."""
    messages = messages_of(SYSTEM, HELLO)
    own = "{{ bos_token }}{{ messages[-1].content }}{{ mood }}{% for t in tools or [] %}[{{ t.name }}]{% endfor %}"
    [output] = rt.chat(
        messages, greedy(1), chat_template=own, chat_template_kwargs={"mood": "!"}, tools=[{"name": "t"}]
    )
    assert output.prompt == f"<s>{HELLO}![t]"
    [output] = rt.chat(messages, greedy(1), add_generation_prompt=False)
    assert output.prompt == rendered(messages, add_generation_prompt=False)
    begun = [*messages, {"role": "assistant", "content": "the mat"}]
    [output] = rt.chat(begun, greedy(1), add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == rendered(messages) + "the mat"
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        rt.chat(begun, greedy(1), continue_final_message=True)
    with pytest.raises(ValueError, match="refuses the messages: a user must speak"):
        rt.chat(messages[:1], greedy(1), chat_template=WANTS_A_USER)
    with pytest.raises(ValueError, match="refuses"):
        rt.chat(messages, greedy(1), chat_template="{% if %}")
    assert not rt.has_unfinished


def test_without_a_template_or_a_tokenizer() -> None:
    messages = messages_of(SYSTEM, HELLO)
    with runtime_of("kda", tokenizer=chat_tokenizer(template=None)) as rt:
        with pytest.raises(ValueError, match="no chat template"):
            rt.chat(messages, greedy(1))
        assert rt.chat(messages, greedy(1), chat_template=TEMPLATE)[0].prompt == rendered(messages)
    with runtime_of("kda") as rt, pytest.raises(ValueError, match="tokenizer is needed"):
        rt.chat(messages, greedy(1))


def test_a_template_that_wants_a_user_leaves_the_system_message_unmarked(rt: HybridRuntime) -> None:
    messages = messages_of(SYSTEM, HELLO, "mat", OTHER)
    text = render_chat(chat_tokenizer(), messages, ChatOptions(chat_template=WANTS_A_USER))
    ends = find_turn_ends(chat_tokenizer(), messages, text, ChatOptions(chat_template=WANTS_A_USER))
    assert [text[:end].count("<|im_end|>") for end in ends] == [2, 3, 4]
    rt.chat(messages, greedy(1), chat_template=WANTS_A_USER)
    [output] = rt.chat([*messages[:3], *messages_of("", "hat")[1:]], greedy(1), chat_template=WANTS_A_USER)
    assert hit(output) == (turn_end(messages[:3]), "hint")


def test_a_template_that_rewrites_earlier_turns_marks_only_what_stays(rt: HybridRuntime) -> None:
    messages = messages_of(SYSTEM, HELLO, "mat", OTHER)
    options = ChatOptions(chat_template=LAST_TURN_IS_MARKED, add_generation_prompt=False)
    text = render_chat(chat_tokenizer(), messages, options)
    assert find_turn_ends(chat_tokenizer(), messages, text, options) == [len(text)]
    [output] = rt.chat(messages, greedy(3), chat_template=LAST_TURN_IS_MARKED, add_generation_prompt=False)
    assert tokens_of([output]) == solo_tokens("kda", [ids_of(text)], [3])


def test_of_many_turns_the_first_and_the_latest_are_marked() -> None:
    messages = messages_of(SYSTEM, *["mat", "hat"] * 10)
    text = rendered(messages)
    ends = find_turn_ends(chat_tokenizer(), messages, text, ChatOptions())
    assert [text[:end].count("<|im_end|>") for end in ends] == [1, *range(15, 22)]
    assert len(ends) == MAX_TURN_ENDS


def test_positions_that_the_user_names_are_kept(rt: HybridRuntime) -> None:
    messages = messages_of(SYSTEM, HELLO)
    length = len(ids_of(rendered(messages)))
    rt.chat(messages, greedy(1, checkpoint_positions=[7, length]))
    ends = {turn_end(messages[:1]), turn_end(messages)}
    assert states_of(rt) == {n: "tail" if n == length - 1 else "hint" for n in sorted({7, length, length - 1} | ends)}
    with pytest.raises(ValueError, match="checkpoint_positions"):
        rt.chat(messages, greedy(1, checkpoint_positions=[length + 1]))


def test_a_start_token_is_the_templates_business() -> None:
    """A tokenizer that adds one of its own must not put it in front of the template's."""
    tokenizer = chat_tokenizer(with_start_token=True)
    messages = messages_of(SYSTEM, HELLO)
    with runtime_of("kda", tokenizer=tokenizer) as rt:
        first = rt.chat(messages, greedy(1), chat_template="{{ bos_token }}" + TEMPLATE)[0]
        assert first.prompt_token_ids[:2] == tuple(tokenizer.convert_tokens_to_ids(["<s>", "<|im_start|>"]))
        again = rt.chat(messages_of(SYSTEM, OTHER), greedy(1), chat_template="{{ bos_token }}" + TEMPLATE)[0]
        assert hit(again) == (1 + turn_end(messages[:1]), "hint")
        assert rt.chat(messages, greedy(1))[0].prompt_token_ids == tuple(ids_of(rendered(messages)))


class SlowTokenizer:
    """Has what a slow tokenizer has: no offsets."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        return self._tokenizer(text, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_slow_tokenizer_gives_no_hints_and_the_same_tokens() -> None:
    with runtime_of("kda", tokenizer=SlowTokenizer(chat_tokenizer())) as rt:
        outputs = [rt.chat(messages_of(SYSTEM, question), greedy(3))[0] for question in (HELLO, OTHER)]
        assert "hint" not in states_of(rt).values()
        prompts = [ids_of(rendered(messages_of(SYSTEM, question))) for question in (HELLO, OTHER)]
        assert tokens_of(outputs) == solo_tokens("kda", prompts, [3, 3])
        rt.warmup(rendered(messages_of(SYSTEM)))


@pytest.mark.parametrize(
    "messages",
    [
        *("text", None, 5, [], [[]], {}, {"role": "user", "content": "a"}, [5], ["text"], [None]),
        *([{}], [{"content": "a"}], [{"role": 5}], [[{"role": "user", "content": "a"}], []]),
        *([{"role": "user", "content": "a"}, "b"], [[{"role": "user", "content": "a"}], {"role": "user"}], b"ab"),
    ],
    ids=repr,
)
def test_what_is_no_conversation_is_refused(rt: HybridRuntime, messages: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        rt.chat(messages, greedy(1))
    assert not rt.has_unfinished


def test_too_long_a_conversation_is_refused(rt: HybridRuntime) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        rt.chat([messages_of(SYSTEM, HELLO), messages_of("the " * 5000)], greedy(1))
    assert not rt.has_unfinished
