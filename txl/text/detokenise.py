"""WikiText's tokens as running text again.

WikiText-103 and -2 (Merity et al. 2017) hold Moses tokens, each between spaces, with marks where a
number or a compound was cut: `5 @,@ 000`, `2 @.@ 5`, `two @-@ part`.
"""

import re

_MARKS = {"@-@": "-", "@,@": ",", "@.@": "."}
_CLOSING = frozenset(",.;:!?)]")
_OPENING = frozenset("([")
_CONTRACTED = frozenset(("'s", "'t", "'re", "'ve", "'m", "'d", "'ll", "n't"))
# After these a spaced ' begins a quotation; after other words in s it is a plural's possessive.
_NO_PLURALS = frozenset(("as", "does", "has", "his", "is", "its", "says", "series", "this", "thus", "us", "was"))
_TOKEN = re.compile("( *)([^ ]+)")


def detokenise(text: str, before: str = "") -> str:
    """Takes out the spaces and marks of WikiText's tokenisation.

    Marks become what they stand for; quotes are taken for opening and closing in turn within a
    line; spaces go before `, . ; : ! ? ) ]`, after `( [` and before contractions. Headings, lines
    of the form `= Title =`, stay as they are, and so do letters and digits. Text that is
    detokenised already stays as it is.

    before: what precedes the text, as tokens; a quotation open in its last line goes on.
    """
    inside = before.rpartition("\n")[2].split(" ").count('"') % 2 == 1
    lines = text.split("\n")
    return "\n".join(_line(line, inside and n == 0) for n, line in enumerate(lines))


def _line(line: str, inside: bool) -> str:
    if line.strip().startswith("= ") and line.strip().endswith(" ="):
        return line
    while (shorter := _joined(line, inside)) != line:  # an opening quote and a letter may give 's
        line = shorter
    return line


def _joined(line: str, inside: bool) -> str:
    """One pass: each token after its spaces, or without them."""
    found = _TOKEN.findall(line)
    tokens = [token for _, token in found]
    last = max((n for n, token in enumerate(tokens) if token == "'"), default=-1)
    single, glued, parts = False, False, []
    for n, (gap, token) in enumerate(found):
        before, after = token in _CLOSING or token in _CONTRACTED, token in _OPENING
        if token in _MARKS:
            before = after = True
        elif token == '"':
            before, after, inside = inside, not inside, not inside
        elif token == "'":
            before, after, single = _apostrophe(tokens[max(n - 1, 0) : n], tokens[n + 1 : n + 2], single, n < last)
        parts.append(("" if n and (glued or before) else gap) + _MARKS.get(token, token))
        glued = after
    return "".join(parts) + line[len(line.rstrip(" ")) :]


def _apostrophe(previous: list[str], following: list[str], inside: bool, later: bool) -> tuple[bool, bool, bool]:
    """Whether a spaced ' joins the token before and the one after, and whether a quotation is open
    then; later: whether there is another in the line."""
    if following == ["s"]:  # U.S. ' s
        return True, True, inside
    if inside:
        return True, False, False
    if following and following[0][0].isdigit():  # the ' 40s
        return False, True, False
    plural = any(word.endswith("s") and word.lower() not in _NO_PLURALS for word in previous)
    opens = not previous or (later and not plural)
    return not opens, opens, opens and later
