"""The paper's comparisons: LSTM and QRNN, effective context length, attention maps."""
