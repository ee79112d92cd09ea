// What the generic kernels need, included before any target pragma. No templates of the standard
// library: an instantiation compiled for one instruction set could be linked into code that runs on
// another.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../buffer.h"
#include "../parallel.h"
#include "../problem.h"
