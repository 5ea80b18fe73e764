"""What generated tokens say, decoded as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INCOMPLETE = "\ufffd"  # what a decoder makes of bytes that are no character, or none yet


class GeneratedText:
    """The text of the tokens of one sequence, special tokens included, and whether it holds a stop string.

    A character that is split over tokens appears with the last of them. All pieces and the `rest` together are what the
    tokenizer decodes all tokens to.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self.holds_stop_string = False
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._longest = max(map(len, stop_strings), default=0)
        self._tail = ""  # what a stop string may have begun with
        # Decoded are the last tokens only: those of the last complete piece, which say how the next one is joined to
        # it, and the new ones. Of this window `_num_given` characters have been given away.
        self._window: list[int] = []
        self._num_joined = 0
        self._num_given = 0

    def add(self, token: int) -> str:
        """The characters that become complete with this token."""
        self._window.append(token)
        text = self._decode(self._window)
        complete = text.rstrip(INCOMPLETE)
        piece = complete[self._num_given :]
        self._num_given += len(piece)
        if complete == text:
            self._window = self._window[self._num_joined :]
            self._num_joined = len(self._window)
            self._num_given = len(self._decode(self._window))
        self._look_for_stop_strings(piece)
        return piece

    def rest(self) -> str:
        """What the tokens end with that has not become a character."""
        return self._decode(self._window)[self._num_given :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _look_for_stop_strings(self, piece: str) -> None:
        text = self._tail + piece
        self.holds_stop_string |= any(string in text for string in self._stop_strings)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
