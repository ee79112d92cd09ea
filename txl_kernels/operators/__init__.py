"""How torch sees a call: operators for whoever watches, and a fast path for ordinary calls that
nobody does."""
