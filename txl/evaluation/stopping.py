"""Stop strings: where a generated text ends, and what can be shown of it before that is known."""

from collections.abc import Sequence

from txl.errors import TxlError

Stop = str | bytes | Sequence[str | bytes]


def stop_strings(stop: Stop) -> tuple[bytes, ...]:
    """One or more strings, or none, as bytes.

    Raises:
        TxlError: one is empty, cannot be encoded, or is no string.
    """
    if not isinstance(stop, Sequence):
        raise TxlError(f"stop must be a string or a sequence of them, got {stop!r}")
    return tuple(_encoded(s) for s in ([stop] if isinstance(stop, (str, bytes)) else stop))


def _encoded(stop: str | bytes) -> bytes:
    if not isinstance(stop, (str, bytes)) or not stop:
        raise TxlError(f"stop must hold strings of at least one character, got {stop!r}")
    try:
        return stop.encode("utf-8", errors="surrogateescape") if isinstance(stop, str) else stop
    except UnicodeEncodeError as error:
        raise TxlError(f"stop {stop!r} cannot be encoded: {error}") from error


class UpToStop:
    """Lets a text through up to the first of some stop strings, which is left out.

    What may be the beginning of one is held back until the text tells. Of several the one that is
    complete first counts, and of those that end together the longest: where the text is cut into
    tokens makes no difference.

    Attributes:
        stopped: a stop string has come; nothing is let through any more.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops, self._held, self.stopped = stops, b"", False

    def add(self, piece: bytes) -> bytes:
        """What is certain to be part of the text now."""
        if self.stopped:
            return b""
        text, self._held = self._held + piece, b""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                self._held = text[-n:]
                return text[:-n]
        return text

    def rest(self) -> bytes:
        """What is held back still, when the text is at its end."""
        held, self._held = self._held, b""
        return held
