"""Figures of the paper that ours stand beside."""

# Speed-up of Table 9 (per token, one GPU, over the vanilla model) by attention length.
SPEED_UP = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
