"""What each instruction does; `ptx.decode` finds them here."""
