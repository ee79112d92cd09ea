"""A TensorFlow checkpoint as safetensors, for `txl import`. Runs wherever TensorFlow is."""

import sys

import numpy as np
import tensorflow as tf
from safetensors.numpy import save_file

if len(sys.argv) != 3:
    sys.exit("usage: python examples/tensorflow_checkpoint.py PREFIX OUT.safetensors")
reader = tf.train.load_checkpoint(sys.argv[1])
names = reader.get_variable_to_shape_map()
save_file({name: np.ascontiguousarray(reader.get_tensor(name)) for name in names}, sys.argv[2])
