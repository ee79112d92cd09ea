"""What is compared: ways to compute the same, each with a check against float64."""
