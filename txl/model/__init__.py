"""The language models of the paper: sizes, parts, and the model that is put together from them."""
