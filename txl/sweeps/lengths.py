"""Which attention lengths to score: Table 6's search for the best and the shortest."""

from collections.abc import Mapping, Sequence


def next_length(
    ppl: Mapping[int, float],
    init: int,
    step: int,
    *,
    longest: int | None = None,
    also: Sequence[int] = (),
    gain: float = 1e-3,
) -> int | None:
    """The length to score next, a pure function of the perplexities known: so a search resumes.

    From training's length upward until a step gains less than `gain`, relatively; then the lengths
    that are wanted in any case; then from training's length downward as long as the perplexity is
    within `gain` of the best so far. See `txl.evaluation.evaluate.init_and_best` for what is
    reported.

    Args:
        ppl: perplexities by attention length.
        init: training's length. step: between lengths.
        longest: never to be exceeded; None for no limit.
        also: lengths above `init` to score in any case.

    Returns: None where the search is done.
    """

    def allowed(n: int) -> bool:
        return longest is None or n <= longest

    if init not in ppl:
        return init
    n = init
    while allowed(n + step):
        if n + step not in ppl:
            return n + step
        if not ppl[n] - ppl[n + step] >= gain * ppl[n]:  # nan gains nothing, either
            break
        n += step
    for wanted in also:
        if wanted not in ppl and wanted > init and allowed(wanted):
            return wanted
    n = init
    while n > step:
        best = min(value for length, value in ppl.items() if length >= n)
        if not ppl[n] <= best * (1 + gain):
            break
        if n - step not in ppl:
            return n - step
        n -= step
    return None
