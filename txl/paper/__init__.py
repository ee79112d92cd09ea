"""The paper's comparisons: effective context length, attention maps."""
