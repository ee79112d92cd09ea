"""The paper's ablations as sweeps: each row of a table a resumable run, scored at many lengths."""
