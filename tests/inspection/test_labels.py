"""What an edge's tokens say is one short printable line, whatever the tokens and the tokenizer are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.inspection.labels import EdgeLabels, visible
from tests.cache.helpers import ints
from tests.inspection.trees import CharTokenizer
from tests.unit import byte_bpe

LABELS = EdgeLabels(CharTokenizer())


def label_of(text: str) -> str:
    return LABELS(ints(map(ord, text)))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("def main():", '"def main():"'),
        ('a\n\t"b" \\ c', r'"a\n\t\"b\" \\ c"'),
        ("\x1b[31m\x00\x7f\x9b", r'"\x1b[31m\x00\x7f\x9b"'),
        ("a\u202eb\u2028c\ud800", r'"a\u202eb\u2028c\ud800"'),
        ("<b>[red]&amp;", '"<b>[red]&amp;"'),
        ("über 狐狸 🚀", '"über 狐狸 🚀"'),
    ],
)
def test_text_is_quoted_and_made_visible(text, label):
    assert label_of(text) == label


def test_of_a_long_text_the_middle_is_left_out():
    label = label_of("begin " + "x" * 5000 + " end")
    assert label.startswith('"begin xxx')
    assert label.endswith('xxx end"')
    assert " … " in label
    assert len(label) < 80


def test_of_few_tokens_with_much_text_the_middle_is_left_out():
    class Wordy(CharTokenizer):
        def decode(self, token_ids, **options):
            return "".join(f"<{token_id}>" * 10 for token_id in token_ids)

    label = EdgeLabels(Wordy())(ints(range(10, 40)))
    assert label.startswith('"<10><10>')
    assert label.endswith('<39><39>"')
    assert len(label) == 80 + 24 + len('" … "')


@given(st.lists(st.integers(0, 0x10FFFF), min_size=1, max_size=120))
def test_a_label_is_always_short_and_printable(tokens):
    label = LABELS(ints(tokens))
    assert label.isprintable()
    assert len(label) <= 10 * (80 + 24) + len('" … "')
    label.encode()


def test_no_tokenizer_gives_token_ids():
    labels = EdgeLabels(None)
    assert labels(ints([3, 14, 15])) == "[3, 14, 15]"
    assert labels(ints(range(100, 112))) == "[100, 101, 102, 103, 104, 105, 106, 107, …, 109, 110, 111]"


class Raises:
    def decode(self, token_ids, **options):
        raise KeyError(token_ids[0])


class TakesNoOptions:
    def decode(self, token_ids):
        return "never"


class GivesNothing:
    def decode(self, token_ids, **options):
        return ""


class GivesNoText:
    def decode(self, token_ids, **options):
        return None


@pytest.mark.parametrize("tokenizer", [Raises(), TakesNoOptions(), GivesNothing(), GivesNoText()])
@pytest.mark.parametrize("num_tokens", [3, 500])
def test_a_tokenizer_that_fails_gives_token_ids(tokenizer, num_tokens):
    tokens = ints(range(num_tokens))
    assert EdgeLabels(tokenizer)(tokens) == EdgeLabels(None)(tokens)


def test_parts_of_characters_are_shown_where_an_edge_ends_and_left_out_where_the_label_cuts():
    labels = EdgeLabels(byte_bpe.tokenizer())
    fox = byte_bpe.encode("狐")
    assert len(fox) > 1
    assert labels(ints(fox[:-1])) == '"\ufffd"'
    assert labels(ints(fox)) == '"狐"'
    for shift in range(len(fox)):
        edge = byte_bpe.encode("a" * shift)
        label = labels(ints([*edge, *fox * 200, *edge]))
        assert "\ufffd" not in label
        assert " … " in label


def test_special_tokens_are_shown():
    assert EdgeLabels(byte_bpe.tokenizer())(ints([byte_bpe.EOS])) == '"<eos>"'


def test_plain_text_is_left_as_it_is():
    plain = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in '"\\')
    assert visible(plain) == plain
