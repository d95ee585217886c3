"""Streamed text is the text of all tokens, however they are cut, and ends before a stop string."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree.engine.text import TextStream

# Bytes of one to four a character, marks that join what is before them, and the replacement character itself.
CHARACTERS = "ab \n\u00e9\u0301\u200d\u20ac\u4e2d\ufffd\U0001f600\U0001f9d1\U000e0061"
TEXTS = st.text(st.sampled_from(CHARACTERS) | st.characters(codec="utf-8"), max_size=24)


class PieceTokenizer:
    """Token id = index of a run of bytes; decoding replaces broken characters, as byte-level BPE does."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, tokens, **_options):
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", errors="replace")


@st.composite
def pieces_of(draw, texts=TEXTS):
    """A text and its bytes in random pieces of one to five, which may begin and end inside characters."""
    text = draw(texts)
    data, pieces = text.encode(), []
    while data:
        size = draw(st.integers(1, 5))
        pieces.append(data[:size])
        data = data[size:]
    return text, pieces


def run(pieces, stop=(), take_every=1):
    """(what each take showed, then finish, whether a stop string ended it), as the engine drives a stream."""
    stream = TextStream(PieceTokenizer(pieces), stop)
    shown = []
    for token in range(len(pieces)):
        stream.push(token)
        if stream.stopped:
            break
        if (token + 1) % take_every == 0:
            shown.append(stream.take())
    shown.append(stream.finish())
    assert stream.text == "".join(shown)
    return shown, stream.stopped


def single_bytes(text):
    return text, [bytes([byte]) for byte in text.encode()]


@settings(max_examples=300, deadline=None)
@given(pieces_of(), st.integers(1, 4))
@example(single_bytes("\ufffd\ufffd"), 1)
@example(single_bytes("a\ufffd\ufffd\ufffd\ufffdb\ufffd"), 1)
@example(single_bytes("\U0001f600" * 6), 1)
def test_chunks_add_up_to_the_decoded_text(case, take_every):
    text, pieces = case
    shown, stopped = run(pieces, take_every=take_every)
    assert "".join(shown) == text
    assert not stopped


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=4), max_size=20))
@example([b"\xf0", b"\x9f", b"\x98", b"\xff", b"\xf0", b"\x9f"])
def test_broken_bytes_are_shown_as_decoding_shows_them(pieces):
    shown, _ = run(pieces)
    assert "".join(shown) == b"".join(pieces).decode("utf-8", errors="replace")


def test_half_a_character_is_never_shown():
    shown, _ = run([b"a", b"\xf0\x9f", b"\x98", b"\x80b"])
    assert shown == ["a", "", "", "\U0001f600b", ""]


def test_a_run_of_replacement_characters_is_not_held_to_the_end():
    shown, _ = run(["\ufffd".encode()] * 40)
    assert sum(map(len, shown[:-1])) >= 36


def cut(text, stop):
    """Text before the earliest stop string, and whether there is one."""
    found = [at for at in map(text.find, stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def has_inner(stop):
    """Whether a stop string stands in the middle of another, where the inner one is complete first."""
    return any(outer.find(inner) not in (-1, 0, len(outer) - len(inner)) for outer in stop for inner in stop)


FEW_CHARACTERS = st.sampled_from("ab\u00e9\U0001f600\ufffd")
FEW = st.text(FEW_CHARACTERS, min_size=1, max_size=24)
STOPS = st.lists(st.text(FEW_CHARACTERS, min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(pieces_of(FEW), STOPS.filter(lambda stop: not has_inner(stop)), st.integers(1, 3))
@example(single_bytes("aaab"), ["aab", "ab"], 1)
@example(("xaab", [b"xa", b"ab"]), ["aab", "ab"], 1)
@example(single_bytes("ab"), ["ab" * 40], 1)
def test_text_ends_before_the_earliest_stop(case, stop, take_every):
    text, pieces = case
    shown, stopped = run(pieces, tuple(stop), take_every)
    assert ("".join(shown), stopped) == cut(text, stop)


@settings(max_examples=150, deadline=None)
@given(pieces_of(FEW), STOPS)
def test_text_that_could_begin_a_stop_is_never_shown(case, stop):
    text, pieces = case
    stream = TextStream(PieceTokenizer(pieces), tuple(stop))
    for token in range(len(pieces)):
        stream.push(token)
        if stream.stopped:
            break
        stream.take()
        known = b"".join(pieces[: token + 1]).decode(errors="ignore")
        assert text.startswith(stream.text)
        for at in range(len(stream.text)):
            assert not any(s.startswith(known[at:]) for s in stop), (stream.text, known)


def test_stop_across_tokens_and_the_text_after_it():
    shown, stopped = run([b"on", b"e <", b"|en", b"d|> two"], ("<|end|>",))
    assert shown == ["on", "e ", "", ""]
    assert stopped


def test_stop_that_does_not_come_is_shown_after_all():
    shown, stopped = run([b"one <", b"|e", b"r"], ("<|end|>",))
    assert shown == ["one ", "", "<|er", ""]
    assert not stopped


def test_text_shorter_than_its_stop_ends_with_what_was_held():
    shown, stopped = run([b"a", b"b"], ("abcdefgh",))
    assert shown == ["", "", "ab"]
    assert not stopped


def test_stop_inside_held_back_bytes_is_found_at_the_end():
    """The last bytes are half a character: as text they are a replacement character, here the stop string."""
    shown, stopped = run([b"ab", b"\xf0\x9f"], ("b\ufffd",))
    assert "".join(shown) == "a"
    assert stopped


def test_stop_that_completes_with_a_character_of_many_tokens():
    shown, stopped = run([b"x", b"\xf0", b"\x9f", b"\x98", b"\x80", b"y"], ("\U0001f600",))
    assert "".join(shown) == "x"
    assert stopped
