"""The released code's vocabulary."""

from collections import Counter, OrderedDict


class Vocab:
    def __init__(self, words):
        self.counter, self.idx2sym, self.lower_case = Counter(words), list(words), False
        self.sym2idx = OrderedDict((word, n) for n, word in enumerate(words))
