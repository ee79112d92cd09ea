"""Tensor maps are kept, and are those of the tensors that a call gives."""

import subprocess
from pathlib import Path

from cuda_emulation import CSRC, FLAGS, HERE

# Prints whether all maps were right, and how many were encoded in each part.
PROGRAM = """
#include <cstddef>
#include <cstdio>
#include <thread>
#include <vector>

#include "hopper/tensor_map.cuh"

using namespace txl_cuda;

static std::atomic<bool> right{true};
static char* address(int64_t n) { return reinterpret_cast<char*>((int64_t{1} << 40) + 512 * n); }  // nothing reads there

// A layer's tensor [2, 3, rows, 64] at the n-th address, and its map.
static void use(int64_t n, int64_t rows = 40, int64_t row = 80, Type type = Type::bf16, int box = 128) {
  const int64_t head = 50 * row, batch_row = 3 * head, columns = box / 2;
  char* const data = address(n);
  const RowsMap found = map_rows({data, batch_row, head, row}, type, 2, 3, rows, columns, box);
  const int64_t sizes[4] = {columns, rows, 3, 2}, steps[4] = {2, 2 * row, 2 * head, 2 * batch_row};
  const TensorMap& x = found.map;
  const bool same = x.data == data && !std::memcmp(x.sizes, sizes, sizeof sizes) &&
                    !std::memcmp(x.steps, steps, sizeof steps) && x.item == 2 && x.swizzle == box &&
                    x.box[0] == columns && x.box[1] == 64 && x.box[2] == 1 && x.box[3] == 1;
  if (!same || found.h != 1 || found.n != 1) right = false;
}

static void sums(int64_t n, int64_t tables, int box) {
  Problem p;
  p.D = 64, p.H = 3;
  const auto data = reinterpret_cast<const float*>(address(n));
  const TensorMap x = map_sums(p, data, tables, 10, box);
  if (x.data != data || x.item != 4 || x.sizes[3] != tables || x.box[1] != box) right = false;
}

int main() {
  auto part = [before = int64_t{0}](const char* name) mutable {
    std::printf("%s %ld\\n", name, static_cast<long>(encodings - before));
    before = encodings;
  };
  for (int call = 0; call < 10; ++call) use(1);
  part("one-address");
  for (int call = 0; call < 10; ++call) use(2 + call % 2);
  part("two-in-turns");
  for (int64_t n = 4; n < 8; ++n) use(n);
  for (int64_t n = 1; n < 8; ++n) use(n);
  part("four-others-and-back");
  for (int call = 0; call < 3; ++call) {
    use(1, 41), use(1, 40, 88), use(1, 40, 80, Type::f16), use(1, 40, 80, Type::bf16, 32);
    sums(1, 1, 64), sums(1, 2, 64), sums(1, 2, 32);
  }
  part("one-address-otherwise");
  for (int call = 0; call < 3; ++call)
    for (int64_t n = 0; n < 400; ++n) use(n);
  part("maps-of-a-model");
  for (int64_t n = 0; n < 10000; ++n) use(n);
  part("more-than-are-kept");
  use(1), use(9999);
  part("the-first-and-the-last-of-them");
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread)
    threads.emplace_back([thread] {
      for (int64_t n = 0; n < 20000; ++n) use(20000 + n * (2 * thread + 1) % 1500);
    });
  for (std::thread& thread : threads) thread.join();
  std::puts(right ? "right" : "wrong");
}
"""


def test_maps_of_addresses_that_change_and_come_back(tmp_path: Path) -> None:
    """In several threads, too, of which ThreadSanitizer finds no race."""
    source, program = tmp_path / "maps.cpp", tmp_path / "maps"
    source.write_text(PROGRAM)
    command = ["g++", *FLAGS, "-O1", "-g", "-fsanitize=thread", "-I", str(CSRC), "-I", str(HERE), str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *counts, said = done.stdout.split("\n")[:-1]
    assert said == "right"
    assert dict(line.split() for line in counts) == {
        "one-address": "1",
        "two-in-turns": "2",
        "four-others-and-back": "4",
        "one-address-otherwise": "7",
        "maps-of-a-model": "393",
        "more-than-are-kept": "9600",
        "the-first-and-the-last-of-them": "1",
    }
