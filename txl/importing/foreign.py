"""What is read of a checkpoint, whatever its format."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from txl.errors import TxlError
from txl.model.config import ModelConfig
from txl.text.vocabulary import Vocabulary

Ties = Literal["none", "tail", "all"]


class Lengths(NamedTuple):
    """What a TensorFlow checkpoint does not say of itself.

    Attributes:
        mem_len, clamp_len, same_length: as its scripts' flags; clamp_len None for no limit.
        segment: tokens of training's segments (tgt_len); None for mem_len.
    """

    mem_len: int | None = None
    segment: int | None = None
    clamp_len: int | None = None
    same_length: bool = False


class Foreign(NamedTuple):
    """A checkpoint of other code.

    Attributes:
        tensors: by the names of the original PyTorch code.
        flipped_clusters: rows of the clusters stand in reverse.
        segment: tokens of training's segments.
        vocabulary: reads what lies beside the tensors; None if nothing does.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    flipped_clusters: bool
    segment: int
    vocabulary: Callable[[], Vocabulary] | None


def ties(tied: Sequence[bool], what: str) -> Ties:
    """Of flags, one a bin: which bins' softmax uses the embedding's projection.

    Raises:
        TxlError: another pattern than `ModelConfig.tie_projs` has; begins with `what`.
    """
    tied = list(tied)
    tail = [False] + [True] * (len(tied) - 1)
    kinds: dict[Ties, list[bool]] = {"none": [False] * len(tied), "all": [True] * len(tied), "tail": tail}
    for kind, flags in kinds.items():
        if flags == tied:
            return kind
    raise TxlError(f"{what}: tie_projs must be none, all, or all but the first, got {tied}")


def check_kind(attn_type: int, sample_softmax: int, ext_len: int, what: str) -> None:
    """Raises TxlError: options of the released code that ask for another model than is imported."""
    if attn_type != 0 or sample_softmax > 0 or ext_len != 0:
        raise TxlError(
            f"{what}: only attn_type 0, no sample_softmax and ext_len 0 are imported, got {attn_type}, {sample_softmax}, "
            f"{ext_len}"
        )


def window(same_length: object, keys: int, what: str) -> int | None:
    """Keys a token sees where training said same_length; None for all.

    keys: memory's, or one more, as the code has it.
    """
    if not same_length:
        return None
    if keys < 1:
        raise TxlError(f"{what}: same_length needs a memory, got mem_len 0")
    return keys
