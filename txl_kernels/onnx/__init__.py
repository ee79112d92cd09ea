"""The operator `txl::RelAttention` for ONNX Runtime: `library` returns the file that registers it,
`rewrite` places it in an exported model, and `translations` is the table with which
torch.onnx.export writes it. Only functions import onnx, onnxscript and onnxruntime."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from txl_kernels.onnx.export import translations
from txl_kernels.onnx.library import library
from txl_kernels.onnx.report import Report, Row

__all__ = ["Report", "Row", "library", "rewrite", "translations"]


def rewrite(
    model: Any, inputs: Sequence[Mapping[str, Any]] | None = None, folder: str | os.PathLike[str] = "."
) -> Report:
    """Replace an exported model's relative-position attention by `txl::RelAttention`, in place.

    The model is run on small inputs, before anything is changed. An attention is replaced if its
    nodes have a known meaning, if its relative shift has moved each score to the column of its
    distance and depends on sizes and constants alone, and if the new nodes give the same output;
    all others stay as they are.

    A mask has to let each query see consecutive keys. The new graph checks that: an error of the
    operator (`end must hold key indices ..., got -1`) reports a mask with a hole.

    Args:
        model: an `onnx.ModelProto` with opset 13 or newer, which is changed. Initializers in other
            files need not be loaded (`onnx.load(path, load_external_data=False)`).
        inputs: what the model is run on, for each run an array for each of its inputs; several
            lengths and padded batch rows make a better check. None for random arrays: axis 0 that
            has no number is the batch, other such axes are frames; integers of one axis are
            lengths, integers and booleans of two axes are masks of padding on the right.
        folder: the folder of the files of initializers that are not loaded.

    Returns:
        A report, which can be printed: each softmax whose weights multiply values, whether its
            attention was replaced or why not.

    Raises:
        ImportError: onnx or onnxruntime is not installed (the extra `onnx`).
        RuntimeError: the operator's library is missing, or the model could not be run on the
            inputs; the message has the runtime's.
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    from txl_kernels.onnx.rewriting import rewritten

    return rewritten(model, inputs, folder)
