"""What trained heads attend to (paper, Appendix D)."""
