"""The paper's comparisons: LSTM and QRNN, effective context, pictures of attention."""
