"""Writes the checkpoints of this folder with TensorFlow's own Saver; once, with tensorflow-cpu
2.21.0:

    python tests/txl/importing/tensorflow/write.py

Names and shapes are those of the paper's TensorFlow code; values are drawn anew from each name, so
that a test can draw them again. Slots of Adam and the step count are there as after training.
"""

import sys
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
V, N, D_MODEL, H, D, D_INNER = 30, 2, 16, 2, 8, 20
CUTOFFS, DIV_VAL = (8, 16), 2


def values(name: str, shape: tuple[int, ...]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """What a variable holds."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return (0.3 * drawn).astype(np.float32)


def _layers(untied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"r_{kind}_bias": (N, H, D) if untied else (H, D) for kind in ("w", "r")}
    for n in range(N):
        shapes |= {
            f"layer_{n}/rel_attn/qkv/kernel": (D_MODEL, 3 * H * D),
            f"layer_{n}/rel_attn/r/kernel": (D_MODEL, H * D),
            f"layer_{n}/rel_attn/o/kernel": (H * D, D_MODEL),
            f"layer_{n}/ff/layer_1/kernel": (D_MODEL, D_INNER),
            f"layer_{n}/ff/layer_1/bias": (D_INNER,),
            f"layer_{n}/ff/layer_2/kernel": (D_INNER, D_MODEL),
            f"layer_{n}/ff/layer_2/bias": (D_MODEL,),
        }
        for part in ("rel_attn", "ff"):
            shapes |= {f"layer_{n}/{part}/LayerNorm/{x}": (D_MODEL,) for x in ("beta", "gamma")}
    return shapes


def words(same_dim: bool) -> dict[str, tuple[int, ...]]:
    """Bins with div_val 2, projections tied but the first; or, without a projection of the first,
    all tied."""
    shapes, ends = _layers(False), (0, *CUTOFFS, V)
    for i in range(3):
        rows, width = ends[i + 1] - ends[i], D_MODEL // DIV_VAL**i
        shapes[f"adaptive_embed/cutoff_{i}/lookup_table"] = (rows, width)
        shapes[f"adaptive_softmax/cutoff_{i}/b"] = (rows,)
        if i or same_dim:
            shapes[f"adaptive_embed/cutoff_{i}/proj_W"] = (width, D_MODEL)
    if same_dim:
        shapes["adaptive_softmax/cutoff_0/proj"] = (D_MODEL, D_MODEL)
    shapes["adaptive_softmax/cutoff_0/cluster_W"] = (2, D_MODEL)
    shapes["adaptive_softmax/cutoff_0/cluster_b"] = (2,)
    return shapes


def one_table() -> dict[str, tuple[int, ...]]:
    """Bins of one table, whose width is not the model's."""
    shapes = _layers(False) | {
        "adaptive_embed/lookup_table": (V, 12),
        "adaptive_embed/proj_W": (12, D_MODEL),
        "adaptive_softmax/cutoff_0/proj": (12, D_MODEL),
        "adaptive_softmax/cutoff_0/cluster_W": (2, 12),
        "adaptive_softmax/cutoff_0/cluster_b": (2,),
    }
    ends = (0, *CUTOFFS, V)
    return shapes | {f"adaptive_softmax/cutoff_{i}/b": (ends[i + 1] - ends[i],) for i in range(3)}


def characters() -> dict[str, tuple[int, ...]]:
    """Without bins, as enwik8's; biases a layer."""
    return _layers(True) | {"adaptive_embed/lookup_table": (V, D_MODEL), "adaptive_softmax/bias": (V,)}


CHECKPOINTS = {
    "words": words(True),
    "words-same-dim": words(False),
    "one-table": one_table(),
    "characters": characters(),
}


def write() -> None:
    import tensorflow as tf

    tf1 = tf.compat.v1
    for kind, shapes in CHECKPOINTS.items():
        with tf1.Graph().as_default(), tf1.Session() as session:
            for name, shape in shapes.items():
                full = f"transformer/{name}"
                tf1.get_variable(full, initializer=values(full, shape), use_resource=False)
                if name.endswith("_bias"):  # the others' would only be more bytes
                    for slot in ("Adam", "Adam_1"):
                        tf1.get_variable(f"{full}/{slot}", initializer=np.zeros(shape, np.float32), use_resource=False)
            tf1.get_variable("beta1_power", initializer=np.float32(0.9), use_resource=False)
            tf1.get_variable("beta2_power", initializer=np.float32(0.99), use_resource=False)
            tf1.get_variable("global_step", initializer=np.int64(3), use_resource=False)
            session.run(tf1.global_variables_initializer())
            tf1.train.Saver().save(session, str(HERE / f"{kind}.ckpt"), global_step=3, write_meta_graph=False,
                                   write_state=False)  # fmt: skip
    print(f"TensorFlow {tf.__version__}", file=sys.stderr)


if __name__ == "__main__":
    write()
