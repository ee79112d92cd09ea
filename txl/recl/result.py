"""The figures of a group of models: RECL (Table 8), gains (figure 3), perplexities (figure 4)."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from txl.recl.gain import Array, Effective, effective_context, perplexities
from txl.recl.positions import Plan

FIGURE_RATIO = 0.1  # of figure 3


@dataclass(frozen=True)
class GroupResult:
    """RECL is a property of a model in its group: another group gives another number.

    Attributes:
        contexts: lengths in tokens.
        effective: of each ratio r, of each model.
        perplexity: e^(mean loss) of each model at each context.
    """

    contexts: list[int]
    positions: int
    effective: dict[float, dict[str, Effective]]
    perplexity: dict[str, list[float]]
    limits: dict[str, int | None]

    def to_json(self) -> dict[str, Any]:
        return {
            "contexts": self.contexts,
            "positions": self.positions,
            "limits": self.limits,
            "perplexity": self.perplexity,
            "effective": {
                str(r): {name: asdict(found) for name, found in group.items()} for r, group in self.effective.items()
            },
        }

    def to_csv(self) -> str:
        """A row a model and context: perplexity, and for each ratio the gain of the next step."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["model", "context", "perplexity", *[f"gain_r{r:g}" for r in self.effective]])
        for name, values in self.perplexity.items():
            for i, (context, ppl) in enumerate(zip(self.contexts, values, strict=True)):
                gains = [group[name].gains for group in self.effective.values()]
                rows.writerow([name, context, ppl, *[g[i] if i < len(g) else "" for g in gains]])
        return text.getvalue()


def group_result(
    losses: Mapping[str, Array], plan: Plan, ratios: Sequence[float], limits: Mapping[str, int | None]
) -> GroupResult:
    """Of the measured losses [C, N] of each model; errors as `effective_context`."""
    return GroupResult(
        plan.lengths,
        len(plan.positions()),
        {r: effective_context(losses, plan.lengths, r, limits=limits) for r in ratios},
        {name: perplexities(x) for name, x in losses.items()},
        dict(limits),
    )
