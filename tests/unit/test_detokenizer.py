"""Text as it grows, with a tokenizer whose tokens are bytes: characters may be split anywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagespec.engine.detokenizer import Detokenizer, StopStringWatcher, decode_output


class ByteTokenizer:
    """One token a byte; 256 is a special token that decodes to nothing."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(t for t in token_ids if t < 256).decode("utf-8", errors="replace")


TOKENIZER = ByteTokenizer()


@given(st.text(max_size=30), st.text(max_size=30))
def test_pieces_add_up_to_the_whole_and_never_split_a_character(prompt: str, output: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, list(prompt.encode()))
    pieces = [detokenizer.push(token) for token in output.encode()]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == output == detokenizer.text
    assert decode_output(TOKENIZER, list(prompt.encode()), list(output.encode())) == output


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1))
def test_the_text_is_cut_before_the_first_stop_string(output: str, stops: list[str]) -> None:
    watcher = StopStringWatcher(Detokenizer(TOKENIZER, []), stops)
    seen = ""
    for token in output.encode():
        seen += chr(token)
        stopped = watcher(token)
        assert stopped == any(stop in seen for stop in stops)
        assert output.startswith(watcher.settled_text)
        if stopped:
            break
    places = [seen.find(stop) for stop in stops if stop in seen]
    expected = seen[: min(places)] if places else seen
    settled = watcher.settled_text
    assert watcher.finish() == expected
    assert expected.startswith(settled), "nothing that was streamed is taken back"


def test_a_stop_string_may_span_split_characters() -> None:
    watcher = StopStringWatcher(Detokenizer(TOKENIZER, []), ["é!"])
    assert [watcher(token) for token in "aé!".encode()] == [False, False, False, True]
    assert watcher.finish() == "a"
